// What all native operators share: bfloat16 as raw 16 bits, vectors of floats, and one way to split work over threads.
//
// Compiled with -march=native. Where the CPU has AVX512-BF16 its dot products are used; everywhere else plain loops that the
// compiler vectorises. Threads are those of the OpenMP runtime that torch has loaded already: a second pool would fight
// with it for the cores.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

#ifndef HAS_BF16_DOT
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif
#endif

#if HAS_BF16_DOT
#include <immintrin.h>
#endif

#define FORCE_INLINE inline __attribute__((always_inline))

typedef uint16_t bf16;

static FORCE_INLINE float to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Round to nearest, ties to even, as torch does; a NaN stays one.
static FORCE_INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (bf16)0x7fc0 : (bf16)rounded;
}

// The share [first, last) of `count` items that thread `thread` of `threads` takes.
static FORCE_INLINE void share(int64_t count, int thread, int threads, int64_t *first, int64_t *last) {
    *first = count * thread / threads;
    *last = count * (thread + 1) / threads;
}

// Elements below which the elementwise operators stay on one thread: waking another costs a few microseconds.
constexpr int64_t ENOUGH = 1 << 14;

// e^x to 2 units in the last place, without a branch, so that loops over it become vector code. NaN stays NaN.
static FORCE_INLINE float exponential(float x) {
    float clamped = x < -87.3f ? -87.3f : x > 88.3f ? 88.3f : x;
    float n = rintf(clamped * 1.44269504088896341f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f; // minus n ln 2, in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.3f ? 0.0f : p * power;
}

#if HAS_BF16_DOT

// The sum of each of four vectors, side by side.
static FORCE_INLINE __m128 sum_of_each(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// 32 values, or the first of them that the mask names, the rest zero.
template <bool WHOLE> static FORCE_INLINE __m512bh load_bf16(const bf16 *from, __mmask32 mask) {
    return WHOLE ? (__m512bh)_mm512_loadu_si512(from) : (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}

#endif
