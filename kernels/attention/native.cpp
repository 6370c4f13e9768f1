// Attention over the paged bfloat16 cache, and the write into it. Sequences with one query (decode) are served here, those
// with more in prefill.cpp.
//
// The keys of a decoding sequence are cut into spans of SPAN; each (sequence, key head, span) is a piece of work of its own, and the
// spans of a head are joined at the end by their maxima and sums (arXiv 2205.14135). The cut depends on the sequence alone,
// so that a sequence's result is the same bits whatever else is in the batch and however many threads share the work.
#include "../native/common.h"

#include <vector>

namespace attention {

constexpr int64_t SPAN = 256; // keys
constexpr int HEADS = 4;      // query heads of one key head that share a pass over the keys

struct Problem {
    const bf16 *q;                  // [T, N, D]
    int64_t q_token_stride, q_head_stride;
    const bf16 *k_cache, *v_cache;  // [P, K, S, D], [P, K, S, V]; the last dim is contiguous
    int64_t k_page, k_head, k_slot, v_page, v_head, v_slot;  // strides
    const int32_t *page_table;      // [B, width]
    int64_t width, page_size;
    const int32_t *query_start;     // [B + 1]
    const int32_t *kv_len;          // [B]
    int64_t B, N, K, D, V, window;  // window 0: none
    float scale, softcap;           // softcap 0: none
    const float *sinks;             // [N] or null
};

// What one span contributes for one query head: sum of exp(logit - most) and of exp(logit - most) * value.
struct Part {
    float most, sum;
    float *value; // [V]
};

// logits[key] = scale * q . key for `count` rows of keys.
static FORCE_INLINE void multiply_keys(
    const bf16 *q, const bf16 *keys, int64_t slot_stride, int64_t count, int64_t D, float scale, float *logits) {
#if HAS_BF16_DOT
    for (int64_t key = 0; key < count; key += 4) {
        const bf16 *row[4];
        __m512 sums[4];
        for (int i = 0; i < 4; i++) { // past the end the last row is read again
            row[i] = keys + (key + i < count ? key + i : count - 1) * slot_stride;
            sums[i] = _mm512_setzero_ps();
        }
        int64_t d = 0;
        for (; d + 32 <= D; d += 32) {
            __m512bh part = load_bf16<true>(q + d, 0);
            for (int i = 0; i < 4; i++) sums[i] = _mm512_dpbf16_ps(sums[i], load_bf16<true>(row[i] + d, 0), part);
        }
        if (d < D) {
            __mmask32 mask = (1u << (D - d)) - 1;
            __m512bh part = load_bf16<false>(q + d, mask);
            for (int i = 0; i < 4; i++) sums[i] = _mm512_dpbf16_ps(sums[i], load_bf16<false>(row[i] + d, mask), part);
        }
        __m128 four = _mm_mul_ps(sum_of_each(sums[0], sums[1], sums[2], sums[3]), _mm_set1_ps(scale));
        _mm_mask_storeu_ps(logits + key, count - key >= 4 ? 15 : (1 << (count - key)) - 1, four);
    }
#else
    for (int64_t key = 0; key < count; key++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < D; d++) sum += to_float(q[d]) * to_float(keys[key * slot_stride + d]);
        logits[key] = sum * scale;
    }
#endif
}

// The span's keys, page by page: calls visit(first key within the span, keys, their first row's address).
template <typename Visit>
static FORCE_INLINE void each_page(
    const Problem &p, const bf16 *cache, int64_t page_stride, int64_t head_stride, int64_t slot_stride, int64_t b,
    int64_t k, int64_t first, int64_t last, Visit visit) {
    const int32_t *pages = p.page_table + b * p.width;
    for (int64_t at = first; at < last;) {
        int64_t slot = at % p.page_size;
        int64_t count = p.page_size - slot < last - at ? p.page_size - slot : last - at;
        visit(at - first, count, cache + pages[at / p.page_size] * page_stride + k * head_stride + slot * slot_stride);
        at += count;
    }
}

// out[h][v] += sum over keys of weight[h][key] * value[key][v], for G heads.
template <int G>
static FORCE_INLINE void add_values(
    const bf16 *values, int64_t slot_stride, int64_t count, const float *weights, float *const *out, int64_t V) {
#if HAS_BF16_DOT
    int64_t v = 0;
    for (; v + 32 <= V; v += 32) {
        __m512 low[G], high[G];
        for (int g = 0; g < G; g++) low[g] = _mm512_loadu_ps(out[g] + v), high[g] = _mm512_loadu_ps(out[g] + v + 16);
        for (int64_t key = 0; key < count; key++) {
            const bf16 *row = values + key * slot_stride + v;
            __m512i raw_low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)row));
            __m512i raw_high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + 16)));
            __m512 value_low = _mm512_castsi512_ps(_mm512_slli_epi32(raw_low, 16));
            __m512 value_high = _mm512_castsi512_ps(_mm512_slli_epi32(raw_high, 16));
            for (int g = 0; g < G; g++) {
                __m512 weight = _mm512_set1_ps(weights[g * SPAN + key]);
                low[g] = _mm512_fmadd_ps(weight, value_low, low[g]);
                high[g] = _mm512_fmadd_ps(weight, value_high, high[g]);
            }
        }
        for (int g = 0; g < G; g++) _mm512_storeu_ps(out[g] + v, low[g]), _mm512_storeu_ps(out[g] + v + 16, high[g]);
    }
#else
    int64_t v = 0;
#endif
    if (v < V)
        for (int64_t key = 0; key < count; key++)
            for (int g = 0; g < G; g++) {
                float weight = weights[g * SPAN + key];
                for (int64_t rest = v; rest < V; rest++) out[g][rest] += weight * to_float(values[key * slot_stride + rest]);
            }
}

template <int G>
static void attend_span(const Problem &p, int64_t b, int64_t k, int64_t n, int64_t first, int64_t last, Part *parts) {
    float weights[G * SPAN];
    const bf16 *q = p.q + p.query_start[b] * p.q_token_stride + n * p.q_head_stride;
    int64_t count = last - first;
    each_page(p, p.k_cache, p.k_page, p.k_head, p.k_slot, b, k, first, last, [&](int64_t at, int64_t keys, const bf16 *row) {
        for (int g = 0; g < G; g++)
            multiply_keys(q + g * p.q_head_stride, row, p.k_slot, keys, p.D, p.scale, weights + g * SPAN + at);
    });
    float *out[G];
    for (int g = 0; g < G; g++) {
        float *own = weights + g * SPAN, most = -INFINITY, sum = 0;
        if (p.softcap != 0)
            for (int64_t i = 0; i < count; i++) own[i] = p.softcap * tanhf(own[i] / p.softcap);
        for (int64_t i = 0; i < count; i++) most = own[i] > most ? own[i] : most;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) sum += own[i] = exponential(own[i] - most);
        parts[g].most = most, parts[g].sum = sum, out[g] = parts[g].value;
        memset(out[g], 0, p.V * sizeof(float));
    }
    each_page(p, p.v_cache, p.v_page, p.v_head, p.v_slot, b, k, first, last, [&](int64_t at, int64_t keys, const bf16 *row) {
        add_values<G>(row, p.v_slot, keys, weights + at, out, p.V);
    });
}

static void join(const Part *parts, int64_t spans, const float *sink, bf16 *out, int64_t V) {
    float most = sink ? *sink : -INFINITY;
    for (int64_t s = 0; s < spans; s++) most = parts[s].most > most ? parts[s].most : most;
    float sum = sink ? exponential(*sink - most) : 0;
    for (int64_t s = 0; s < spans; s++) sum += parts[s].sum * exponential(parts[s].most - most);
    float *total = parts[0].value;
    for (int64_t s = 0; s < spans; s++) {
        float factor = exponential(parts[s].most - most) / sum;
        for (int64_t v = 0; v < V; v++) total[v] = (s ? total[v] : 0) + factor * parts[s].value[v];
    }
    for (int64_t v = 0; v < V; v++) out[v] = to_bf16(total[v]);
}

} // namespace attention

#include "prefill.cpp"

namespace attention {

// A span of a decoding sequence's keys, or a block of a sequence's queries, for some query heads of one key head.
struct Work {
    int64_t b, k, n, heads;
    int64_t first, last; // keys of a span, or queries of a block, counted within the sequence
    int64_t part;        // of a span: its number; -1: a block of queries
};

struct Schedule {
    std::vector<Work> work;
    std::vector<int64_t> first_part; // [B * N + 1]: where the parts of a decoding sequence's head begin
};

static int64_t query_len(const Problem &p, int64_t b) { return p.query_start[b + 1] - p.query_start[b]; }

static Schedule plan(const Problem &p) {
    Schedule schedule;
    int64_t group = p.N / p.K, batches = (group + HEADS - 1) / HEADS, part = 0;
    for (int64_t b = 0; b < p.B; b++) {
        int64_t tokens = query_len(p, b), start = 0, step = SPAN, end = p.kv_len[b];
        if (tokens == 1) start = p.window && end > p.window ? end - p.window : 0;
#if HAS_BF16_DOT
        else step = QUERIES, end = tokens;
#endif
        int64_t pieces = (end - start + step - 1) / step;
        for (int64_t n = 0; n < p.N; n++, part += tokens == 1 ? pieces : 0) schedule.first_part.push_back(part);
        for (int64_t piece = pieces - 1; piece >= 0; piece--) // the last queries see the most keys: they go first
            for (int64_t k = 0; k < p.K; k++)
                for (int64_t batch = 0; batch < batches; batch++) {
                    int64_t n = k * group + group * batch / batches, next = k * group + group * (batch + 1) / batches;
                    int64_t first = start + piece * step, last = first + step < end ? first + step : end;
                    schedule.work.push_back({b, k, n, next - n, first, last, tokens == 1 ? piece : -1});
                }
    }
    schedule.first_part.push_back(part);
    return schedule;
}

static void attend_decoding(const Problem &p, const Work &w, const int64_t *first_part, Part *parts) {
    Part found[HEADS];
    for (int64_t g = 0; g < w.heads; g++) found[g] = parts[first_part[g] + w.part];
    switch (w.heads) {
        case 1: attend_span<1>(p, w.b, w.k, w.n, w.first, w.last, found); break;
        case 2: attend_span<2>(p, w.b, w.k, w.n, w.first, w.last, found); break;
        case 3: attend_span<3>(p, w.b, w.k, w.n, w.first, w.last, found); break;
        default: attend_span<HEADS>(p, w.b, w.k, w.n, w.first, w.last, found);
    }
    for (int64_t g = 0; g < w.heads; g++) parts[first_part[g] + w.part] = found[g];
}

static void attend(const Problem &p, bf16 *out, int threads) {
    Schedule schedule = plan(p);
    int64_t num_work = (int64_t)schedule.work.size(), num_parts = schedule.first_part.back(), products = 0;
    for (int64_t b = 0; b < p.B; b++) products += query_len(p, b) * p.kv_len[b] * p.N * p.D;
    std::vector<Part> parts(num_parts);
    std::vector<float> values(num_parts * p.V);
    for (int64_t i = 0; i < num_parts; i++) parts[i].value = values.data() + i * p.V;
#pragma omp parallel num_threads(threads) if (threads > 1 && products > ENOUGH)
    {
#if HAS_BF16_DOT
        Scratch scratch;
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_work; i++) {
            const Work &w = schedule.work[i];
            if (w.part >= 0) attend_decoding(p, w, &schedule.first_part[w.b * p.N + w.n], parts.data());
#if HAS_BF16_DOT
            else
                attend_block(
                    p, w.b, w.k, w.n, w.heads, p.query_start[w.b] + w.first, p.kv_len[w.b] - query_len(p, w.b) + w.first,
                    w.last - w.first, out, scratch);
#endif
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < p.B * p.N; row++) {
            int64_t b = row / p.N, n = row % p.N, first = schedule.first_part[row];
            if (query_len(p, b) == 1)
                join(
                    parts.data() + first, schedule.first_part[row + 1] - first, p.sinks ? p.sinks + n : nullptr,
                    out + (p.query_start[b] * p.N + n) * p.V, p.V);
        }
    }
}

} // namespace attention

extern "C" void firstlight_attention(
    const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, const int32_t *page_table, const int32_t *query_start,
    const int32_t *kv_len, const float *sinks, bf16 *out, const int64_t *sizes, float scale, float softcap, int threads) {
    attention::attend(
        {q, sizes[0], sizes[1], k_cache, v_cache, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], page_table,
         sizes[8], sizes[9], query_start, kv_len, sizes[10], sizes[11], sizes[12], sizes[13], sizes[14], sizes[15], scale,
         softcap, sinks},
        out, threads);
}

// Keys and values of T tokens go to (page[t], slot[t]); the last dim of everything is contiguous.
extern "C" void firstlight_write_cache(
    const bf16 *k, const bf16 *v, bf16 *k_cache, bf16 *v_cache, const int64_t *page, const int64_t *slot,
    const int64_t *sizes, int threads) {
    int64_t T = sizes[0], K = sizes[1], D = sizes[2], V = sizes[3];
    const int64_t *from = sizes + 4, *to = sizes + 8; // strides: k token, k head, v token, v head; page, head, slot of both
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * K * (D + V) > ENOUGH)
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < K; h++) {
            memcpy(
                k_cache + page[t] * to[0] + h * to[1] + slot[t] * to[2], k + t * from[0] + h * from[1], D * sizeof(bf16));
            memcpy(
                v_cache + page[t] * to[3] + h * to[4] + slot[t] * to[5], v + t * from[2] + h * from[3], V * sizeof(bf16));
        }
}
