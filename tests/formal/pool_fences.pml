/* The two fences of one decode pool: blocks, steps on the device, reads of the NIC.
 *
 * A released block may be given away when no dispatched step and no posted read can touch it any
 * more. Steps run late and are reported in any order, reads land late, in part, or never, and a
 * request may end at any moment. docs/formal-model.md maps each action to the code.
 *
 * Guards, each off by its macro: NO_STEP_FENCE, FENCE_ON_OLDEST_STEP, FENCE_BY_NEWEST_SEEN,
 * NO_READ_FENCE, CANCEL_IS_PROOF, FAILURE_IS_PROOF, DISCONNECT_IS_PROOF, NO_READ_TIMEOUT,
 * MATCH_BY_OWNER, ZERO_RECEIVING, ZERO_OUTSIDE_STEP, PREEMPT_IN_FLIGHT. NEVER_DELIVERED is none, and
 * asks whether anything comes through.
 *
 * Worlds: DEPTH (steps in flight), NO_READS (nobody writes from outside), DEVICE_IN_ORDER (steps
 * run in the order of their dispatch), END_BETWEEN_STEPS (no request ends while a step runs),
 * PATIENT (no client leaves while its KV is on the way), and LOOSE (a stale write counts only where
 * a live owner would use what it spoilt).
 */

#ifndef NB
#define NB 3 /* blocks */
#endif
#ifndef DEPTH
#define DEPTH 2 /* steps in flight; at most 2 */
#endif
#ifndef READ_BLOCKS
#define READ_BLOCKS 2 /* blocks of one read, each a descriptor of its own */
#endif
#ifndef MAX_BLOCKS
#define MAX_BLOCKS 2 /* blocks that one request may hold */
#endif
#define NR 2 /* requests; each comes again after its end */
#define NO 2 /* reads that may be outstanding */

#define BIT(i) (1 << (i))

/* Scratch of one atomic turn: written before it is read, no part of a state. */
hidden byte b, i, n, o, s, owned, who;

/* Phases of a request, as far as its blocks are concerned. */
#define ABSENT 0
#define RECEIVING 1
#define RUNNING 2
#define WAITING 3 /* preempted */

/* Phases of a step slot. */
#define IDLE 0
#define DISPATCHED 1
#define EXECUTED 2

/* --- What the block manager knows ------------------------------------------------------------ */

byte phase[NR];
byte owner[NB];    /* Hold.OWNER: 0, or the request plus 1 */
byte waits[2];     /* Hold.STEP: blocks of deferred releases that wait for this step */
byte touches[2];   /* requests, in their present life, whose blocks this step may touch */
byte pending[NO];  /* Hold.OPERATION and Hold.WRITE: blocks that this read names */
byte zero_list;    /* new blocks that the next step must clear */
byte newest;       /* slot of the newest step */
byte parts[2];     /* sequences that the step's output is for */
byte in_flight[NR];/* a sequence's own count of its steps */

/* --- What the reader knows ------------------------------------------------------------------- */

byte reads_for[NO];   /* request */
byte is_wanted[NO];   /* 0: quarantined, nobody waits for it */

/* --- What device and NIC do, whatever anybody knows ------------------------------------------ */

byte step[2];       /* phase of each step slot */
byte writes[2];     /* blocks that it will write, frozen at dispatch */
byte clears[2];     /* blocks that it will clear before */
byte uses[2];       /* requests whose bytes it reads or writes */
byte runs_after[2]; /* 1: the other slot's step must run before, and has not */
byte unwritten[NO]; /* blocks that the read has not written yet, and may */
byte is_posted[NO]; /* the transport has not said its last word on it */

/* --- Ghosts: whose bytes are where ----------------------------------------------------------- */

byte step_is_stale[2];  /* blocks that have a new life since the step was dispatched */
byte read_is_stale[NO]; /* blocks that have a new life since the read was posted */
byte valid;  /* blocks whose owner counts on what is in them */
byte intact; /* blocks that hold what their owner's own writers wrote */

#define HELD_BY_STEP (waits[0] | waits[1])
#ifdef NO_READ_FENCE
#define HELD_BY_READ 0
#else
#define HELD_BY_READ (pending[0] | pending[1])
#endif
#define IS_FREE(b) (owner[b] == 0 && !((HELD_BY_STEP | HELD_BY_READ) & BIT(b)))
#define IS_WITHHELD(b) (owner[b] == 0 && ((HELD_BY_STEP | HELD_BY_READ) & BIT(b)))
#if NB > 2
#define NUM_FREE (IS_FREE(0) + IS_FREE(1) + IS_FREE(2))
#define NUM_OWNED(r) ((owner[0] == r + 1) + (owner[1] == r + 1) + (owner[2] == r + 1))
#define FIRST_OWNED(r) (owner[0] == r + 1 -> 0 : (owner[1] == r + 1 -> 1 : 2))
#define LAST_OWNED(r) (owner[2] == r + 1 -> 2 : (owner[1] == r + 1 -> 1 : 0))
#else
#define NUM_FREE (IS_FREE(0) + IS_FREE(1))
#define NUM_OWNED(r) ((owner[0] == r + 1) + (owner[1] == r + 1))
#define FIRST_OWNED(r) (owner[0] == r + 1 -> 0 : 1)
#define LAST_OWNED(r) (owner[1] == r + 1 -> 1 : 0)
#endif
#ifdef END_BETWEEN_STEPS
#define MAY_END(r) (NUM_STEPS == 0)
#else
#ifdef PATIENT
#define MAY_END(r) (phase[r] != RECEIVING)
#else
#define MAY_END(r) true
#endif
#endif
#ifdef PREEMPT_IN_FLIGHT
#define MAY_BE_PREEMPTED(r) true
#else
#define MAY_BE_PREEMPTED(r) (in_flight[r] == 0)
#endif
#ifdef DEVICE_IN_ORDER
#define IS_ORDERED(s) true
#else
#define IS_ORDERED(s) (uses[0] & uses[1]) /* one's output is the other's input */
#endif
#define SLOT_IS_FREE(o) (pending[o] == 0 && !is_posted[o])
#define NUM_STEPS ((step[0] != IDLE) + (step[1] != IDLE))

/* owned = the blocks that request r owns */
inline blocks_of(r) {
    owned = 0; i = 0;
    do
    :: i < NB -> if :: owner[i] == r + 1 -> owned = owned | BIT(i) :: else fi; i++
    :: else -> break
    od
}

/* BlockPool.allocate of one block. FREE blocks are alike, so the first stands for any. */
inline allocate(r) {
    b = 0;
    do :: IS_FREE(b) -> break :: else -> b++ od;
    /* A new life: whoever may still write the block does it for an older one. */
    i = 0;
    do
    :: i < 2 ->
        step_is_stale[i] = step_is_stale[i] | ((writes[i] | clears[i]) & BIT(b));
        read_is_stale[i] = read_is_stale[i] | (unwritten[i] & BIT(b));
        i++
    :: else -> break
    od;
    owner[b] = r + 1;
    intact = intact & ~BIT(b);
    valid = valid & ~BIT(b)
}

/* A step or a read writes block b; `stale` are the blocks that it has no business in any more. */
inline write(b, stale, is_clearing) {
#ifndef LOOSE
    assert(!IS_FREE(b)); /* nothing writes a FREE block */
    assert(owner[b] == 0 || !(stale & BIT(b))); /* no stale writer writes a live block */
#endif
    if
    :: is_clearing || owner[b] == 0 || (stale & BIT(b)) -> intact = intact & ~BIT(b)
    :: else -> intact = intact | BIT(b)
    fi
}

/* BlockManager.release: at once for the owner, behind the fences for the blocks. */
inline release(r) {
    blocks_of(r);
    assert(!(HELD_BY_STEP & owned)); /* released once */
    zero_list = zero_list & ~owned;
    valid = valid & ~owned;
    i = 0;
    do
    :: i < 2 ->
        if
#ifndef NO_STEP_FENCE
#ifdef FENCE_ON_OLDEST_STEP
        :: (touches[i] & BIT(r)) && (i != newest || !(touches[1 - newest] & BIT(r))) ->
            waits[i] = waits[i] | owned
#else
        :: touches[i] & BIT(r) -> waits[i] = waits[i] | owned
#endif
#endif
        :: else
        fi;
        i++
    :: else -> break
    od;
    touches[0] = touches[0] & ~BIT(r);
    touches[1] = touches[1] & ~BIT(r);
    i = 0;
    do
    :: i < NB -> if :: owner[i] == r + 1 -> owner[i] = 0 :: else fi; i++
    :: else -> break
    od
}

/* SequenceTable.end: output that still comes is for nobody. */
inline end(r) {
    release(r);
    parts[0] = parts[0] & ~BIT(r);
    parts[1] = parts[1] & ~BIT(r);
    phase[r] = ABSENT
}

/* Reader.cancel: the request is gone, its reads go on in quarantine. */
inline cancel_reads(r) {
    i = 0;
    do
    :: i < NO ->
        if
        :: pending[i] && reads_for[i] == r && is_wanted[i] ->
            is_wanted[i] = 0;
#ifdef CANCEL_IS_PROOF
            pending[i] = 0;
#endif
        :: else
        fi;
        i++
    :: else -> break
    od
}

/* Receiver._deliver: the request may run on what has landed. */
inline deliver(slot) {
    who = reads_for[slot];
    if
#ifdef MATCH_BY_OWNER
    :: phase[who] == RECEIVING ->
        blocks_of(who);
        valid = valid | owned;
        phase[who] = RUNNING
#else
    :: is_wanted[slot] ->
#ifdef NEVER_DELIVERED
        assert(!HELD_BY_STEP);
#endif
        valid = valid | pending[slot];
        phase[who] = RUNNING
#endif
    :: else
    fi
}

/* Fail: the request that waited for the read is lost, as by an abort. */
inline lose(slot) {
    if
    :: is_wanted[slot] ->
        who = reads_for[slot];
        end(who)
    :: else
    fi
}

/* OperationTerminal and BlockManager.end_operation: nothing of the read will write any more. */
inline end_read(slot) {
    pending[slot] = 0;
    is_wanted[slot] = 0;
    if
    :: !is_posted[slot] -> reads_for[slot] = 0; read_is_stale[slot] = 0
    :: else
    fi
}


/* One request and what the event loop decides for it, a turn at a time. */
proctype Request(byte r) {
    do
    /* BlockManager.admit of a prompt that is computed here */
    :: atomic {
        (phase[r] == ABSENT || phase[r] == WAITING) && NUM_FREE >= 1 ->
            allocate(r);
            zero_list = zero_list | BIT(b);
            in_flight[r] = 0;
            phase[r] = RUNNING
    }
#ifndef NO_READS
    /* BlockManager.begin_receive, then the read is posted */
    :: atomic {
        phase[r] == ABSENT && NUM_FREE >= READ_BLOCKS && (SLOT_IS_FREE(0) || SLOT_IS_FREE(1)) ->
            o = (SLOT_IS_FREE(0) -> 0 : 1);
            n = 0;
            do
            :: n < READ_BLOCKS ->
                allocate(r);
                pending[o] = pending[o] | BIT(b);
                n++
            :: else -> break
            od;
#ifdef ZERO_RECEIVING
            zero_list = zero_list | pending[o];
#endif
            unwritten[o] = pending[o];
            reads_for[o] = r;
            is_wanted[o] = 1;
            is_posted[o] = 1;
            in_flight[r] = 0;
            phase[r] = RECEIVING
    }
#endif
    /* BlockManager.grow */
    :: atomic {
        phase[r] == RUNNING && NUM_FREE >= 1 && NUM_OWNED(r) < MAX_BLOCKS ->
            allocate(r);
            zero_list = zero_list | BIT(b)
    }
    /* Finished, stopped, aborted, or lost: any end, at any moment */
    :: atomic {
        phase[r] != ABSENT && MAY_END(r) ->
            cancel_reads(r);
            end(r)
    }
    /* SequenceTable.preempt: the sequence stays, and will be computed anew */
    :: atomic {
        phase[r] == RUNNING && MAY_BE_PREEMPTED(r) ->
            release(r);
            phase[r] = WAITING
    }
    od
}

/* BlockManager.dispatch_step and take_zero_list: any set of running requests, one block each. */
proctype Dispatcher() {
    do
    :: atomic {
        NUM_STEPS < DEPTH && (phase[0] == RUNNING || phase[1] == RUNNING) ->
            s = (step[0] == IDLE -> 0 : 1);
            if
            :: phase[0] == RUNNING -> who = BIT(0)
            :: phase[1] == RUNNING -> who = BIT(1)
            :: phase[0] == RUNNING && phase[1] == RUNNING -> who = BIT(0) | BIT(1)
            fi;
            touches[s] = who;
            parts[s] = who;
            writes[s] = 0;
            i = 0;
            do
            :: i < NR ->
                if
                :: who & BIT(i) ->
                    in_flight[i]++;
                    if
                    :: b = FIRST_OWNED(i)
                    :: b = LAST_OWNED(i)
                    fi;
                    writes[s] = writes[s] | BIT(b)
                :: else
                fi;
                i++
            :: else -> break
            od;
            clears[s] = zero_list;
            b = 0;
            do
            :: b < NB ->
                if
                :: zero_list & BIT(b) ->
                    who = who | BIT(owner[b] - 1);
#ifndef ZERO_OUTSIDE_STEP
                    touches[s] = touches[s] | BIT(owner[b] - 1)
#endif
                :: else
                fi;
                b++
            :: else -> break
            od;
            zero_list = 0;
            uses[s] = who;
            runs_after[s] = (step[1 - s] == DISPATCHED && IS_ORDERED(s));
            newest = s;
            step[s] = DISPATCHED
    }
    od
}

/* One step in flight: it runs, late, and its output is taken, later. */
proctype Step(byte slot) {
    do
    :: atomic {
        step[slot] == DISPATCHED && !runs_after[slot] ->
            b = 0;
            do
            :: b < NB ->
                if
                :: clears[slot] & BIT(b) -> write(b, step_is_stale[slot], true)
                :: else
                fi;
                if
                :: owner[b] != 0 && (parts[slot] & BIT(owner[b] - 1)) ->
                    assert(!(valid & BIT(b)) || (intact & BIT(b))) /* attention reads its own */
                :: else
                fi;
                if
                :: writes[slot] & BIT(b) ->
                    write(b, step_is_stale[slot], false);
                    if
                    :: intact & BIT(b) -> valid = valid | BIT(b)
                    :: else
                    fi
                :: else
                fi;
                b++
            :: else -> break
            od;
            writes[slot] = 0;
            clears[slot] = 0;
            uses[slot] = 0;
            step_is_stale[slot] = 0;
            runs_after[slot] = 0;
            runs_after[1 - slot] = 0;
            step[slot] = EXECUTED
    }
    /* DecodeScheduler.complete and BlockManager.complete_step */
    :: atomic {
        step[slot] == EXECUTED ->
            i = 0;
            do
            :: i < NR ->
                if
                :: (parts[slot] & BIT(i)) && phase[i] == RUNNING ->
                    assert(in_flight[i] > 0);
                    in_flight[i]--
                :: else
                fi;
                i++
            :: else -> break
            od;
            waits[slot] = 0;
#ifdef FENCE_BY_NEWEST_SEEN
            if
            :: slot == newest -> waits[1 - slot] = 0
            :: else
            fi;
#endif
            touches[slot] = 0;
            parts[slot] = 0;
            newest = 0;
            step[slot] = IDLE
    }
    od
}

/* One read. Its blocks are written in any order, and its end is told later, or never comes. */
proctype Read(byte slot) {
    do
    :: atomic {
        is_posted[slot] && unwritten[slot] ->
            if
            :: unwritten[slot] & BIT(0) -> b = 0
            :: unwritten[slot] & BIT(1) -> b = 1
#if NB > 2
            :: unwritten[slot] & BIT(2) -> b = 2
#endif
            fi;
            write(b, read_is_stale[slot], false);
            unwritten[slot] = unwritten[slot] & ~BIT(b)
    }
    /* Reader.landed: every byte is here */
    :: atomic {
        is_posted[slot] && unwritten[slot] == 0 ->
            is_posted[slot] = 0;
            deliver(slot);
            end_read(slot)
    }
    /* Reader.read_failed: part of it may have landed; the transport has ended its peer before */
    :: atomic {
        is_posted[slot] && unwritten[slot] && pending[slot] ->
#ifndef FAILURE_IS_PROOF
            unwritten[slot] = 0;
            is_posted[slot] = 0;
#endif
            lose(slot);
            end_read(slot)
    }
#ifdef LIVENESS
    /* The source is frozen: nothing comes until the endpoint is torn down */
    :: is_posted[slot] -> is_posted[slot] == 0
#endif
    od
}

#ifndef NO_READ_TIMEOUT
/* Endpoints.tick, tear_down, bound_quarantine: forced end of a read that takes too long. */
proctype Deadline(byte slot) {
    do
    :: atomic {
        pending[slot] && is_posted[slot] ->
#ifndef DISCONNECT_IS_PROOF
            unwritten[slot] = 0;
            is_posted[slot] = 0;
#endif
            lose(slot);
            end_read(slot)
    }
    od
}
#endif

init {
    atomic {
        run Request(0);
        run Request(1);
        run Dispatcher();
        run Step(0);
#if DEPTH > 1
        run Step(1);
#endif
#ifndef NO_READS
        run Read(0);
        run Read(1);
#ifndef NO_READ_TIMEOUT
        run Deadline(0);
        run Deadline(1);
#endif
#endif
    }
}

#ifdef LIVENESS
/* Whatever withholds a block ends, with no new work needed. Blocks and requests are alike. */
ltl every_release_ends { [] (IS_WITHHELD(0) -> <> !IS_WITHHELD(0)) }
ltl every_receive_ends { [] (phase[0] == RECEIVING -> <> (phase[0] != RECEIVING)) }
#endif
