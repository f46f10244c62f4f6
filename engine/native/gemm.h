// Products with a matrix whose columns are packed in panels, so that it streams from memory once.
//
// A panel holds PANEL output columns: [K words][PANEL] words, where word k of a column is
// element k (float) or elements 2k and 2k+1 (bfloat16, as vdpbf16ps wants them). The last panel is
// padded with zeros.
#pragma once

#include "simd.h"

namespace sluice {

constexpr int PANEL = 32;
constexpr int UNIT = 2 * PANEL;  // columns of one piece of work
constexpr int VECTORS = PANEL / LANES;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6;  // 6 x 64 columns fill 24 of 32 registers
#else
constexpr int MAX_ROWS = 3;
#endif
constexpr int ROW_BLOCK = 16 * MAX_ROWS;  // rows of one piece of work
constexpr int K_BLOCK = 1024;             // words; two panels of them stay in the L2 cache

template <class E>
constexpr int words(int elements) {
    return elements * int(sizeof(E)) / 4;
}

struct Matrix {
    const uint32_t* packed;
    const float* bias;  // [columns] in packed order, or null
    int columns, inner; // N and K, in elements

    int units() const { return (columns + UNIT - 1) / UNIT; }
};

// C[ROWS][PANELS * PANEL] (+)= A[ROWS][kw words] B; rows of A are `stride` words apart.
template <class E, int ROWS, int PANELS>
static inline void tile(const uint32_t* a, size_t stride, const uint32_t* b, size_t panel_stride,
                        int kw, float* c, bool accumulate) {
    constexpr int N = PANELS * VECTORS;
    vf acc[ROWS][N];
    for (int row = 0; row < ROWS; ++row)
        for (int j = 0; j < N; ++j)
            acc[row][j] = accumulate ? load<vf>(c + row * PANELS * PANEL + j * LANES) : vf{};
    for (int k = 0; k < kw; ++k) {
        vu column[N];
        for (int j = 0; j < N; ++j)
            column[j] = load<vu>(b + (j / VECTORS) * panel_stride + size_t(k) * PANEL +
                                 (j % VECTORS) * LANES);
        for (int row = 0; row < ROWS; ++row) {
            const vu value = splat(a[row * stride + k]);
            for (int j = 0; j < N; ++j) acc[row][j] = dot_words<E>(acc[row][j], value, column[j]);
        }
    }
    for (int row = 0; row < ROWS; ++row)
        for (int j = 0; j < N; ++j) store(c + row * PANELS * PANEL + j * LANES, acc[row][j]);
}

template <class E, int PANELS>
static inline void rows_tile(int rows, const uint32_t* a, size_t stride, const uint32_t* b,
                             size_t panel_stride, int kw, float* c, bool accumulate) {
    switch (rows) {
        case 1: return tile<E, 1, PANELS>(a, stride, b, panel_stride, kw, c, accumulate);
        case 2: return tile<E, 2, PANELS>(a, stride, b, panel_stride, kw, c, accumulate);
        case 3: return tile<E, 3, PANELS>(a, stride, b, panel_stride, kw, c, accumulate);
#if defined(__AVX512F__)
        case 4: return tile<E, 4, PANELS>(a, stride, b, panel_stride, kw, c, accumulate);
        case 5: return tile<E, 5, PANELS>(a, stride, b, panel_stride, kw, c, accumulate);
        case 6: return tile<E, 6, PANELS>(a, stride, b, panel_stride, kw, c, accumulate);
#endif
    }
}

// Rows per tile that split `rows` evenly: 8 rows are 4 + 4, not 6 + 2.
static inline int even_rows(int rows) {
    const int tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return (rows + tiles - 1) / tiles;
}

// C[rows][PANELS * PANEL] (+)= A B for any number of rows.
template <class E, int PANELS>
static inline void block(int rows, const uint32_t* a, size_t stride, const uint32_t* b,
                         size_t panel_stride, int kw, float* c, bool accumulate) {
    const int step = even_rows(rows);
    for (int row = 0; row < rows; row += step) {
        const int count = rows - row < step ? rows - row : step;
        rows_tile<E, PANELS>(count, a + row * stride, stride, b, panel_stride, kw,
                             c + size_t(row) * PANELS * PANEL, accumulate);
    }
}

// One unit of columns of A[rows][K] W, at most ROW_BLOCK rows; then for each row, in order,
// sink(row, first column, values, number of columns). `c` holds ROW_BLOCK * UNIT floats.
template <class E, class Sink>
static inline void unit_product(const Matrix& w, int unit, const E* a, int rows, float* c,
                                const Sink& sink) {
    const int kw = words<E>(w.inner);
    const size_t panel_stride = size_t(kw) * PANEL;
    const int first = unit * UNIT;
    const int left = w.columns - first < UNIT ? w.columns - first : UNIT;
    const int panels = left > PANEL ? 2 : 1;
    const uint32_t* b = w.packed + size_t(unit) * 2 * panel_stride;
    const uint32_t* rows_of_a = reinterpret_cast<const uint32_t*>(a);
    // A single tile reads its panels once whatever their size: no need to block.
    const int step = rows > MAX_ROWS ? K_BLOCK : kw;
    for (int k = 0; k < kw; k += step) {
        const int count = kw - k < step ? kw - k : step;
        if (panels == 2)
            block<E, 2>(rows, rows_of_a + k, kw, b + size_t(k) * PANEL, panel_stride, count, c,
                        k > 0);
        else
            block<E, 1>(rows, rows_of_a + k, kw, b + size_t(k) * PANEL, panel_stride, count, c,
                        k > 0);
    }
    for (int row = 0; row < rows; ++row) {
        float* values = c + size_t(row) * panels * PANEL;
        if (w.bias)
            for (int j = 0; j < left; ++j) values[j] += w.bias[first + j];
        sink(row, first, values, left);
    }
}

// Packs rows [0, columns) of a row-major weight [N][K]; column n of the panels is row order[n].
static inline void pack(const uint32_t* weight, int kw, const int32_t* order, int columns,
                        uint32_t* packed) {
    const int padded = (columns + PANEL - 1) / PANEL * PANEL;
    for (int n = 0; n < padded; ++n) {
        uint32_t* to = packed + size_t(n / PANEL) * kw * PANEL + n % PANEL;
        if (n < columns) {
            const uint32_t* from = weight + size_t(order[n]) * kw;
            for (int k = 0; k < kw; ++k) to[size_t(k) * PANEL] = from[k];
        } else {
            for (int k = 0; k < kw; ++k) to[size_t(k) * PANEL] = 0;
        }
    }
}

}  // namespace sluice
