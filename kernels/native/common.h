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

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_BF16_DOT 1
#include <immintrin.h>
#else
#define HAS_BF16_DOT 0
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
