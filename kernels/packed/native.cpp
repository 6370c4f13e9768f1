// Rows of a weight that stays packed, as bfloat16: (code - zero point) x scale in float32, rounded once.
//
// What a row has in common, scales and zero points as float32, is made first. Where the CPU has AVX512-BF16, codes of
// four bits are then looked up 32 at a time: the sixteen numbers that a group's codes can stand for are made once a group,
// as bfloat16, and each code picks its own. Codes of other widths, and columns whose groups are in any order, become
// float32 16 at a time; the scales and zero points of an order are picked out of registers where it has up to 128 groups.
#include <vector>

#include "../linear/tile.h"

namespace packed {

enum Scale { FLOAT32, BFLOAT16, FLOAT16, POWERS, EIGHTS }; // of two, E8M0; E4M3
enum Kind { INT2, BITS4, INT8, E4M3, E5M2 };

struct Matrix {
    const uint8_t *codes;
    const float *numbers; // what each code stands for
    const void *scales;
    const float *scale_numbers; // of scales of a byte
    const int8_t *zeros;        // or null
    const float *outer;         // or null
    const int32_t *order;       // or null
    int64_t columns, row_bytes, bits, groups, block_rows, block_columns, together, divides, scale, kind;
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

// Room for what a row has in common, zero points of nothing where there are none, in whole registers.
struct Groups {
    std::vector<float> factor, zero;
    explicit Groups(const Matrix &m) : factor((m.groups + 127) / 128 * 128), zero((m.groups + 127) / 128 * 128) {}
};

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

// The sixteen numbers of a group's codes.
static FORCE_INLINE __m512 group_numbers(const Matrix &m, __m512 numbers, float factor, float zero) {
    if (m.zeros) numbers = _mm512_sub_ps(numbers, _mm512_set1_ps(zero));
    return _mm512_mul_ps(numbers, _mm512_set1_ps(factor));
}

// 32 codes of four bits, each as its index in a table whose upper half is for columns 16 to 31.
static FORCE_INLINE __m512i codes_of_32(const uint8_t *codes) {
    const __m512i low_bits = _mm512_set1_epi32(0x000f000f);
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
    __m512i code = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), low_bits);
    return _mm512_or_si512(code, upper);
}

// Codes of four bits in groups of whole sixteens, 32 at a time; returns how many columns that were.
static int64_t columns_by_table(const Matrix &m, const uint8_t *row, const float *factor, const float *zero, bf16 *out) {
    const __m512 numbers = _mm512_loadu_ps(m.numbers);
    int64_t size = m.block_columns ? m.block_columns : m.columns, c = 0;
    if (size % 32 == 0 || size >= m.columns) {
        for (int64_t g = 0; g < m.groups; g++) {
            int64_t stop = (g + 1) * size < m.columns ? (g + 1) * size : m.columns;
            __m512 group = group_numbers(m, numbers, factor[g], zero[g]);
            __m512i table = (__m512i)_mm512_cvtne2ps_pbh(group, group);
            for (; c + 32 <= stop; c += 32)
                _mm512_storeu_si512(out + c, _mm512_permutexvar_epi16(codes_of_32(row + c / 2), table));
        }
        return c;
    }
    for (int64_t one = 0, left = size; c + 32 <= m.columns; c += 32) { // `left`: columns of the group that `c` is in
        int64_t two = left > 16 ? one : one + 1;
        __m512 lower = group_numbers(m, numbers, factor[one], zero[one]);
        __m512i table = (__m512i)_mm512_cvtne2ps_pbh(group_numbers(m, numbers, factor[two], zero[two]), lower);
        _mm512_storeu_si512(out + c, _mm512_permutexvar_epi16(codes_of_32(row + c / 2), table));
        for (left -= 32; left <= 0; left += size) one++;
    }
    return c;
}

struct Pair {
    __m512 one, two;
};

constexpr float E4M3_UNIT = 256.0f; // what `numbers_of_32` makes of E4M3 is so much too small

// What 32 codes from the first bit of a byte on stand for; `table` has the numbers of codes of up to four bits.
template <int KIND> static FORCE_INLINE Pair numbers_of_32(__m512 table, const uint8_t *codes) {
    if (KIND == INT2) {
        const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i low_bits = _mm512_set1_epi32(3);
        uint32_t word[2];
        memcpy(word, codes, sizeof word);
        __m512i one = _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(word[0]), shifts), low_bits);
        __m512i two = _mm512_and_si512(_mm512_srlv_epi32(_mm512_set1_epi32(word[1]), shifts), low_bits);
        return {_mm512_permutexvar_ps(one, table), _mm512_permutexvar_ps(two, table)};
    }
    if (KIND == BITS4) {
        __m128i pairs = _mm_loadu_si128((const __m128i *)codes), low_bits = _mm_set1_epi8(15);
        __m128i low = _mm_and_si128(pairs, low_bits), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), low_bits);
        __m512i one = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
        __m512i two = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(low, high));
        return {_mm512_permutexvar_ps(one, table), _mm512_permutexvar_ps(two, table)};
    }
    __m256i bytes = _mm256_loadu_si256((const __m256i *)codes);
    if (KIND == INT8) {
        __m512i one = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes));
        __m512i two = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1));
        return {_mm512_cvtepi32_ps(one), _mm512_cvtepi32_ps(two)};
    }
    __m512i code = _mm512_cvtepu8_epi16(bytes), half = _mm512_slli_epi16(code, 8); // E5M2: the upper half of float16
    if (KIND == E4M3) { // eight less in the exponent than float16 has
        const __m512i low_bits = _mm512_set1_epi16(0x7f), sign = _mm512_set1_epi16((short)0x8000);
        __m512i rest = _mm512_and_si512(code, low_bits);
        half = _mm512_ternarylogic_epi64(half, sign, _mm512_slli_epi16(rest, 7), 0xea); // half & sign | rest
        half = _mm512_mask_mov_epi16(half, _mm512_cmpeq_epi16_mask(rest, low_bits), _mm512_set1_epi16(0x7e00));
    }
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(half)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1))};
}

// What is given per group, by the group of each column: out of N registers, or 0: of memory.
template <int N> struct Picked {
    __m512 held[N ? N : 1];
    const float *each;
    explicit Picked(const float *each) : each(each) {
        for (int n = 0; n < N; n++) held[n] = _mm512_loadu_ps(each + 16 * n);
    }
    FORCE_INLINE __m512 of(__m512i group) const {
        if (N == 0) return _mm512_i32gather_ps(group, each, 4);
        if (N == 1) return _mm512_permutexvar_ps(group, held[0]);
        if (N == 2) return of_32<0>(group);
        __m512 found = of_64<0>(group);
        if (N == 4) return found;
        return _mm512_mask_mov_ps(found, _mm512_test_epi32_mask(group, _mm512_set1_epi32(64)), of_64<N == 8 ? 4 : 0>(group));
    }

private:
    template <int FIRST> FORCE_INLINE __m512 of_32(__m512i group) const {
        return _mm512_permutex2var_ps(held[FIRST < N ? FIRST : 0], group, held[FIRST + 1 < N ? FIRST + 1 : 0]);
    }
    template <int FIRST> FORCE_INLINE __m512 of_64(__m512i group) const {
        __mmask16 upper = _mm512_test_epi32_mask(group, _mm512_set1_epi32(32));
        return _mm512_mask_mov_ps(of_32<FIRST>(group), upper, of_32<FIRST + 2>(group));
    }
};

template <int KIND> static constexpr int bits_of() { return KIND == INT2 ? 2 : KIND == BITS4 ? 4 : 8; }

// Columns [from, stop), of which the first begins a byte, 32 at a time; `scaled` makes numbers of what 16 codes stand for.
template <int KIND, class Scaled>
static FORCE_INLINE void columns_by_32(
    const Matrix &m, const uint8_t *row, int64_t from, int64_t stop, bf16 *out, const Scaled &scaled) {
    constexpr int BITS = bits_of<KIND>();
    const __m512 table = BITS == 8 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(BITS == 2 ? 15 : 0xffff, m.numbers);
    for (int64_t c = from; c < stop; c += 32) {
        const uint8_t *codes = row + c * BITS / 8;
        uint8_t rest[32]; // of the last columns: nothing behind them is read
        __mmask32 mask = 0xffffffff;
        if (stop - c < 32) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, codes, ((stop - c) * BITS + 7) / 8);
            codes = rest, mask = (1u << (stop - c)) - 1;
        }
        Pair numbers = numbers_of_32<KIND>(table, codes);
        __m512 one = scaled(numbers.one, c, mask & 0xffff), two = scaled(numbers.two, c + 16, mask >> 16);
        _mm512_mask_storeu_epi16(out + c, mask, (__m512i)_mm512_cvtne2ps_pbh(two, one));
    }
}

template <int KIND, int N>
static void columns_in_order(
    const Matrix &m, const uint8_t *row, const int32_t *order, const float *factor, const float *zero, bf16 *out) {
    const Picked<N> factors(factor), zeros(zero);
    columns_by_32<KIND>(m, row, 0, m.columns, out, [&](__m512 numbers, int64_t c, __mmask16 mask) {
        __m512i group = _mm512_maskz_loadu_epi32(mask, order + c);
        if (KIND == E4M3) numbers = _mm512_mul_ps(numbers, _mm512_set1_ps(E4M3_UNIT));
        if (m.zeros) numbers = _mm512_sub_ps(numbers, zeros.of(group));
        return _mm512_mul_ps(numbers, factors.of(group));
    });
}

// All columns, or none where a group begins inside a byte or is too small for this to gain anything.
template <int KIND>
static bool columns_by_vector(
    const Matrix &m, const uint8_t *row, const int32_t *order, const float *factor, const float *zero, bf16 *out) {
    if (order) {
        if (m.groups <= 16) columns_in_order<KIND, 1>(m, row, order, factor, zero, out);
        else if (m.groups <= 32) columns_in_order<KIND, 2>(m, row, order, factor, zero, out);
        else if (m.groups <= 64) columns_in_order<KIND, 4>(m, row, order, factor, zero, out);
        else if (m.groups <= 128) columns_in_order<KIND, 8>(m, row, order, factor, zero, out);
        else columns_in_order<KIND, 0>(m, row, order, factor, zero, out);
        return true;
    }
    int64_t size = m.block_columns ? m.block_columns : m.columns;
    if (size < 16 || (size < m.columns && size * m.bits % 8)) return false;
    for (int64_t g = 0; g < m.groups; g++) {
        const bool is_folded = KIND == E4M3 && !m.zeros && fabsf(factor[g]) < 1e36f; // what no product overflows by
        const __m512 units = _mm512_set1_ps(E4M3_UNIT), zeros = _mm512_set1_ps(zero[g]);
        const __m512 factors = _mm512_set1_ps(is_folded ? factor[g] * E4M3_UNIT : factor[g]);
        int64_t stop = (g + 1) * size < m.columns ? (g + 1) * size : m.columns;
        columns_by_32<KIND>(m, row, g * size, stop, out, [&](__m512 numbers, int64_t, __mmask16) {
            if (KIND == E4M3 && !is_folded) numbers = _mm512_mul_ps(numbers, units);
            return _mm512_mul_ps(m.zeros ? _mm512_sub_ps(numbers, zeros) : numbers, factors);
        });
    }
    return true;
}

#endif

static void powers_of_two(const uint8_t *bytes, int64_t count, float *out) {
    for (int64_t g = 0; g < count; g++) {
        uint32_t byte = bytes[g], bits = byte == 255 ? 0x7fc00000 : byte ? byte << 23 : 1 << 22; // 2^-127 is subnormal
        memcpy(out + g, &bits, sizeof bits);
    }
}

// Scales in E4M3; `out` has room for whole registers.
static void eighths(const Matrix &m, const uint8_t *bytes, int64_t count, float *out) {
    int64_t g = 0;
#if HAS_BF16_DOT
    for (; g + 32 <= count; g += 32) {
        Pair found = numbers_of_32<E4M3>(_mm512_setzero_ps(), bytes + g);
        _mm512_storeu_ps(out + g, _mm512_mul_ps(found.one, _mm512_set1_ps(E4M3_UNIT)));
        _mm512_storeu_ps(out + g + 16, _mm512_mul_ps(found.two, _mm512_set1_ps(E4M3_UNIT)));
    }
#endif
    for (; g < count; g++) out[g] = m.scale_numbers[bytes[g]];
}

// The scales and zero points of one row.
static void read_groups(const Matrix &m, int64_t row, float *factor, float *zero) {
    int64_t first = (m.block_rows ? row / m.block_rows : 0) * m.groups, groups = m.groups;
    const float *floats = (const float *)m.scales + first;
    const bf16 *brains = (const bf16 *)m.scales + first;
    const uint16_t *halves = (const uint16_t *)m.scales + first;
    const uint8_t *bytes = (const uint8_t *)m.scales + first;
    switch (m.scale) {
        case FLOAT32: memcpy(factor, floats, groups * sizeof *factor); break;
        case BFLOAT16: for (int64_t g = 0; g < groups; g++) factor[g] = to_float(brains[g]); break;
        case FLOAT16: for (int64_t g = 0; g < groups; g++) factor[g] = half_to_float(halves[g]); break;
        case POWERS: powers_of_two(bytes, groups, factor); break;
        default: eighths(m, bytes, groups, factor);
    }
    if (m.zeros)
        for (int64_t g = 0; g < groups; g++) zero[g] = (float)m.zeros[first + g];
    if (!m.outer) return;
    float outer = m.outer[m.together ? row / m.together : 0];
    if (m.divides)
        for (int64_t g = 0; g < groups; g++) factor[g] /= outer;
    else
        for (int64_t g = 0; g < groups; g++) factor[g] *= outer;
}

static void unpack_row(const Matrix &m, int64_t row, const float *factor, const float *zero, bf16 *out) {
    const uint8_t *codes = m.codes + row * m.row_bytes;
    const int32_t *order = m.order ? m.order + (m.together ? row / m.together : 0) * m.columns : nullptr;
    int64_t done = 0;
#if HAS_BF16_DOT
    bool is_done = false;
    if (m.bits == 4 && !order && m.block_columns % 16 == 0)
        done = columns_by_table(m, codes, factor, zero, out);
    else
        switch (m.kind) {
            case INT2: is_done = columns_by_vector<INT2>(m, codes, order, factor, zero, out); break;
            case BITS4: is_done = columns_by_vector<BITS4>(m, codes, order, factor, zero, out); break;
            case INT8: is_done = columns_by_vector<INT8>(m, codes, order, factor, zero, out); break;
            case E4M3: is_done = columns_by_vector<E4M3>(m, codes, order, factor, zero, out); break;
            default: is_done = columns_by_vector<E5M2>(m, codes, order, factor, zero, out);
        }
    if (is_done) return;
#endif
    switch (m.bits) {
        case 2: return columns_one_by_one<2>(m, codes, order, done, factor, zero, out);
        case 4: return columns_one_by_one<4>(m, codes, order, done, factor, zero, out);
        default: return columns_one_by_one<8>(m, codes, order, done, factor, zero, out);
    }
}

static void unpack_one(const Matrix &m, int64_t row, Groups &held, bf16 *out) {
    read_groups(m, row, held.factor.data(), held.zero.data());
    unpack_row(m, row, held.factor.data(), held.zero.data(), out);
}

static Matrix matrix_of(
    const uint8_t *codes, const float *numbers, const void *scales, const float *scale_numbers, const int8_t *zeros,
    const float *outer, const int32_t *order, const int64_t *how) {
    Matrix m = {codes, numbers, scales, scale_numbers, zeros, outer, order};
    m.columns = how[0], m.row_bytes = how[1], m.bits = how[2], m.groups = how[3], m.block_rows = how[4];
    m.block_columns = how[5], m.together = how[6], m.divides = how[7], m.scale = how[8], m.kind = how[9];
    return m;
}

// R rows of the weight from `f` on, unpacked into `near`, times all rows of x.
template <int R>
static void multiply_unpacked(
    const Matrix &m, int64_t f, Groups &held, bf16 *near, const bf16 *bias, const bf16 *x, bf16 *y, int64_t T, int64_t F) {
    using linear::GROUP;
    for (int64_t r = 0; r < R; r++) unpack_one(m, f + r, held, near + r * m.columns);
    for (int64_t t = 0; t < T; t += GROUP) {
        int64_t count = T - t < GROUP ? T - t : GROUP;
        linear::multiply_group<R, true>(
            near, x + t * m.columns, count, m.columns, bias ? bias + f : nullptr, y + t * F + f, F);
    }
}

constexpr int64_t NEAR_BYTES = 1 << 14; // of rows that few rows of x meet: half of the nearest cache

} // namespace packed

// y[T, F] = x[T, H] @ weight[F, H].T + bias[F]: rows are unpacked once, a tile at a time, into the nearest cache.
extern "C" void firstlight_linear_packed(
    const uint8_t *codes, const float *numbers, const void *scales, const float *scale_numbers, const int8_t *zeros,
    const float *outer, const int32_t *order, const int64_t *how, const bf16 *bias, const bf16 *x, bf16 *y, int64_t T,
    int64_t F, int threads) {
    using namespace packed;
    using linear::FEW, linear::TILE;
    const Matrix m = matrix_of(codes, numbers, scales, scale_numbers, zeros, outer, order, how);
    const int64_t tiles = (F + TILE - 1) / TILE;
    const bool by_fours = T > FEW || m.columns * TILE * (int64_t)sizeof(bf16) <= NEAR_BYTES;
    if (F * m.columns < ENOUGH) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Groups held(m);
        std::vector<bf16> near(TILE * m.columns);
        int64_t first, last;
        share(tiles, omp_get_thread_num(), omp_get_num_threads(), &first, &last);
        last = last * TILE < F ? last * TILE : F;
        for (int64_t f = first * TILE; f < last;) {
            if (by_fours && last - f >= TILE) {
                multiply_unpacked<TILE>(m, f, held, near.data(), bias, x, y, T, F);
                f += TILE;
            } else if (last - f >= 2) {
                multiply_unpacked<2>(m, f, held, near.data(), bias, x, y, T, F);
                f += 2;
            } else {
                multiply_unpacked<1>(m, f, held, near.data(), bias, x, y, T, F);
                f += 1;
            }
        }
    }
}

extern "C" void firstlight_unpack(
    const uint8_t *codes, const float *numbers, const void *scales, const float *scale_numbers, const int8_t *zeros,
    const float *outer, const int32_t *order, const int64_t *how, bf16 *out, int64_t rows, int threads) {
    using namespace packed;
    const Matrix m = matrix_of(codes, numbers, scales, scale_numbers, zeros, outer, order, how);
    if (rows * m.columns < ENOUGH) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Groups held(m);
        int64_t first, last;
        share(rows, omp_get_thread_num(), omp_get_num_threads(), &first, &last);
        for (int64_t r = first; r < last; r++) unpack_one(m, r, held, out + r * m.columns);
    }
}
