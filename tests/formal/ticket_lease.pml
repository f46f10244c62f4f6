/* Tickets, leases, releases, withdrawals and tear-down between a decode and a prefill worker.
 *
 * Decode asks for one request, at most in two attempts; prefill answers with two tickets, and may
 * be killed and come again as another incarnation. Messages may be lost or come twice, late.
 * Reads land when they like, or never. Either worker may stop for ever. Every run is finite, so
 * what holds where nothing can happen any more is what always comes in the end.
 * docs/formal-model.md maps each action to the code.
 *
 * Guards, each off by its macro; NEVER_DELIVERED is none, and asks whether anything comes through.
 * Decode: TRUST_AFTER_LEASE, LEASE_FROM_RECEIPT, RENEWAL_FROM_RECEIPT, COUNT_PIECES, NO_ATTEMPT,
 * NO_INCARNATION, CANCEL_IS_PROOF, DISCONNECT_IS_PROOF, NO_READ_TIMEOUT, NO_QUARANTINE_BOUND,
 * NO_CONFIRM_TIMEOUT, NO_PREFILL_TIMEOUT.
 * Prefill: NO_ENDED_MEMORY, REVOKE_FREES, LOST_READER_FREES, RELEASE_TWICE, RENEW_WITHOUT_EXTENSION,
 * NO_EXPIRY.
 */

#ifndef LEASE
#define LEASE 2 /* ticks */
#endif
#ifndef END
#define END 4 /* the last tick: no lease reaches beyond, every deadline has come */
#endif
#ifndef NUM_RENEWALS
#define NUM_RENEWALS 2
#endif
#ifndef QUARANTINE_BOUND
#define QUARANTINE_BOUND (NC - 1) /* blocks */
#endif
#define NA 2       /* attempts */
#ifndef NC
#define NC 1 /* pieces of a transfer, at most 2; each is read into a block of its own */
#endif
#ifndef NUM_TROUBLES
#define NUM_TROUBLES 2 /* what may go wrong in one run, in any mixture */
#endif
#define CAPACITY 2 /* messages on their way in each direction; what does not fit is lost */
#define NOBODY 255

#define MIN(a, b) ((a) < (b) -> (a) : (b))
#define MAX(a, b) ((a) > (b) -> (a) : (b))

mtype = {
    PREFILL, RENEW, RELEASED, WITHDRAW,
    TICKET, RENEWED, VOID, FAILED
};
/* kind, attempt, incarnation (of the source), number (of the piece or the renewal) */
chan to_prefill = [CAPACITY] of { mtype, byte, byte, byte };
chan to_decode = [CAPACITY] of { mtype, byte, byte, byte };

hidden byte a, c, g, n, src;
hidden byte must_settle, must_give_up;
hidden mtype kind;

byte now;
byte troubles = NUM_TROUBLES; /* that are left; any number of them may stay out */
bool decode_is_dead; /* stopped for ever */
bool prefill_is_dead;

/* --- Prefill: transfer.tickets.TicketBook ---------------------------------------------------- */

#define NONE 0
#define OPEN 1
#define LEASED 2
#define REVOKED 3

byte incarnation = 1;
byte entry[NA];    /* its blocks are held while it is not NONE */
byte deadline[NA]; /* end of its lease */
byte issued[NA];   /* tickets that are out */
byte ended;        /* attempts that are remembered, one bit each */
byte life[NA];     /* ghost: an attempt that is computed anew has other blocks */

/* --- Decode: transfer.reader.Reader ---------------------------------------------------------- */

#define GONE 0
#define RECEIVING 1
#define CONFIRMING 2

#define ABSENT 0
#define ANNOUNCED 1
#define READING 2
#define LANDED 3

byte num_attempts; /* begun; the last one may be live */
byte state;
byte source[NA];   /* incarnation that an attempt reads from */
byte requested_at;
byte proven_until;
byte piece[NC];
byte piece_of[NC];   /* attempt and life whose blocks its ticket names */
byte landed_at[NC];
byte num_landed;     /* only COUNT_PIECES asks */
byte sent_at[NUM_RENEWALS];
byte unanswered;     /* renewals, one bit each */
byte num_renewals;

/* --- Decode: blocks and reads. Block c takes piece c of whoever holds it --------------------- */

byte holder[NC] = NOBODY;    /* attempt that owns the block */
byte pending[NC] = NOBODY;   /* attempt whose read names it, until the read is terminal */
bool is_quarantined[NC];     /* nobody waits for that read */

/* --- What the NIC does, whatever anybody knows: one read per attempt and piece --------------- */

#define POSTED 1
#define SILENT 2 /* posted to a source that does not answer any more */
#define COPIED 3
#define READ(a, c) ((a) * NC + (c))

byte read[NA * NC];

/* --- Ghosts ---------------------------------------------------------------------------------- */

byte writer[NC] = NOBODY; /* attempt that wrote the block last */
byte good;                /* blocks whose bytes were right when they were copied, one bit each */

#define BIT(i) (1 << (i))
#define CURRENT (num_attempts - 1)
#define IS_LIVE (state != GONE)
#if NC == 1
#define IS_ANNOUNCED (piece[0] != ABSENT)
#define HAS_LANDED (piece[0] == LANDED)
#define LANDED_IN_TIME (landed_at[0] < proven_until)
#define NUM_QUARANTINED (is_quarantined[0])
#define OLDEST pending[0]
#else
#define IS_ANNOUNCED (piece[0] != ABSENT && piece[1] != ABSENT)
#define HAS_LANDED (piece[0] == LANDED && piece[1] == LANDED)
#define LANDED_IN_TIME (landed_at[0] < proven_until && landed_at[1] < proven_until)
#define NUM_QUARANTINED (is_quarantined[0] + is_quarantined[1])
#define OLDEST MIN(pending[0], pending[1])
#endif
#define SOURCE_IS_GONE (prefill_is_dead || source[CURRENT] != incarnation)
#define IS_OFFERED(x) (entry[x] == OPEN || entry[x] == LEASED)
#define HAS_SETTLED(x) (IS_OFFERED(x) && issued[x] < NC)
#define LEASE_HAS_ENDED(x) \
    ((entry[x] == LEASED || entry[x] == REVOKED) && (deadline[x] <= now || now == END))

inline send_prefill(k, x, y, z) {
    if
    :: nfull(to_prefill) -> to_prefill!k(x, y, z)
    :: full(to_prefill) -> skip
    fi
}

inline send_decode(k, x, y, z) {
    if
    :: nfull(to_decode) -> to_decode!k(x, y, z)
    :: full(to_decode) -> skip
    fi
}

/* ============================================ prefill ======================================== */

/* TicketBook._forget, and PrefillWorker._release: the blocks are anybody's from now on. */
inline free_source(x) {
    assert(entry[x] != NONE); /* exactly once */
    entry[x] = NONE;
    deadline[x] = 0;
    issued[x] = 0;
    ended = ended | BIT(x)
}

inline end_by_reader(x) {
    if
#ifndef RELEASE_TWICE
    :: entry[x] == NONE -> skip /* late or unknown: counted, harms nobody */
    :: else -> free_source(x)
#else
    :: true -> free_source(x)
#endif
    fi
}

#ifdef NO_INCARNATION
#define IS_OF_THIS_LIFE true
#else
#define IS_OF_THIS_LIFE (src == incarnation)
#endif

inline take_in_prefill() {
    to_prefill?kind(a, src, n);
    if
    :: kind == PREFILL -> /* TicketBook.open */
        if
#ifdef NO_ENDED_MEMORY
        :: entry[a] == NONE ->
            entry[a] = OPEN;
            life[a] = (ended & BIT(a) -> 1 : 0)
#else
        :: entry[a] == NONE && !(ended & BIT(a)) && !(a == 0 && entry[1] != NONE) ->
            entry[a] = OPEN
#endif
        :: else
        fi
    :: kind == RENEW -> /* TicketBook.renew */
        if
        :: entry[a] == NONE || entry[a] == REVOKED -> send_decode(VOID, a, incarnation, n)
        :: entry[a] == OPEN -> send_decode(RENEWED, a, incarnation, n)
        :: entry[a] == LEASED ->
#ifndef RENEW_WITHOUT_EXTENSION
            deadline[a] = MAX(deadline[a], MIN(now + LEASE, END));
#endif
            send_decode(RENEWED, a, incarnation, n)
        fi
    :: kind == RELEASED -> /* TicketBook.released */
        if
        :: IS_OF_THIS_LIFE -> end_by_reader(a)
        :: else
        fi
    :: kind == WITHDRAW -> end_by_reader(a) /* TicketBook.withdraw */
    fi
}

inline issue() {
    deadline[a] = MAX(deadline[a], MIN(now + LEASE, END));
    entry[a] = LEASED;
    send_decode(TICKET, a, incarnation, issued[a] + NC * life[a]);
    issued[a] = issued[a] + 1
}

inline revoke() {
    send_decode(FAILED, a, incarnation, 0);
    if
    :: entry[a] == OPEN -> free_source(a)
#ifdef REVOKE_FREES
    :: else -> free_source(a)
#else
    :: else -> entry[a] = REVOKED
#endif
    fi
}

proctype Prefill() {
end:
    do
    :: atomic { !prefill_is_dead && nempty(to_prefill) -> take_in_prefill() }
    /* A chunk has settled: PrefillWorker._issue, TicketBook.issue */
    :: atomic {
        !prefill_is_dead && (HAS_SETTLED(0) || HAS_SETTLED(1)) ->
            if
            :: HAS_SETTLED(0) -> a = 0
            :: HAS_SETTLED(1) -> a = 1
            fi;
            issue()
    }
#ifndef NO_EXPIRY
    /* PrefillWorker._expire_leases, TicketBook.expire */
    :: atomic {
        !prefill_is_dead && (LEASE_HAS_ENDED(0) || LEASE_HAS_ENDED(1)) ->
            if
            :: LEASE_HAS_ENDED(0) -> a = 0
            :: LEASE_HAS_ENDED(1) -> a = 1
            fi;
            free_source(a)
    }
#endif
    /* TicketBook.revoke: the source gives up */
    :: atomic {
        !prefill_is_dead && troubles && (IS_OFFERED(0) || IS_OFFERED(1)) ->
            troubles--;
            if
            :: IS_OFFERED(0) -> a = 0
            :: IS_OFFERED(1) -> a = 1
            fi;
            revoke()
    }
    /* TicketBook.reader_lost: silence is no proof of death */
    :: atomic {
        !prefill_is_dead && troubles && (entry[0] != NONE || entry[1] != NONE) ->
            troubles--;
            a = 0;
            do
            :: a < NA ->
                if
#ifdef LOST_READER_FREES
                :: entry[a] != NONE -> free_source(a)
#else
                :: entry[a] == OPEN -> free_source(a)
#endif
                :: else
                fi;
                a++
            :: else -> break
            od
    }
    :: atomic { prefill_is_dead -> break }
    od
}

/* ============================================= decode ======================================== */

/* Endpoints.tear_down and Receiver._tear_down: proves that no read of `src` writes any more. */
inline end_reads_of_source() {
    c = 0;
    do
    :: c < NC ->
        a = 0;
        do
        :: a < NA ->
            if
            :: source[a] == src && read[READ(a, c)] != NONE ->
#ifndef DISCONNECT_IS_PROOF
                read[READ(a, c)] = NONE;
#endif
                if
                :: pending[c] == a ->
                    pending[c] = NOBODY;
                    is_quarantined[c] = false
                :: else
                fi
            :: else
            fi;
            a++
        :: else -> break
        od;
        c++
    :: else -> break
    od
}

/* Endpoints.bound_quarantine: the peer of the oldest quarantined read is torn down. */
inline bound_quarantine() {
#ifndef NO_QUARANTINE_BOUND
    do
    :: NUM_QUARANTINED > QUARANTINE_BOUND ->
        src = source[OLDEST];
        end_reads_of_source()
    :: else -> break
    od;
#endif
    assert(NUM_QUARANTINED <= QUARANTINE_BOUND)
}

/* Receptions.apply to GONE: nobody waits for its reads any more, its blocks are released. */
inline forget_request() {
    c = 0;
    do
    :: c < NC ->
        if
        :: piece[c] == READING && pending[c] == CURRENT ->
#ifdef CANCEL_IS_PROOF
            pending[c] = NOBODY
#else
            is_quarantined[c] = true
#endif
        :: else
        fi;
        if
        :: holder[c] == CURRENT -> holder[c] = NOBODY
        :: else
        fi;
        writer[c] = NOBODY;
        good = good & ~BIT(c);
        piece[c] = ABSENT;
        piece_of[c] = 0;
        landed_at[c] = 0;
        c++
    :: else -> break
    od;
    state = GONE;
    requested_at = 0;
    proven_until = 0;
    num_landed = 0;
    num_renewals = 0;
    unanswered = 0;
    n = 0;
    do
    :: n < NUM_RENEWALS -> sent_at[n] = 0; n++
    :: else -> break
    od;
    bound_quarantine()
}

/* Effects FAIL and WITHDRAW, or WITHDRAW alone. */
inline give_up() {
    send_prefill(WITHDRAW, CURRENT, 0, 0);
    forget_request()
}

/* A tear-down of `src` takes its channel and the live request with it. */
inline tear_down() {
    end_reads_of_source();
    if
    :: IS_LIVE && source[CURRENT] == src ->
        do
        :: nempty(to_decode) -> to_decode?kind(a, c, n)
        :: empty(to_decode) -> break
        od;
        give_up()
    :: else
    fi
}

#ifdef COUNT_PIECES
#define IS_COMPLETE (num_landed >= NC)
#else
#define IS_COMPLETE HAS_LANDED
#endif
#ifdef TRUST_AFTER_LEASE
#define IS_PROVEN true
#else
#define IS_PROVEN LANDED_IN_TIME
#endif

/* SourceLink.renew */
inline renew() {
    if
    :: num_renewals < NUM_RENEWALS ->
        sent_at[num_renewals] = now;
        unanswered = unanswered | BIT(num_renewals);
        send_prefill(RENEW, CURRENT, 0, num_renewals);
        num_renewals++
    :: else
    fi
}

/* Receptions.settle, Receiver._deliver */
inline settle() {
    if
    :: IS_COMPLETE && IS_PROVEN ->
        c = 0;
        do
        :: c < NC ->
            assert(good & BIT(c)); /* the source held what was copied */
            assert(holder[c] == CURRENT && writer[c] == CURRENT); /* nobody else wrote here */
            c++
        :: else -> break
        od;
#ifdef NEVER_DELIVERED
        assert(num_attempts < NA);
#endif
        send_prefill(RELEASED, CURRENT, source[CURRENT], 0);
        forget_request()
    :: IS_COMPLETE && !IS_PROVEN && state == RECEIVING ->
        state = CONFIRMING;
        renew()
    :: else
    fi
}

#ifdef NO_ATTEMPT
#define IS_OF_ATTEMPT true
#else
#define IS_OF_ATTEMPT (a == CURRENT)
#endif
#ifdef NO_INCARNATION
#define IS_OF_SOURCE true
#else
#define IS_OF_SOURCE (src == source[CURRENT])
#endif
#define IS_EXPECTED (IS_LIVE && IS_OF_ATTEMPT && IS_OF_SOURCE)

inline take_in_decode() {
    to_decode?kind(a, src, n);
    must_settle = false;
    must_give_up = false;
    if
    :: !(IS_EXPECTED) -> skip /* stale: counted */
    :: IS_EXPECTED && kind == TICKET -> /* Reader.ticket */
        c = n % NC;
        g = a + NA * (n / NC);
        if
        :: piece[c] == ABSENT ->
            piece[c] = ANNOUNCED;
            piece_of[c] = g;
#ifdef LEASE_FROM_RECEIPT
            proven_until = MAX(proven_until, MIN(now + LEASE, END))
#else
            proven_until = MAX(proven_until, MIN(requested_at + LEASE, END))
#endif
#ifdef COUNT_PIECES
        :: piece[c] == LANDED ->
            num_landed++;
            must_settle = true
#endif
        :: piece[c] != ABSENT && piece_of[c] != g -> must_give_up = true /* names other blocks */
        :: else /* it came twice */
        fi
    :: IS_EXPECTED && kind == RENEWED -> /* Reader.renewed */
        if
        :: unanswered & BIT(n) ->
            unanswered = unanswered & ~(BIT(n + 1) - 1);
#ifdef RENEWAL_FROM_RECEIPT
            proven_until = MAX(proven_until, MIN(now + LEASE, END));
#else
            proven_until = MAX(proven_until, MIN(sent_at[n] + LEASE, END));
#endif
            must_settle = (state == CONFIRMING)
        :: else
        fi
    :: IS_EXPECTED && kind == VOID -> must_give_up = ((unanswered & BIT(n)) != 0)
    :: IS_EXPECTED && kind == FAILED -> must_give_up = true /* Reader.prefill_failed */
    fi;
    if
    :: must_settle -> settle()
    :: must_give_up -> give_up()
    :: else
    fi
}

/* Receiver._allocate and Reader.allocated: only a FREE block is given. */
inline post(x) {
    holder[x] = CURRENT;
    pending[x] = CURRENT;
    writer[x] = NOBODY;
    good = good & ~BIT(x);
    piece[x] = READING;
    if
    :: read[READ(CURRENT, x)] = POSTED
    :: read[READ(CURRENT, x)] = SILENT
    fi
}

#define IS_FREE(x) (holder[x] == NOBODY && pending[x] == NOBODY)

proctype Decode() {
end:
    do
    /* Receiver._ask, Reader.requested. A retry is another attempt, and pairs anew */
    :: atomic {
        !decode_is_dead && !IS_LIVE && num_attempts < NA && !prefill_is_dead ->
            num_attempts++;
            source[CURRENT] = incarnation;
            state = RECEIVING;
            requested_at = now;
            send_prefill(PREFILL, CURRENT, incarnation, 0)
    }
    :: atomic { !decode_is_dead && nempty(to_decode) -> take_in_decode() }
    :: atomic { !decode_is_dead && piece[0] == ANNOUNCED && IS_FREE(0) -> post(0) }
#if NC > 1
    :: atomic { !decode_is_dead && piece[1] == ANNOUNCED && IS_FREE(1) -> post(1) }
#endif
    /* Endpoints.tick: a renewal is due */
    :: atomic { !decode_is_dead && IS_LIVE && num_renewals < NUM_RENEWALS -> renew() }
    /* Receptions.tick: tickets or the confirmation do not come */
#ifndef NO_PREFILL_TIMEOUT
    :: atomic { !decode_is_dead && state == RECEIVING && !(IS_ANNOUNCED) -> give_up() }
#endif
#ifndef NO_CONFIRM_TIMEOUT
    :: atomic { !decode_is_dead && state == CONFIRMING -> give_up() }
#endif
    /* Reader.cancel */
    :: atomic { !decode_is_dead && troubles && IS_LIVE -> troubles--; give_up() }
    /* Reader.source_lost, rightly or not */
    :: atomic {
        !decode_is_dead && IS_LIVE && (troubles || SOURCE_IS_GONE) ->
            if
            :: SOURCE_IS_GONE -> skip
            :: else -> troubles--
            fi;
            src = source[CURRENT];
            tear_down()
    }
    :: atomic { decode_is_dead -> break }
    od
}

/* Whether the source still has the bytes that a ticket has named. */
#define IS_HELD(named) \
    (entry[named % NA] != NONE && life[named % NA] == named / NA)

inline copy(x) {
    assert(holder[x] == NOBODY || holder[x] == a); /* no stale writer, no live block */
    writer[x] = a;
    read[READ(a, x)] = (source[a] == incarnation -> COPIED : SILENT); /* the dead complete nothing */
    if
    :: pending[x] == a && !is_quarantined[x] && IS_HELD(piece_of[x]) -> good = good | BIT(x)
    :: else -> good = good & ~BIT(x)
    fi
}

inline land(x) {
    read[READ(a, x)] = NONE;
    if
    :: pending[x] == a && !is_quarantined[x] ->
        pending[x] = NOBODY;
        piece[x] = LANDED;
        landed_at[x] = now;
        num_landed++;
        settle()
    :: pending[x] == a && is_quarantined[x] ->
        pending[x] = NOBODY;
        is_quarantined[x] = false
    :: else /* its end was told before */
    fi
}

/* The reads of block x: the NIC copies; then its worker learns of it. */
proctype Nic(byte x) {
end:
    do
    :: atomic {
        read[READ(0, x)] == POSTED || read[READ(1, x)] == POSTED ->
            if
            :: read[READ(0, x)] == POSTED -> a = 0
            :: read[READ(1, x)] == POSTED -> a = 1
            fi;
            copy(x)
    }
    /* Reader.landed */
    :: atomic {
        !decode_is_dead && (read[READ(0, x)] == COPIED || read[READ(1, x)] == COPIED) ->
            if
            :: read[READ(0, x)] == COPIED -> a = 0
            :: read[READ(1, x)] == COPIED -> a = 1
            fi;
            land(x)
    }
    /* Transport.poll finds a failure, or Endpoints.tick a read that takes too long */
#ifndef NO_READ_TIMEOUT
    :: atomic {
        !decode_is_dead && pending[x] != NOBODY ->
            src = source[pending[x]];
            tear_down()
    }
#endif
    od
}

/* ============================================= the world ===================================== */

proctype World() {
    do
    /* Time passes while somebody waits for it */
    :: atomic { now < END && (IS_LIVE || entry[0] != NONE || entry[1] != NONE) -> now++ }
    :: atomic { troubles -> troubles = 0 }
    :: atomic { troubles && !decode_is_dead -> troubles--; decode_is_dead = true }
    :: atomic { troubles && !prefill_is_dead -> troubles--; prefill_is_dead = true }
    /* Prefill is killed and restarted; what was sent to the old one may still reach the new */
    :: atomic {
        troubles && incarnation == 1 ->
            troubles--;
            incarnation = 2;
            a = 0;
            do
            :: a < NA -> entry[a] = NONE; deadline[a] = 0; issued[a] = 0; life[a] = 0; a++
            :: else -> break
            od;
            ended = 0
    }
    /* Messages are lost, and come twice */
    :: atomic { troubles && nempty(to_prefill) -> troubles--; to_prefill?kind(a, src, n) }
    :: atomic { troubles && nempty(to_decode) -> troubles--; to_decode?kind(a, src, n) }
    :: atomic {
        troubles && len(to_prefill) == 1 ->
            troubles--;
            to_prefill?<kind(a, src, n)>;
            to_prefill!kind(a, src, n)
    }
    :: atomic {
        troubles && len(to_decode) == 1 ->
            troubles--;
            to_decode?<kind(a, src, n)>;
            to_decode!kind(a, src, n)
    }
    /* Nothing can happen any more */
    :: timeout ->
        assert(decode_is_dead || !IS_LIVE);
        assert(decode_is_dead || IS_FREE(0));
#if NC > 1
        assert(decode_is_dead || IS_FREE(1));
#endif
        assert(prefill_is_dead || (entry[0] == NONE && entry[1] == NONE));
        break
    od
}

init {
    atomic {
        run Prefill();
        run Decode();
        run Nic(0);
#if NC > 1
        run Nic(1);
#endif
        run World()
    }
}
