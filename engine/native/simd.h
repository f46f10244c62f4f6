// Vectors of the machine's width through GCC's vector extension: the same source for AVX-512, AVX2,
// NEON and plain SSE. A "word" is 32 bits: one float, or two adjacent bfloat16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace sluice {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));

struct bf16 {
    uint16_t bits;
};

template <class V, class T>
static inline V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
static inline void store(T* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

static inline vf splat(float x) { return vf{} + x; }
static inline vu splat(uint32_t x) { return vu{} + x; }
static inline vf as_float(vu v) { return (vf)v; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Round to nearest, ties to even; NaN stays NaN.
static inline void from_float(float x, float* out) { *out = x; }
static inline void from_float(float x, bf16* out) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    out->bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

// Rounds LANES floats as from_float does.
static inline void narrow(vf v, float* to) { store(to, v); }
static inline void narrow(vf v, bf16* to) {
#if defined(__AVX512BF16__)
    const auto rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    for (int i = 0; i < LANES; ++i) from_float(v[i], to + i);
#endif
}

template <class E>
static inline void narrow_row(const float* from, E* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) narrow(load<vf>(from + i), to + i);
    for (; i < count; ++i) from_float(from[i], to + i);
}

static inline vf max(vf a, vf b) { return a > b ? a : b; }

// The lanes of v, each moved by DISTANCE.
template <int DISTANCE>
static inline vf rotated(vf v) {
    vi lanes{};
    for (int i = 0; i < LANES; ++i) lanes[i] = (i + DISTANCE) % LANES;
    return __builtin_shuffle(v, lanes);
}

static inline float sum(vf v) {
    if constexpr (LANES >= 16) v += rotated<8>(v);
    if constexpr (LANES >= 8) v += rotated<4>(v);
    v += rotated<2>(v);
    v += rotated<1>(v);
    return v[0];
}

static inline float max_of(vf v) {
    if constexpr (LANES >= 16) v = max(v, rotated<8>(v));
    if constexpr (LANES >= 8) v = max(v, rotated<4>(v));
    v = max(v, rotated<2>(v));
    return max(v, rotated<1>(v))[0];
}

// acc += a . b for each 32-bit word, where a word is one float or a pair of bfloat16.
template <class E>
static inline vf dot_words(vf acc, vu a, vu b);

template <>
inline vf dot_words<float>(vf acc, vu a, vu b) {
    return acc + as_float(a) * as_float(b);
}

template <>
inline vf dot_words<bf16>(vf acc, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    const vu high = splat(0xffff0000u);
    acc += as_float(a << 16) * as_float(b << 16);
    return acc + as_float(a & high) * as_float(b & high);
#endif
}

// exp to about one unit in the last place (Cephes expf); 0 below -87.3.
static inline vf exp(vf x) {
    const vf low = splat(-87.3f), high = splat(88.3f);
    const auto underflow = x < low;
    x = x > high ? high : x;
    x = underflow ? low : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const vf n = (x * splat(1.44269504088896341f) + magic) - magic;
    vf r = x - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return underflow ? vf{} : p * (vf)exponent;
}

// exp of a score below its row's peak, as exactly as the weights of type E keep it: float as above,
// bfloat16 to 5e-5. 0 below -88.
template <class E>
static inline vf softmax_exp(vf x) {
    if constexpr (sizeof(E) == 4) return exp(x);
    vf y = x * splat(1.44269504088896341f);
    y = y < splat(-127.0f) ? splat(-127.0f) : y;  // its exponent field is 0, and so the result
    const vf magic = splat(12582912.0f);
    const vf n = (y + magic) - magic;
    const vf r = y - n;
    vf p = r * splat(9.61812911e-3f) + splat(5.55041087e-2f);
    p = p * r + splat(2.40226507e-1f);
    p = p * r + splat(6.93147181e-1f);
    p = p * r + splat(1.0f);
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

static inline vf tanh(vf x) {
    // 1 - 2 / (exp(2x) + 1), and x itself where that would cancel.
    const vf big = splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
    const vf square = x * x;
    const vf small =
        x + x * square *
                (splat(-3.33332819422e-1f) +
                 square * (splat(1.33314422036e-1f) +
                           square * (splat(-5.37397155531e-2f) +
                                     square * (splat(2.06390887954e-2f) +
                                               square * splat(-5.70498872745e-3f)))));
    const vf magnitude = x < vf{} ? -x : x;
    return magnitude < splat(0.625f) ? small : big;
}

// Transposes LANES vectors of LANES words in place.
template <int STEP>
static inline void transpose_step(vu* v) {
    vu low{}, high{};
    for (int i = 0; i < LANES; ++i) {
        low[i] = uint32_t((i & STEP) ? LANES + i - STEP : i);
        high[i] = uint32_t((i & STEP) ? LANES + i : i + STEP);
    }
    for (int i = 0; i < LANES; ++i) {
        if (i & STEP) continue;
        const vu a = v[i], b = v[i + STEP];
        v[i] = __builtin_shuffle(a, b, low);
        v[i + STEP] = __builtin_shuffle(a, b, high);
    }
}

static inline void transpose(vu* v) {
    transpose_step<1>(v);
    transpose_step<2>(v);
    if constexpr (LANES >= 8) transpose_step<4>(v);
    if constexpr (LANES >= 16) transpose_step<8>(v);
}

}  // namespace sluice
