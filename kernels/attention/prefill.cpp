// Attention of many queries (prefill) over the paged bfloat16 cache, on CPUs with bfloat16 dot products.
//
// A piece of work is a block of QUERIES tokens of a sequence, for up to HEADS query heads of one key head. It goes over the
// keys block by block; keys and values are rearranged into pairs of rows, once for all its queries, so that both products
// are the same small matrix product, and the softmax is kept up to date as in arXiv 2205.14135. The weights of the values
// are rounded to bfloat16, all sums are float32.
#if HAS_BF16_DOT

namespace attention {

constexpr int64_t QUERIES = 64; // tokens of a piece of work
constexpr int64_t KEYS = 128;   // keys of a block
constexpr int ROWS = 6;         // queries in registers at a time
constexpr int LANES = 16;

// c[R][COLUMNS] = or += a[R][2 pairs] x b, where b[pair][n] holds rows 2 pair and 2 pair + 1 of column n side by side.
template <int R, int COLUMNS>
static FORCE_INLINE void multiply_pairs(
    const bf16 *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t pairs, float *c, int64_t c_stride,
    bool add) {
    constexpr int VECTORS = COLUMNS / LANES;
    __m512 sums[R][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + v * LANES) : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) row[v] = (__m512bh)_mm512_loadu_si512(b + pair * b_stride + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            uint32_t both;
            memcpy(&both, a + r * a_stride + 2 * pair, sizeof both);
            __m512bh left = (__m512bh)_mm512_set1_epi32((int)both);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, row[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(c + r * c_stride + v * LANES, sums[r][v]);
}

template <int R>
static void multiply_wide(
    const bf16 *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t pairs, float *c, int64_t c_stride,
    int64_t columns, bool add) {
    int64_t n = 0;
    for (; n + 64 <= columns; n += 64) multiply_pairs<R, 64>(a, a_stride, b + n, b_stride, pairs, c + n, c_stride, add);
    for (; n < columns; n += LANES) multiply_pairs<R, LANES>(a, a_stride, b + n, b_stride, pairs, c + n, c_stride, add);
}

static void multiply_rows(
    int64_t rows, const bf16 *a, int64_t a_stride, const uint32_t *b, int64_t b_stride, int64_t pairs, float *c,
    int64_t c_stride, int64_t columns, bool add) {
    switch (rows) {
        case 1: return multiply_wide<1>(a, a_stride, b, b_stride, pairs, c, c_stride, columns, add);
        case 2: return multiply_wide<2>(a, a_stride, b, b_stride, pairs, c, c_stride, columns, add);
        case 3: return multiply_wide<3>(a, a_stride, b, b_stride, pairs, c, c_stride, columns, add);
        case 4: return multiply_wide<4>(a, a_stride, b, b_stride, pairs, c, c_stride, columns, add);
        case 5: return multiply_wide<5>(a, a_stride, b, b_stride, pairs, c, c_stride, columns, add);
        case 6: return multiply_wide<6>(a, a_stride, b, b_stride, pairs, c, c_stride, columns, add);
    }
}

// What a thread works in; grown when needed, kept for the next piece.
struct Scratch {
    std::vector<uint32_t> keys, values;
    std::vector<float> out, most, sum;
};

// Row `from` of the block's keys becomes column `from` of pairs of dims; of the values, half of a row of pairs of keys.
static void rearrange(const Problem &p, int64_t b, int64_t k, int64_t first, int64_t last, int64_t wide, Scratch &scratch) {
    int64_t half = p.D / 2, padded = (last - first + LANES - 1) / LANES * LANES;
    for (int64_t d = 0; d < half; d++)
        for (int64_t key = last - first; key < padded; key++) scratch.keys[d * KEYS + key] = 0;
    for (int64_t pair = (last - first) / 2; pair < padded / 2; pair++)
        memset(&scratch.values[pair * wide], 0, wide * sizeof(uint32_t));
    each_page(p, p.k_cache, p.k_page, p.k_head, p.k_slot, b, k, first, last, [&](int64_t at, int64_t keys, const bf16 *row) {
        for (int64_t d = 0; d < half; d++)
            for (int64_t key = 0; key < keys; key++)
                memcpy(&scratch.keys[d * KEYS + at + key], row + key * p.k_slot + 2 * d, sizeof(uint32_t));
    });
    each_page(p, p.v_cache, p.v_page, p.v_head, p.v_slot, b, k, first, last, [&](int64_t at, int64_t keys, const bf16 *row) {
        for (int64_t key = 0; key < keys; key++) {
            uint32_t *pair = &scratch.values[(at + key) / 2 * wide];
            const bf16 *value = row + key * p.v_slot;
            if ((at + key) % 2 == 0)
                for (int64_t v = 0; v < p.V; v++) pair[v] = value[v];
            else
                for (int64_t v = 0; v < p.V; v++) pair[v] |= (uint32_t)value[v] << 16;
        }
    });
}

// The softmax of one query over a block: logits -> bfloat16 weights, the sums so far scaled to the new maximum.
static FORCE_INLINE void weigh(
    const Problem &p, float *logits, int64_t padded, int64_t from, int64_t to, bf16 *weights, float *out, int64_t wide,
    float *most, float *sum) {
    float highest = *most;
    if (p.softcap != 0)
        for (int64_t i = from; i < to; i++) logits[i] = p.softcap * tanhf(logits[i] * p.scale / p.softcap) / p.scale;
    for (int64_t i = 0; i < from; i++) logits[i] = -INFINITY;
    for (int64_t i = to; i < padded; i++) logits[i] = -INFINITY;
    float block = -INFINITY;
#pragma omp simd reduction(max : block)
    for (int64_t i = 0; i < padded; i++) block = logits[i] > block ? logits[i] : block;
    highest = block * p.scale > highest ? block * p.scale : highest;
    float base = highest == -INFINITY ? 0 : highest, added = 0;
#pragma omp simd reduction(+ : added)
    for (int64_t i = 0; i < padded; i++) {
        float weight = exponential(logits[i] * p.scale - base);
        added += weight;
        weights[i] = to_bf16(weight);
    }
    float factor = exponential(*most - base);
    if (factor != 1)
        for (int64_t v = 0; v < wide; v++) out[v] *= factor;
    *sum = *sum * factor + added;
    *most = highest;
}

// Queries [start, end) of sequence b for heads [n, n + heads), all of key head k; positions of queries begin at `position`.
static void attend_block(
    const Problem &p, int64_t b, int64_t k, int64_t n, int64_t heads, int64_t token, int64_t position, int64_t count, bf16 *to,
    Scratch &scratch) {
    int64_t wide = (p.V + LANES - 1) / LANES * LANES, rows = heads * count;
    scratch.keys.resize(p.D / 2 * KEYS);
    scratch.values.resize(KEYS / 2 * wide);
    scratch.out.assign(rows * wide, 0);
    scratch.most.assign(rows, -INFINITY);
    scratch.sum.assign(rows, 0);
    int64_t first_key = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    for (int64_t first = first_key; first < position + count; first += KEYS) {
        int64_t last = first + KEYS < position + count ? first + KEYS : position + count;
        int64_t padded = (last - first + LANES - 1) / LANES * LANES;
        rearrange(p, b, k, first, last, wide, scratch);
        for (int64_t head = 0; head < heads; head++)
            for (int64_t t = 0; t < count; t += ROWS) {
                int64_t block = count - t < ROWS ? count - t : ROWS, at = head * count + t;
                if (position + t + block <= first) continue; // all of these queries come before the block
                float logits[ROWS * KEYS];
                bf16 weights[ROWS * KEYS];
                const bf16 *q = p.q + (token + t) * p.q_token_stride + (n + head) * p.q_head_stride;
                multiply_rows(block, q, p.q_token_stride, scratch.keys.data(), KEYS, p.D / 2, logits, KEYS, padded, false);
                for (int64_t r = 0; r < block; r++) {
                    int64_t here = position + t + r, to_key = here + 1 < last ? here + 1 - first : last - first;
                    int64_t from_key = p.window && here + 1 - p.window > first ? here + 1 - p.window - first : 0;
                    if (from_key > to_key) from_key = to_key;
                    weigh(
                        p, logits + r * KEYS, padded, from_key, to_key < 0 ? 0 : to_key, weights + r * KEYS,
                        &scratch.out[(at + r) * wide], wide, &scratch.most[at + r], &scratch.sum[at + r]);
                }
                multiply_rows(
                    block, weights, KEYS, scratch.values.data(), wide, padded / 2, &scratch.out[at * wide], wide, wide, true);
            }
    }
    for (int64_t head = 0; head < heads; head++)
        for (int64_t t = 0; t < count; t++) {
            int64_t row = head * count + t;
            float sum = scratch.sum[row], factor = 1;
            if (p.sinks) { // one more logit, without a value
                float sink = p.sinks[n + head], most = scratch.most[row] > sink ? scratch.most[row] : sink;
                factor = exponential(scratch.most[row] - most);
                sum = sum * factor + exponential(sink - most);
            }
            bf16 *out = to + ((token + t) * p.N + n + head) * p.V;
            for (int64_t v = 0; v < p.V; v++) out[v] = to_bf16(scratch.out[row * wide + v] * factor / sum);
        }
}

} // namespace attention

#endif
