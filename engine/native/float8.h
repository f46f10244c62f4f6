// Rows of KV in float8: e4m3 numbers, and behind them their float32 scale. Gives the same bytes as
// engine/kv_quantisation.py.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace sluice {

struct float8 {  // e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities
    uint8_t bits;
};

typedef uint8_t v8 __attribute__((vector_size(LANES)));
typedef uint16_t v16 __attribute__((vector_size(LANES * 2)));

constexpr float FLOAT8_PER_LARGEST = float(1.0 / 448.0);
constexpr float FLOAT8_SMALLEST_SCALE = std::numeric_limits<float>::min();

template <class S>
static inline int64_t row_nbytes(int64_t dim) {
    return dim * int64_t(sizeof(S)) + (std::is_same_v<S, float8> ? int64_t(sizeof(float)) : 0);
}

static inline vf widen(const float* from) { return load<vf>(from); }
static inline vf widen(const bf16* from) {
    return (vf)(__builtin_convertvector(load<v16>(from), vu) << 16);
}
// Exact, but for NaN: a row that has one has NaN for its scale.
static inline vf widen(const float8* from) {
    const vu bits = __builtin_convertvector(load<v8>(from), vu);
    const vu magnitude = bits & 0x7f;
    const vf normal = (vf)((magnitude << 20) + (120u << 23));
    const vf subnormal = (vf)((magnitude << 20) + (121u << 23)) - splat(0.015625f);
    const vu value = magnitude < 8 ? (vu)subnormal : (vu)normal;
    return (vf)(value | (bits & 0x80) << 24);
}

// Rounds to nearest, ties to even; |v| is below 464.
static inline void narrow(vf v, float8* to) {
    const vu sign = (vu)v & 0x80000000u, magnitude = (vu)v ^ sign;
    const vu normal =
        (magnitude + ((magnitude >> 20) & 1) + (uint32_t(7 - 127) << 23) + 0x7ffffu) >> 20;
    // Adding 2^14 makes the float's last place that of e4m3's subnormals.
    const vu subnormal = (vu)((vf)magnitude + splat(16384.0f)) - (141u << 23);
    const vu code = (magnitude < (121u << 23) ? subnormal : normal) | sign >> 24;
    store(to, __builtin_convertvector(code, v8));
}

// LANES of a row of E, as the floats that E makes of them; past `count` zeros.
template <class E, class T>
static inline vf rounded(const T* from, int64_t count) {
    T padded[LANES] = {};
    if (count < LANES) {
        std::memcpy(padded, from, size_t(count) * sizeof(T));
        from = padded;
    }
    if constexpr (std::is_same_v<T, E>) {
        return widen(from);
    } else {
        E kept[LANES];
        narrow(widen(from), kept);
        return widen(kept);
    }
}

// Writes dim numbers and their scale. What a model in E would have kept is what is quantised.
template <class E, class T>
static inline void quantise_row(const T* from, int64_t dim, char* to) {
    // Of numbers without a sign, the order of their bits is their own, and NaN is above all.
    vu peaks{};
    for (int64_t i = 0; i < dim; i += LANES) {
        const vu magnitude = (vu)rounded<E>(from + i, dim - i) & 0x7fffffffu;
        peaks = magnitude > peaks ? magnitude : peaks;
    }
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits = peaks[i] > bits ? peaks[i] : bits;
    float peak;
    std::memcpy(&peak, &bits, sizeof peak);
    float scale = peak * FLOAT8_PER_LARGEST;
    if (scale < FLOAT8_SMALLEST_SCALE) scale = FLOAT8_SMALLEST_SCALE;
    if (!std::isfinite(peak)) scale = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = 0; i < dim; i += LANES) {
        float8 codes[LANES];
        narrow(rounded<E>(from + i, dim - i) / splat(scale), codes);
        std::memcpy(to + i, codes, size_t(dim - i < LANES ? dim - i : LANES));
    }
    std::memcpy(to + dim, &scale, sizeof scale);
}

// Widens the dim numbers of a row to E, exactly, and returns their scale.
template <class E>
static inline float widen_row(const char* row, int64_t dim, E* to) {
    const auto* from = reinterpret_cast<const float8*>(row);
    for (int64_t i = 0; i < dim; i += LANES) {
        // Reading past the numbers would leave the pool where the last row ends.
        float8 padded[LANES] = {};
        const bool whole = dim - i >= LANES;
        if (!whole) std::memcpy(padded, from + i, size_t(dim - i));
        const vf v = widen(whole ? from + i : padded);
        if (whole) {
            narrow(v, to + i);
        } else {
            E kept[LANES];
            narrow(v, kept);
            std::memcpy(to + i, kept, size_t(dim - i) * sizeof(E));
        }
    }
    float scale;
    std::memcpy(&scale, row + dim, sizeof scale);
    return scale;
}

}  // namespace sluice
