// RMS normalisation of bfloat16 rows, alone and after the residual addition; the roundings are those of the reference.
#include "../native/common.h"

namespace rms_norm {

// Mean of squares in eight partial sums, whose order depends on H alone.
static FORCE_INLINE float mean_square(const bf16 *x, int64_t H) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t h = 0; h < H; h++) sum += to_float(x[h]) * to_float(x[h]);
    return sum / (float)H;
}

// Llama rounds the normalised row before it meets the weight; with an offset (Gemma) only the product is rounded.
static FORCE_INLINE void scale(const bf16 *x, const bf16 *weight, float eps, float offset, bf16 *y, int64_t H) {
    float factor = 1.0f / sqrtf(mean_square(x, H) + eps);
    if (offset == 0.0f)
        for (int64_t h = 0; h < H; h++) y[h] = to_bf16(to_float(to_bf16(to_float(x[h]) * factor)) * to_float(weight[h]));
    else
        for (int64_t h = 0; h < H; h++) y[h] = to_bf16(to_float(x[h]) * factor * (to_float(weight[h]) + offset));
}

} // namespace rms_norm

// Rows (outer, inner) of x start at outer * outer_stride + inner * inner_stride; y is contiguous.
extern "C" void firstlight_rms_norm(
    const bf16 *x, const bf16 *weight, bf16 *y, int64_t outer, int64_t inner, int64_t outer_stride, int64_t inner_stride,
    int64_t H, float eps, float offset, int threads) {
    int64_t rows = outer * inner;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * H > ENOUGH)
    for (int64_t row = 0; row < rows; row++)
        rms_norm::scale(
            x + row / inner * outer_stride + row % inner * inner_stride, weight, eps, offset, y + row * H, H);
}

extern "C" void firstlight_add_rms_norm(
    const bf16 *x, const bf16 *residual, const bf16 *weight, bf16 *y, bf16 *summed, int64_t rows, int64_t H, float eps,
    float offset, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * H > ENOUGH)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *a = x + row * H, *b = residual + row * H;
        bf16 *sum = summed + row * H;
        for (int64_t h = 0; h < H; h++) sum[h] = to_bf16(to_float(a[h]) + to_float(b[h]));
        rms_norm::scale(sum, weight, eps, offset, y + row * H, H);
    }
}
