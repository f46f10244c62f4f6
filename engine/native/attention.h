// Attention over paged KV, by tiles of one KV head's query rows against tiles of tokens with a
// running softmax (FlashAttention-2, arXiv:2307.08691). Decode is the same with few rows: every
// byte of K and V is read once per tile of queries. A slot that no row may see is never read.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "float8.h"
#include "step.h"
#include "team.h"

namespace sluice {

constexpr int TOKENS = 2 * PANEL;  // of one KV tile
constexpr int TARGET_ROWS = 96;    // query rows of one tile: query tokens x heads of one KV head

struct QueryTile {
    int sequence;
    int first_row, tokens;  // rows of the step
    int first_position;
};

static inline std::vector<QueryTile> query_tiles(const Step& step, int heads_per_kv) {
    const int most = std::max(1, TARGET_ROWS / heads_per_kv);
    std::vector<QueryTile> tiles;
    for (int s = 0; s < step.sequences; ++s) {
        const int start = step.query_starts[s], end = step.query_starts[s + 1];
        for (int row = start; row < end; row += most)
            tiles.push_back({s, row, std::min(most, end - row), step.kv_lens[s] - (end - row)});
    }
    // The longest first, so that no thread ends with one alone.
    std::stable_sort(tiles.begin(), tiles.end(), [](const QueryTile& a, const QueryTile& b) {
        return int64_t(a.first_position + a.tokens) * a.tokens >
               int64_t(b.first_position + b.tokens) * b.tokens;
    });
    return tiles;
}

// What the rows of one query tile see together: the tokens before `sinks`, and [low, high].
struct Span {
    int sinks, low, high;

    Span(const KVHead& head, const QueryTile& tile)
        : high(tile.first_position + tile.tokens - 1) {
        low = head.window ? std::max(0, tile.first_position - int(head.window - 1)) : 0;
        sinks = std::min(low, int(head.first_tokens));
    }

    bool has(int token) const { return token <= high && (token >= low || token < sinks); }

    // First tokens of the KV tiles that hold any of it, in order.
    int first_tile() const { return sinks ? 0 : low / TOKENS * TOKENS; }
    int tile_after(int start) const {
        const int next = start + TOKENS;
        return next < sinks ? next : std::max(next, low / TOKENS * TOKENS);
    }
};

// Where each of TOKENS tokens from `first` has its K and V; null outside the span.
struct TokenRows {
    const char* key[TOKENS];
    const char* value[TOKENS];
};

// Also starts to fetch what it finds: the tile is used only after the one before it. S: as stored.
template <class S>
static inline void find_rows(const Step& step, const Attention& layer, int sequence,
                             const KVHead& head, int first, const Span& span, TokenRows& rows) {
    const Group& group = step.groups[head.group];
    const int32_t* table = group.blocks + sequence * group.table_width;
    const int64_t head_nbytes = row_nbytes<S>(layer.head_dim);
    int64_t index = first / step.block_size, offset = first % step.block_size;
    for (int j = 0; j < TOKENS; ++j) {
        if (!span.has(first + j)) {
            rows.key[j] = rows.value[j] = nullptr;
        } else {
            const char* at =
                step.pool + table[index] * step.block_nbytes + offset * layer.token_nbytes;
            rows.key[j] = at + head.key_offset;
            rows.value[j] = at + head.value_offset;
            for (int64_t line = 0; line < head_nbytes; line += 64) {
                __builtin_prefetch(rows.key[j] + line);
                __builtin_prefetch(rows.value[j] + line);
            }
        }
        if (++offset == step.block_size) ++index, offset = 0;
    }
}

// What float8 rows are multiplied with; tokens outside the span have 1, as 0 times NaN is NaN.
struct TokenScales {
    float key[TOKENS];
    float value[TOKENS];
};

// Puts E in the place of the float8 rows that were found.
template <class E>
static inline void widen_rows(const char** rows, int dim, E* wide, float* scales) {
    for (int t = 0; t < TOKENS; ++t, wide += dim) {
        scales[t] = 1.0f;
        if (!rows[t]) continue;
        scales[t] = widen_row(rows[t], dim, wide);
        rows[t] = reinterpret_cast<const char*>(wide);
    }
}

// Keys as two panels [head words][PANEL tokens].
static inline void pack_keys(const TokenRows& rows, int kw, uint32_t* packed) {
    for (int t = 0; t < TOKENS; t += LANES) {
        uint32_t* to = packed + size_t(t / PANEL) * kw * PANEL + t % PANEL;
        int k = 0;
        for (; k + LANES <= kw; k += LANES) {
            vu v[LANES];
            for (int i = 0; i < LANES; ++i)
                v[i] = rows.key[t + i] ? load<vu>(rows.key[t + i] + 4 * size_t(k)) : vu{};
            transpose(v);
            for (int i = 0; i < LANES; ++i) store(to + size_t(k + i) * PANEL, v[i]);
        }
        for (; k < kw; ++k)
            for (int i = 0; i < LANES; ++i) {
                uint32_t word = 0;
                if (rows.key[t + i]) std::memcpy(&word, rows.key[t + i] + 4 * size_t(k), 4);
                to[size_t(k) * PANEL + i] = word;
            }
    }
}

// Values as panels [token words][PANEL columns], the columns past head_dim left zero.
static inline void pack_values(const TokenRows& rows, int head_dim, uint32_t* packed, const float*) {
    for (int t = 0; t < TOKENS; ++t)
        for (int d = 0; d < head_dim; d += PANEL) {
            uint32_t* to = packed + (size_t(d / PANEL) * TOKENS + t) * PANEL;
            const size_t count = size_t(std::min(PANEL, head_dim - d)) * 4;
            if (rows.value[t])
                std::memcpy(to, rows.value[t] + 4 * size_t(d), count);
            else
                std::memset(to, 0, count);
        }
}

static inline void pack_values(const TokenRows& rows, int head_dim, uint32_t* packed, const bf16*) {
    static const uint16_t zeros[4096] = {};
    for (int t = 0; t < TOKENS; t += 2) {
        const auto* even = reinterpret_cast<const uint16_t*>(rows.value[t]);
        const auto* odd = reinterpret_cast<const uint16_t*>(rows.value[t + 1]);
        if (!even) even = zeros;
        if (!odd) odd = zeros;
        for (int d = 0; d < head_dim; d += PANEL) {
            uint32_t* to = packed + (size_t(d / PANEL) * (TOKENS / 2) + t / 2) * PANEL;
            const int count = std::min(PANEL, head_dim - d);
            for (int i = 0; i < count; ++i)
                to[i] = uint32_t(even[d + i]) | uint32_t(odd[d + i]) << 16;
        }
    }
}

// Buffers of one thread, in floats and words.
struct AttentionScratch {
    uint32_t *queries, *keys, *values;
    float *scores, *output, *peak, *total;
    void *weights, *wide;

    static size_t nbytes(size_t rows, int head_dim) {
        const size_t columns = size_t(head_dim + UNIT - 1) / UNIT * UNIT;
        return 64 * 9 + 4 * (rows * head_dim + 2 * TOKENS * size_t(head_dim) + TOKENS * columns +
                             rows * TOKENS * 2 + rows * columns + rows * 2);
    }

    AttentionScratch(char* memory, size_t rows, int head_dim) {
        const size_t columns = size_t(head_dim + UNIT - 1) / UNIT * UNIT;
        auto take = [&](size_t count) {
            char* at = memory;
            memory += (count * 4 + 63) / 64 * 64;
            return at;
        };
        queries = (uint32_t*)take(rows * head_dim);
        keys = (uint32_t*)take(TOKENS * size_t(head_dim));
        values = (uint32_t*)take(TOKENS * columns);
        scores = (float*)take(rows * TOKENS);
        weights = take(rows * TOKENS);
        output = (float*)take(rows * columns);
        peak = (float*)take(rows);
        total = (float*)take(rows);
        wide = take(TOKENS * size_t(head_dim));
    }
};

// Turns one row of scores into weights; columns from `sinks` on outside [first, last] get none. The
// row's output so far is scaled to the new peak. `scales` are of rows stored in float8, else unused.
template <class E, class S>
static inline void softmax_row(float* scores, E* weights, int sinks, int first, int last,
                               float scaling, float softcap, float& peak, float& total, float* output,
                               int output_parts, size_t part_stride, const TokenScales& scales) {
    constexpr bool is_scaled = std::is_same_v<S, float8>;
    const bool partial = first > sinks || last < TOKENS - 1;
    vf best = splat(-std::numeric_limits<float>::infinity());
    for (int j = 0; j < TOKENS; j += LANES) {
        vf s = load<vf>(scores + j) * splat(scaling);
        if constexpr (is_scaled) s *= load<vf>(scales.key + j);
        if (softcap != 0) s = splat(softcap) * tanh(s / splat(softcap));
        if (partial)
            for (int i = 0; i < LANES; ++i)
                s[i] = j + i >= sinks && (j + i < first || j + i > last)
                           ? -std::numeric_limits<float>::infinity()
                           : s[i];
        best = max(best, s);
        store(scores + j, s);
    }
    if (const float top = max_of(best); top > peak) {
        const vf shrink = splat(std::exp(peak - top));
        for (int part = 0; part < output_parts; ++part)
            for (int d = 0; d < UNIT; d += LANES) {
                float* at = output + part * part_stride + d;
                store(at, load<vf>(at) * shrink);
            }
        total *= shrink[0];
        peak = top;
    }
    vf sums{};
    for (int j = 0; j < TOKENS; j += LANES) {
        const vf e = softmax_exp<E>(load<vf>(scores + j) - splat(peak));
        sums += e;
        if constexpr (is_scaled)
            narrow(e * load<vf>(scales.value + j), weights + j);
        else
            narrow(e, weights + j);
    }
    total += sum(sums);
}

// Attention of one tile of query tokens with one KV head. q and out: [tokens][heads][head_dim]. KV is
// stored as S.
template <class E, class S>
static void attend_tile(const Step& step, const Attention& layer, const QueryTile& tile,
                        int kv_head, const E* q, E* out, char* memory) {
    const int per_kv = int(layer.heads / layer.kv_heads), dim = int(layer.head_dim);
    const int rows = tile.tokens * per_kv, kw = words<E>(dim), tw = words<E>(TOKENS);
    const int parts = (dim + UNIT - 1) / UNIT;
    AttentionScratch s(memory, rows, dim);
    for (int t = 0; t < tile.tokens; ++t)
        std::memcpy(s.queries + size_t(t) * per_kv * kw,
                    q + ((tile.first_row + t) * layer.heads + kv_head * per_kv) * dim,
                    size_t(per_kv) * kw * 4);
    for (int row = 0; row < rows; ++row) {
        const bool sink = layer.sinks != nullptr;
        s.peak[row] = sink ? layer.sinks[kv_head * per_kv + row % per_kv]
                           : -std::numeric_limits<float>::infinity();
        s.total[row] = sink ? 1.0f : 0.0f;
    }
    std::memset(s.output, 0, size_t(rows) * parts * UNIT * 4);
    std::memset(s.values, 0, size_t(TOKENS) * parts * UNIT * 4);
    const KVHead& head = layer.places[kv_head];
    const int window = head.window ? int(head.window) : std::numeric_limits<int>::max();
    const Span span(head, tile);
    TokenRows found[2];
    TokenScales scales;
    int start = span.first_tile();
    find_rows<S>(step, layer, tile.sequence, head, start, span, found[0]);
    for (int turn = 0, next; start <= span.high; start = next, turn ^= 1) {
        TokenRows& tokens = found[turn];
        next = span.tile_after(start);
        if (next <= span.high)
            find_rows<S>(step, layer, tile.sequence, head, next, span, found[turn ^ 1]);
        if constexpr (std::is_same_v<S, float8>)
            widen_rows(tokens.key, dim, (E*)s.wide, scales.key);
        pack_keys(tokens, kw, s.keys);
        if constexpr (std::is_same_v<S, float8>)
            widen_rows(tokens.value, dim, (E*)s.wide, scales.value);
        pack_values(tokens, dim, s.values, (const E*)nullptr);
        block<E, 2>(rows, s.queries, kw, s.keys, size_t(kw) * PANEL, kw, s.scores, false);
        E* weights = static_cast<E*>(s.weights);
        for (int row = 0; row < rows; ++row) {
            const int position = tile.first_position + row / per_kv;
            const int first = std::max(0, std::max(0, position - (window - 1)) - start);
            const int last = std::min(TOKENS - 1, position - start);
            const int sinks = std::min(std::max(0, int(head.first_tokens) - start), last + 1);
            if (first > last && sinks <= 0) {
                std::memset(weights + row * TOKENS, 0, TOKENS * sizeof(E));
                continue;
            }
            softmax_row<E, S>(s.scores + row * TOKENS, weights + row * TOKENS, sinks, first, last,
                              layer.scaling, layer.softcap, s.peak[row], s.total[row],
                              s.output + size_t(row) * UNIT, parts, size_t(rows) * UNIT, scales);
        }
        for (int part = 0; part < parts; ++part)
            block<E, 2>(rows, (const uint32_t*)s.weights, tw,
                        s.values + size_t(part) * 2 * tw * PANEL, size_t(tw) * PANEL, tw,
                        s.output + size_t(part) * rows * UNIT, true);
    }
    for (int row = 0; row < rows; ++row) {
        const float scale = 1.0f / s.total[row];
        E* to = out + ((tile.first_row + row / per_kv) * layer.heads + kv_head * per_kv +
                       row % per_kv) * dim;
        for (int part = 0; part < parts; ++part) {
            float* from = s.output + (size_t(part) * rows + row) * UNIT;
            for (int d = 0; d < UNIT; d += LANES) store(from + d, load<vf>(from + d) * splat(scale));
            narrow_row(from, to + part * UNIT, std::min(UNIT, dim - part * UNIT));
        }
    }
}

template <class E>
static void attend(Team& team, int rank, const Step& step, const Attention& layer,
                   const std::vector<QueryTile>& tiles, const E* q, E* out) {
    const int per_kv = int(layer.heads / layer.kv_heads);
    const size_t rows = std::max(TARGET_ROWS, per_kv);
    char* memory = team.scratch(rank, AttentionScratch::nbytes(rows, int(layer.head_dim)));
    const int kv_heads = int(layer.kv_heads);
    auto* attend_one = step.kv_type == FLOAT8_E4M3 ? attend_tile<E, float8> : attend_tile<E, E>;
    team.for_each(int(tiles.size()) * kv_heads, [&](int index) {
        attend_one(step, layer, tiles[index / kv_heads], index % kv_heads, q, out, memory);
    });
}

// Writes one token's keys and values, [kv_heads * head_dim] each, floats or as kept, to its slots.
template <class E, class T>
static inline void write_kv(const Step& step, const Attention& layer, int token, const T* key,
                            const T* value) {
    const int64_t dim = layer.head_dim;
    for (int64_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head, key += dim, value += dim) {
        const KVHead& head = layer.places[kv_head];
        const int64_t slot = step.groups[head.group].slots[token];
        char* at = step.pool + slot / step.block_size * step.block_nbytes +
                   slot % step.block_size * layer.token_nbytes;
        if (step.kv_type == FLOAT8_E4M3) {
            quantise_row<E>(key, dim, at + head.key_offset);
            quantise_row<E>(value, dim, at + head.value_offset);
            continue;
        }
        E* to_key = reinterpret_cast<E*>(at + head.key_offset);
        E* to_value = reinterpret_cast<E*>(at + head.value_offset);
        if constexpr (sizeof(T) == sizeof(E)) {
            std::memcpy(to_key, key, dim * sizeof(E));
            std::memcpy(to_value, value, dim * sizeof(E));
        } else {
            narrow_row(key, to_key, dim);
            narrow_row(value, to_value, dim);
        }
    }
}

}  // namespace sluice
