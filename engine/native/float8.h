// Rows of KV in float8: e4m3 numbers, and behind them their float32 scale. Gives the same bytes as
// engine/kv_quantisation.py. Plain loops, without branches: compilers make vectors of these.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "simd.h"

namespace sluice {

struct float8 {  // e4m3fn: 4 bits of exponent, 3 of mantissa, no infinities
    uint8_t bits;
};

constexpr float FLOAT8_PER_LARGEST = float(1.0 / 448.0);
constexpr float FLOAT8_SMALLEST_SCALE = std::numeric_limits<float>::min();

template <class S>
static inline int64_t row_nbytes(int64_t dim) {
    return dim * int64_t(sizeof(S)) + (std::is_same_v<S, float8> ? int64_t(sizeof(float)) : 0);
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// What a model in E would have kept of a number that it computed.
template <class E, class T>
static inline float rounded(T x) {
    if constexpr (std::is_same_v<T, E>) {
        return to_float(x);
    } else {
        E kept;
        from_float(to_float(x), &kept);
        return to_float(kept);
    }
}

// Rounds to nearest, ties to even; |x| is below 464.
static inline float8 to_float8(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    const uint32_t normal =
        (magnitude + ((magnitude >> 20) & 1) + (uint32_t(7 - 127) << 23) + 0x7ffffu) >> 20;
    // Adding 2^14 makes the float's last place that of e4m3's subnormals.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - (141u << 23);
    return {uint8_t((magnitude < (121u << 23) ? subnormal : normal) | (bits >> 24 & 0x80))};
}

// Exact, but for NaN: a row that has one has NaN for its scale.
static inline bf16 to_bf16(float8 x) {
    const uint16_t magnitude = x.bits & 0x7f;
    // Subnormals are multiples of 2^-9: 0, 1, then pairs and quadruples of one exponent.
    const uint16_t below_4 = magnitude < 2 ? magnitude * (118 << 7)
                                           : (119 << 7) + (magnitude - 2) * 64;
    const uint16_t subnormal = magnitude < 4 ? below_4 : (120 << 7) + (magnitude - 4) * 32;
    const uint16_t normal = (magnitude << 4) + (120 << 7);
    return {uint16_t((magnitude < 8 ? subnormal : normal) | (x.bits & 0x80) << 8)};
}

// Writes dim numbers and their scale.
template <class E, class T>
static inline void quantise_row(const T* __restrict from, int64_t dim, char* __restrict to) {
    // Of numbers without a sign, the order of their bits is their own, and NaN is above all.
    uint32_t peak_bits = 0;
    for (int64_t i = 0; i < dim; ++i) {
        const uint32_t magnitude = bits_of(rounded<E>(from[i])) & 0x7fffffffu;
        peak_bits = magnitude > peak_bits ? magnitude : peak_bits;
    }
    const float peak = float_of(peak_bits);
    float scale = std::max(peak * FLOAT8_PER_LARGEST, FLOAT8_SMALLEST_SCALE);
    if (!std::isfinite(peak)) scale = std::numeric_limits<float>::quiet_NaN();
    auto* __restrict numbers = reinterpret_cast<float8*>(to);
    for (int64_t i = 0; i < dim; ++i) numbers[i] = to_float8(rounded<E>(from[i]) / scale);
    std::memcpy(to + dim, &scale, sizeof scale);
}

// Widens the dim numbers of a row to E, exactly, and returns their scale.
template <class E>
static inline float widen_row(const char* __restrict row, int64_t dim, E* __restrict to) {
    const auto* __restrict numbers = reinterpret_cast<const float8*>(row);
    for (int64_t i = 0; i < dim; ++i) {
        if constexpr (std::is_same_v<E, bf16>)
            to[i] = to_bf16(numbers[i]);
        else
            to[i] = to_float(to_bf16(numbers[i]));
    }
    float scale;
    std::memcpy(&scale, row + dim, sizeof scale);
    return scale;
}

}  // namespace sluice
