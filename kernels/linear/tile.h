// Tiles of rows of a weight times rows of x, in bfloat16 with float32 sums.
//
// Each element of y is summed in an order that depends on H alone: a row's result is the same bits whatever rows
// accompany it, and whether the tile was in memory or has just been unpacked.
#pragma once

#include "../native/common.h"

namespace linear {

constexpr int TILE = 4;            // rows of the weight
constexpr int BLOCK = 6;           // rows of x per pass over a tile
constexpr int GROUP = 4 * BLOCK;   // rows of x that meet a tile before the next is read
constexpr int AHEAD = 4;           // tiles between the one in work and the one asked for
constexpr int ONE_BY_ONE = -1;     // instead of asking: weight rows one after another, which the CPU foresees by itself
constexpr int FEW = 3;             // rows of x up to which that is faster

#if HAS_BF16_DOT

// One step of 32 along H: R rows of the weight times C rows of x; the bits of ASK say which rows to ask for AHEAD.
template <int R, int C, int ASK, bool WHOLE>
static FORCE_INLINE void
multiply_step(const bf16 *weight, const bf16 *x, int64_t H, __mmask32 mask, __m512 (*sum)[C]) {
    __m512bh w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        w[r] = load_bf16<WHOLE>(weight + r * H, mask);
        if (ASK > 0 && ASK >> r & 1) _mm_prefetch((const char *)(weight + (r + AHEAD * TILE) * H), _MM_HINT_T1);
    }
#pragma GCC unroll 6
    for (int c = 0; c < C; c++) {
        __m512bh v = load_bf16<WHOLE>(x + c * H, mask);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], w[r], v);
    }
}

template <int R, int C, int ASK>
static FORCE_INLINE void multiply(const bf16 *weight, const bf16 *x, int64_t H, const bf16 *bias, bf16 *y, int64_t F) {
    constexpr int TOGETHER = ASK == ONE_BY_ONE ? 1 : R; // weight rows that go through a step side by side
    __m512 sum[TILE][C];
    for (int r = 0; r < TILE; r++)
        for (int c = 0; c < C; c++) sum[r][c] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int r = 0; r < R; r += TOGETHER) {
        const bf16 *row = weight + r * H;
        int64_t h = 0;
        for (; h + 32 <= H; h += 32) multiply_step<TOGETHER, C, ASK, true>(row + h, x + h, H, 0, sum + r);
        if (h < H) multiply_step<TOGETHER, C, 0, false>(row + h, x + h, H, (1u << (H - h)) - 1, sum + r);
    }
    __m128 added = _mm_setzero_ps();
    __mmask8 rows = (1 << R) - 1;
    if (bias) added = _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(rows, bias)), 16));
#pragma GCC unroll 6
    for (int c = 0; c < C; c++) {
        __m128 result = _mm_add_ps(sum_of_each(sum[0][c], sum[1][c], sum[2][c], sum[3][c]), added);
        _mm_mask_storeu_epi16(y + c * F, rows, (__m128i)_mm_cvtneps_pbh(result));
    }
}

#else

template <int R, int C, int ASK>
static FORCE_INLINE void multiply(const bf16 *weight, const bf16 *x, int64_t H, const bf16 *bias, bf16 *y, int64_t F) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t h = 0; h < H; h++) sum += to_float(weight[r * H + h]) * to_float(x[c * H + h]);
            y[c * F + r] = to_bf16(bias ? sum + to_float(bias[r]) : sum);
        }
}

#endif

template <int R, int ASK>
static void multiply_block(int C, const bf16 *weight, const bf16 *x, int64_t H, const bf16 *bias, bf16 *y, int64_t F) {
    switch (C) {
        case 1: return multiply<R, 1, ASK>(weight, x, H, bias, y, F);
        case 2: return multiply<R, 2, ASK>(weight, x, H, bias, y, F);
        case 3: return multiply<R, 3, ASK>(weight, x, H, bias, y, F);
        case 4: return multiply<R, 4, ASK>(weight, x, H, bias, y, F);
        case 5: return multiply<R, 5, ASK>(weight, x, H, bias, y, F);
        case 6: return multiply<R, 6, ASK>(weight, x, H, bias, y, F);
    }
}

// One tile times one group of at most GROUP rows of x, in blocks of nearly equal size; NEAR: it is in the nearest cache.
template <int R, bool NEAR = false>
static void multiply_group(const bf16 *weight, const bf16 *x, int64_t T, int64_t H, const bf16 *bias, bf16 *y, int64_t F) {
    int64_t blocks = (T + BLOCK - 1) / BLOCK;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = T * block / blocks, last = T * (block + 1) / blocks;
        const bf16 *x_block = x + first * H;
        bf16 *y_block = y + first * F;
        int C = (int)(last - first);
        if (R < TILE || NEAR) multiply_block<R, 0>(C, weight, x_block, H, bias, y_block, F);
        else if (T <= FEW) multiply_block<R, ONE_BY_ONE>(C, weight, x_block, H, bias, y_block, F);
        else if (blocks == 1) multiply_block<R, 0b1111>(C, weight, x_block, H, bias, y_block, F);
        else if (blocks == 2 && block == 0) multiply_block<R, 0b0011>(C, weight, x_block, H, bias, y_block, F);
        else if (blocks == 2) multiply_block<R, 0b1100>(C, weight, x_block, H, bias, y_block, F);
        else if (block == 0) multiply_block<R, 0b0001>(C, weight, x_block, H, bias, y_block, F);
        else if (block == 1) multiply_block<R, 0b0010>(C, weight, x_block, H, bias, y_block, F);
        else if (block == 2) multiply_block<R, 0b1100>(C, weight, x_block, H, bias, y_block, F);
        else multiply_block<R, 0>(C, weight, x_block, H, bias, y_block, F);
    }
}

} // namespace linear
