// The C interface; see engine/native_library.py. dtype is 0 for float32 and 1 for bfloat16.
#include "layer.h"

using namespace sluice;

namespace {

size_t aligned(size_t nbytes) { return (nbytes + 63) / 64 * 64; }

// Shared buffers live with the team and grow to the largest step seen.
struct Engine {
    explicit Engine(int threads) : team(threads) {}
    char* shared(size_t nbytes) {
        if (memory.size() < nbytes + 64) memory.resize(nbytes + 64);
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~63ul);
    }
    Team team;
    std::vector<char> memory;
};

template <class E>
Buffers<E> buffers(Engine& engine, const Layer* layers, int count, int64_t tokens) {
    size_t hidden = 0, qkv = 0, query = 0, inner = 0;
    for (int i = 0; i < count; ++i) {
        const Layer& layer = layers[i];
        hidden = std::max<size_t>(hidden, layer.down.columns);
        qkv = std::max<size_t>(qkv, layer.qkv.columns);
        query = std::max<size_t>(query, layer.attention.heads * layer.attention.head_dim);
        inner = std::max<size_t>(inner, layer.down.inner);
    }
    const size_t floats = aligned(tokens * hidden * 4);
    const size_t qkv_nbytes = aligned(tokens * qkv * 4);
    const size_t normed = aligned(tokens * hidden * sizeof(E));
    const size_t heads = aligned(tokens * query * sizeof(E));
    const size_t mlp = aligned(tokens * inner * sizeof(E));
    char* at = engine.shared(2 * floats + qkv_nbytes + normed + 2 * heads + mlp);
    Buffers<E> b;
    auto take = [&](size_t nbytes) {
        char* from = at;
        at += nbytes;
        return from;
    };
    b.residual = (float*)take(floats);
    b.delta = (float*)take(floats);
    b.qkv = (float*)take(qkv_nbytes);
    b.normed = (E*)take(normed);
    b.query = (E*)take(heads);
    b.attended = (E*)take(heads);
    b.hidden = (E*)take(mlp);
    return b;
}

// Layers after whose end the caller is told, ascending; by rank 0, while the others go on.
struct Marks {
    int count;
    const int32_t* layers;
    void (*reached)(int32_t layer);
};

template <class E>
void run_layers(Engine& engine, const Layer* layers, int count, const Step& step, E* x,
                const Marks& marks) {
    const Buffers<E> b = buffers<E>(engine, layers, count, step.tokens);
    const int64_t hidden = layers[0].down.columns, total = step.tokens * hidden;
    const Attention& shape = layers[0].attention;
    const auto tiles = query_tiles(step, int(shape.heads / shape.kv_heads));
    for (int64_t i = 0; i < total; ++i) b.residual[i] = to_float(x[i]);
    engine.team.run([&](int rank) {
        for (int i = 0, mark = 0; i < count; ++i) {
            run_layer(engine.team, rank, step, layers[i], tiles, b);  // ends at a barrier
            if (rank == 0 && mark < marks.count && marks.layers[mark] == i)
                marks.reached(marks.layers[mark++]);
        }
    });
    narrow_row(b.residual, x, total);
}

template <class E>
void attend_step(Engine& engine, const Attention& layer, const Step& step, const E* q,
                 const E* key, const E* value, E* out) {
    const auto tiles = query_tiles(step, int(layer.heads / layer.kv_heads));
    const int64_t width = layer.kv_heads * layer.head_dim;
    engine.team.run([&](int rank) {
        engine.team.for_each(int(step.tokens), [&](int token) {
            write_kv<E>(step, layer, token, key + token * width, value + token * width);
        });
        attend(engine.team, rank, step, layer, tiles, q, out);
    });
}

template <class E>
void linear(Engine& engine, const Matrix& w, const E* x, int64_t rows, float* out) {
    engine.team.run([&](int rank) {
        product(engine.team, rank, w, x, int(rows),
                [&](int row, int column, float* values, int count) {
                    std::memcpy(out + row * int64_t(w.columns) + column, values, count * 4);
                });
    });
}

}  // namespace

extern "C" {

Engine* sluice_open(int threads) { return new Engine(threads); }

void sluice_close(Engine* engine) { delete engine; }

void sluice_pack(const void* weight, int words_per_row, const int32_t* order, int columns,
                 void* packed) {
    pack((const uint32_t*)weight, words_per_row, order, columns, (uint32_t*)packed);
}

void sluice_run_layers(Engine* engine, int dtype, const Layer* layers, int count, const Step* step,
                       void* x, int num_marks, const int32_t* marks, void (*reached)(int32_t)) {
    const Marks wanted{num_marks, marks, reached};
    if (dtype == 0)
        run_layers(*engine, layers, count, *step, (float*)x, wanted);
    else
        run_layers(*engine, layers, count, *step, (bf16*)x, wanted);
}

void sluice_attend(Engine* engine, int dtype, const Attention* layer, const Step* step,
                   const void* q, const void* key, const void* value, void* out) {
    if (dtype == 0)
        attend_step(*engine, *layer, *step, (const float*)q, (const float*)key,
                    (const float*)value, (float*)out);
    else
        attend_step(*engine, *layer, *step, (const bf16*)q, (const bf16*)key,
                    (const bf16*)value, (bf16*)out);
}

void sluice_linear(Engine* engine, int dtype, const Matrix* w, const void* x, int64_t rows,
                   float* out) {
    if (dtype == 0)
        linear(*engine, *w, (const float*)x, rows, out);
    else
        linear(*engine, *w, (const bf16*)x, rows, out);
}
}
