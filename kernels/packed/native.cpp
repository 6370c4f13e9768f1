// Rows of a weight that stays packed, as bfloat16: (code - zero point) x scale in float32, rounded once.
//
// What a row has in common, scales and zero points as float32, is made first. Codes of four bits are then looked up 32 at
// a time where the CPU has AVX512-BF16: the sixteen numbers that a group's codes can stand for are made once a group, as
// bfloat16, and each code picks its own. All others are computed one by one, in loops that the compiler vectorises.
#include <vector>

#include "../native/common.h"

namespace packed {

enum Scale { FLOAT32, BFLOAT16, FLOAT16, BYTE };

struct Matrix {
    const uint8_t *codes;
    const float *numbers; // what each code stands for
    const void *scales;
    const float *scale_numbers; // of scales of a byte
    const int8_t *zeros;        // or null
    const float *outer;         // or null
    const int32_t *order;       // or null
    int64_t columns, row_bytes, bits, groups, block_rows, block_columns, together, divides, scale;
};

static FORCE_INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits = rest << 13;
    float value, scaled;
    memcpy(&value, &bits, sizeof value);
    scaled = value * 5.192296858534828e33f; // 2^112
    memcpy(&bits, &scaled, sizeof bits);
    bits = rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : bits;
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The scales and zero points of one row.
static void read_groups(const Matrix &m, int64_t row, float *factor, float *zero) {
    int64_t first = (m.block_rows ? row / m.block_rows : 0) * m.groups;
    for (int64_t g = 0; g < m.groups; g++) {
        int64_t at = first + g;
        switch (m.scale) {
            case FLOAT32: factor[g] = ((const float *)m.scales)[at]; break;
            case BFLOAT16: factor[g] = to_float(((const bf16 *)m.scales)[at]); break;
            case FLOAT16: factor[g] = half_to_float(((const uint16_t *)m.scales)[at]); break;
            default: factor[g] = m.scale_numbers[((const uint8_t *)m.scales)[at]];
        }
        zero[g] = m.zeros ? (float)m.zeros[at] : 0.0f;
    }
    if (!m.outer) return;
    float outer = m.outer[m.together ? row / m.together : 0];
    for (int64_t g = 0; g < m.groups; g++) factor[g] = m.divides ? factor[g] / outer : factor[g] * outer;
}

template <int BITS> static FORCE_INLINE int code_at(const uint8_t *row, int64_t column) {
    if (BITS == 8) return row[column];
    return row[column * BITS / 8] >> column * BITS % 8 & ((1 << BITS) - 1);
}

template <int BITS>
static void columns_one_by_one(
    const Matrix &m, const uint8_t *row, const int32_t *order, int64_t from, const float *factor, const float *zero,
    bf16 *out) {
    if (order) {
        for (int64_t c = from; c < m.columns; c++)
            out[c] = to_bf16((m.numbers[code_at<BITS>(row, c)] - zero[order[c]]) * factor[order[c]]);
        return;
    }
    int64_t size = m.block_columns ? m.block_columns : m.columns;
    for (int64_t start = from; start < m.columns;) {
        int64_t g = start / size, stop = (g + 1) * size < m.columns ? (g + 1) * size : m.columns;
        float f = factor[g], z = zero[g];
        for (int64_t c = start; c < stop; c++) out[c] = to_bf16((m.numbers[code_at<BITS>(row, c)] - z) * f);
        start = stop;
    }
}

#if HAS_BF16_DOT

// Codes of four bits, 32 at a time; returns how many columns that were.
static int64_t columns_by_table(const Matrix &m, const uint8_t *row, const float *factor, const float *zero, bf16 *out) {
    const __m512 numbers = _mm512_loadu_ps(m.numbers);
    const __m512i low_bits = _mm512_set1_epi32(0x000f000f);
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    int64_t size = m.block_columns ? m.block_columns : m.columns, c = 0;
    int64_t g[2] = {0, size > 16 ? 0 : 1}, left[2] = {size, size > 16 ? size - 16 : size};
    int64_t made[2] = {-1, -1};
    __m512i table = _mm512_setzero_si512();
    for (; c + 32 <= m.columns; c += 32) {
        if (g[0] != made[0] || g[1] != made[1]) {
            __m512 one = _mm512_mul_ps(_mm512_sub_ps(numbers, _mm512_set1_ps(zero[g[0]])), _mm512_set1_ps(factor[g[0]]));
            __m512 two = _mm512_mul_ps(_mm512_sub_ps(numbers, _mm512_set1_ps(zero[g[1]])), _mm512_set1_ps(factor[g[1]]));
            table = (__m512i)_mm512_cvtne2ps_pbh(two, one);
            made[0] = g[0], made[1] = g[1];
        }
        __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + c / 2)));
        __m512i code = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), low_bits);
        _mm512_storeu_si512(out + c, _mm512_permutexvar_epi16(_mm512_or_si512(code, upper), table));
        for (int half = 0; half < 2; half++) // where each half of the next 32 columns is
            for (left[half] -= 32; left[half] <= 0; left[half] += size) g[half]++;
    }
    return c;
}

#endif

static void unpack_row(const Matrix &m, int64_t row, const float *factor, const float *zero, bf16 *out) {
    const uint8_t *codes = m.codes + row * m.row_bytes;
    const int32_t *order = m.order ? m.order + (m.together ? row / m.together : 0) * m.columns : nullptr;
    int64_t done = 0;
#if HAS_BF16_DOT
    if (m.bits == 4 && !order && m.block_columns % 16 == 0) done = columns_by_table(m, codes, factor, zero, out);
#endif
    switch (m.bits) {
        case 2: return columns_one_by_one<2>(m, codes, order, done, factor, zero, out);
        case 4: return columns_one_by_one<4>(m, codes, order, done, factor, zero, out);
        default: return columns_one_by_one<8>(m, codes, order, done, factor, zero, out);
    }
}

static Matrix matrix_of(
    const uint8_t *codes, const float *numbers, const void *scales, const float *scale_numbers, const int8_t *zeros,
    const float *outer, const int32_t *order, const int64_t *how) {
    Matrix m = {codes, numbers, scales, scale_numbers, zeros, outer, order};
    m.columns = how[0], m.row_bytes = how[1], m.bits = how[2], m.groups = how[3], m.block_rows = how[4];
    m.block_columns = how[5], m.together = how[6], m.divides = how[7], m.scale = how[8];
    return m;
}

// The product of two rows, summed in an order that depends on their length alone.
static float product(const bf16 *one, const bf16 *other, int64_t count) {
#if HAS_BF16_DOT
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    int64_t h = 0;
    for (; h + 64 <= count; h += 64)
        for (int half = 0; half < 2; half++)
            sum[half] = _mm512_dpbf16_ps(
                sum[half], load_bf16<true>(one + h + 32 * half, 0), load_bf16<true>(other + h + 32 * half, 0));
    for (; h < count; h += 32) {
        __mmask32 mask = count - h < 32 ? (1u << (count - h)) - 1 : 0xffffffff;
        sum[0] = _mm512_dpbf16_ps(sum[0], load_bf16<false>(one + h, mask), load_bf16<false>(other + h, mask));
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1]));
#else
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < count; h++) sum += to_float(one[h]) * to_float(other[h]);
    return sum;
#endif
}

} // namespace packed

extern "C" void firstlight_unpack(
    const uint8_t *codes, const float *numbers, const void *scales, const float *scale_numbers, const int8_t *zeros,
    const float *outer, const int32_t *order, const int64_t *how, bf16 *out, int64_t rows, int threads) {
    using namespace packed;
    const Matrix m = matrix_of(codes, numbers, scales, scale_numbers, zeros, outer, order, how);
    if (rows * m.columns < ENOUGH) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> factor(m.groups), zero(m.groups);
        int64_t first, last;
        share(rows, omp_get_thread_num(), omp_get_num_threads(), &first, &last);
        for (int64_t r = first; r < last; r++) {
            read_groups(m, r, factor.data(), zero.data());
            unpack_row(m, r, factor.data(), zero.data(), out + r * m.columns);
        }
    }
}

// y[T, F] = x[T, H] @ weight[F, H].T + bias[F]: each row is unpacked once, into the nearest cache.
extern "C" void firstlight_linear_packed(
    const uint8_t *codes, const float *numbers, const void *scales, const float *scale_numbers, const int8_t *zeros,
    const float *outer, const int32_t *order, const int64_t *how, const bf16 *bias, const bf16 *x, bf16 *y, int64_t T,
    int64_t F, int threads) {
    using namespace packed;
    const Matrix m = matrix_of(codes, numbers, scales, scale_numbers, zeros, outer, order, how);
    if (F * m.columns < ENOUGH) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> factor(m.groups), zero(m.groups);
        std::vector<bf16> row(m.columns);
        int64_t first, last;
        share(F, omp_get_thread_num(), omp_get_num_threads(), &first, &last);
        for (int64_t f = first; f < last; f++) {
            read_groups(m, f, factor.data(), zero.data());
            unpack_row(m, f, factor.data(), zero.data(), row.data());
            float added = bias ? to_float(bias[f]) : 0.0f;
            for (int64_t t = 0; t < T; t++)
                y[t * F + f] = to_bf16(product(row.data(), x + t * m.columns, m.columns) + added);
        }
    }
}
