// One decoder layer over a step: norm, Q K V, rotary embedding, paged attention, output, norm, gated
// MLP. The residual stream is float32 within a run of layers; every phase ends at a barrier.
#pragma once

#include "attention.h"

namespace sluice {

constexpr int PRIVATE_ROWS = 8;  // up to here each thread normalises for itself: no barrier

// Buffers that all threads of a run share.
template <class E>
struct Buffers {
    float *residual, *qkv, *delta;
    E *normed, *query, *attended, *hidden;
};

static inline float root_mean_square_scale(const float* x, int64_t count, float epsilon) {
    vf squares{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vf v = load<vf>(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < count; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / float(count) + epsilon);
}

template <class E>
static inline void normalize(const float* x, const Norm& norm, int64_t count, E* out) {
    const float scale = root_mean_square_scale(x, count, norm.epsilon);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        narrow(load<vf>(x + i) * splat(scale) * load<vf>(norm.weight + i), out + i);
    for (; i < count; ++i) from_float(x[i] * scale * norm.weight[i], out + i);
}

// Calls sink for every row and unit of columns of A W. Ends at a barrier.
template <class E, class Sink>
static void product(Team& team, int rank, const Matrix& w, const E* a, int rows, const Sink& sink) {
    const int row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    float c[ROW_BLOCK * UNIT];
    team.for_each(w.units() * row_blocks, [&](int index) {
        const int first = index % row_blocks * ROW_BLOCK;
        unit_product(w, index / row_blocks, a + size_t(first) * w.inner,
                     std::min(ROW_BLOCK, rows - first), c,
                     [&](int row, int column, float* values, int count) {
                         sink(first + row, column, values, count);
                     });
    });
}

// product() of the normalised residual.
template <class E, class Sink>
static void normed_product(Team& team, int rank, const Norm& norm, const Matrix& w,
                           const Buffers<E>& b, int rows, const Sink& sink) {
    E* normed = b.normed;
    auto one = [&](int row) {
        normalize(b.residual + size_t(row) * w.inner, norm, w.inner, normed + size_t(row) * w.inner);
    };
    if (rows <= PRIVATE_ROWS) {
        normed = reinterpret_cast<E*>(team.scratch(rank, size_t(rows) * w.inner * sizeof(E)));
        for (int row = 0; row < rows; ++row) one(row);
    } else {
        team.for_each(rows, one);
    }
    product(team, rank, w, normed, rows, sink);
}

// residual += product, normalised first where the family does so.
template <class E>
static void add_product(Team& team, int rank, const Norm& norm, const Matrix& w, const E* a,
                        const Buffers<E>& b, int rows) {
    const int columns = w.columns;
    if (!norm.weight) {
        product(team, rank, w, a, rows, [&](int row, int column, float* values, int count) {
            float* to = b.residual + size_t(row) * columns + column;
            for (int j = 0; j < count; ++j) to[j] += values[j];
        });
        return;
    }
    product(team, rank, w, a, rows, [&](int row, int column, float* values, int count) {
        std::memcpy(b.delta + size_t(row) * columns + column, values, size_t(count) * 4);
    });
    team.for_each(rows, [&](int row) {
        const float* x = b.delta + size_t(row) * columns;
        float* to = b.residual + size_t(row) * columns;
        const float scale = root_mean_square_scale(x, columns, norm.epsilon);
        for (int i = 0; i < columns; ++i) to[i] += x[i] * scale * norm.weight[i];
    });
}

static inline void rotate_head(float* head, int dim, const float* cos, const float* sin) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// Head norms, rotary embedding, and the way of K and V into the pool.
template <class E>
static void place_token(const Step& step, const Layer& layer, int token, const Buffers<E>& b) {
    const Attention& shape = layer.attention;
    const int heads = int(shape.heads), kv_heads = int(shape.kv_heads), dim = int(shape.head_dim);
    float* row = b.qkv + size_t(token) * (heads + 2 * kv_heads) * dim;
    for (int head = 0; head < heads + kv_heads; ++head) {
        float* at = row + head * dim;
        const Norm& norm = head < heads ? layer.query : layer.key;
        if (norm.weight) normalize(at, norm, dim, at);
        if (layer.rotary_dim)
            rotate_head(at, int(layer.rotary_dim), step.cos + token * layer.rotary_dim,
                        step.sin + token * layer.rotary_dim);
    }
    E* query = b.query + size_t(token) * heads * dim;
    narrow_row(row, query, heads * dim);
    write_kv<E>(step, shape, token, row + heads * dim, row + (heads + kv_heads) * dim);
}

// gate holds 16 gate columns, then the same 16 of up, and so on: see engine/native_layers.py.
template <class E>
static inline void activate(const float* gate_up, int count, int64_t activation, E* out) {
    constexpr int HALF = PANEL / 2;
    for (int panel = 0; panel < count / PANEL; ++panel)
        for (int i = 0; i < HALF; i += LANES) {
            const vf gate = load<vf>(gate_up + panel * PANEL + i);
            const vf up = load<vf>(gate_up + panel * PANEL + HALF + i);
            vf value;
            if (activation == SILU) {
                value = gate / (splat(1.0f) + exp(-gate));
            } else {
                const vf inner = splat(0.79788456080286536f) *
                                 (gate + splat(0.044715f) * gate * gate * gate);
                value = splat(0.5f) * gate * (splat(1.0f) + tanh(inner));
            }
            value *= up;
            narrow(value, out + panel * HALF + i);
        }
}

template <class E>
static void run_layer(Team& team, int rank, const Step& step, const Layer& layer,
                      const std::vector<QueryTile>& tiles, const Buffers<E>& b) {
    const int rows = int(step.tokens);
    const int width = layer.qkv.columns;
    normed_product(team, rank, layer.before_attention, layer.qkv, b, rows,
                   [&](int row, int column, float* values, int count) {
                       std::memcpy(b.qkv + size_t(row) * width + column, values, count * 4);
                   });
    team.for_each(rows, [&](int token) { place_token(step, layer, token, b); });
    attend(team, rank, step, layer.attention, tiles, b.query, b.attended);
    add_product(team, rank, layer.after_attention, layer.output, b.attended, b, rows);
    const int inner = layer.down.inner;
    normed_product(team, rank, layer.before_mlp, layer.gate_up, b, rows,
                   [&](int row, int column, float* values, int count) {
                       activate(values, count, layer.activation,
                                b.hidden + size_t(row) * inner + column / 2);
                   });
    add_product(team, rank, layer.after_mlp, layer.down, b.hidden, b, rows);
}

}  // namespace sluice
