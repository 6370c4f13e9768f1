// Rotary positions of bfloat16 heads: float32 inside, rounded once.
#include "../native/common.h"

namespace rotary {

struct Heads {
    const bf16 *from;
    int64_t token_stride, head_stride, count;
    bf16 *to; // contiguous [T, count, D]
};

static FORCE_INLINE void
rotate(const bf16 *x, const float *cos, const float *sin, bf16 *y, int64_t D, int64_t half, bool interleaved) {
    if (interleaved)
        for (int64_t i = 0; i < half; i++) {
            float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]);
            y[2 * i] = to_bf16(first * cos[i] - second * sin[i]);
            y[2 * i + 1] = to_bf16(second * cos[i] + first * sin[i]);
        }
    else
        for (int64_t i = 0; i < half; i++) {
            float first = to_float(x[i]), second = to_float(x[i + half]);
            y[i] = to_bf16(first * cos[i] - second * sin[i]);
            y[i + half] = to_bf16(second * cos[i] + first * sin[i]);
        }
    memcpy(y + 2 * half, x + 2 * half, (D - 2 * half) * sizeof(bf16));
}

} // namespace rotary

// cos and sin are contiguous [T, half].
extern "C" void firstlight_rotary(
    const bf16 *q, int64_t q_token_stride, int64_t q_head_stride, int64_t N, bf16 *q_out, const bf16 *k,
    int64_t k_token_stride, int64_t k_head_stride, int64_t K, bf16 *k_out, const float *cos, const float *sin, int64_t T,
    int64_t D, int64_t half, int interleaved, int threads) {
    const rotary::Heads both[2] = {
        {q, q_token_stride, q_head_stride, N, q_out}, {k, k_token_stride, k_head_stride, K, k_out}};
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * (N + K) * D > ENOUGH)
    for (int64_t t = 0; t < T; t++)
        for (const rotary::Heads &heads : both)
            for (int64_t n = 0; n < heads.count; n++)
                rotary::rotate(
                    heads.from + t * heads.token_stride + n * heads.head_stride, cos + t * half, sin + t * half,
                    heads.to + (t * heads.count + n) * D, D, half, interleaved);
}
