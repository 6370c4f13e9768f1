// y[T, F] = x[T, H] @ weight[F, H].T + bias[F] in bfloat16 with float32 sums, on weights as the checkpoint stores them.
//
// With few rows the time is that of reading the weight once, so a tile of 4 weight rows is read from memory while up to
// 24 rows of x, which stay in the nearest cache, are multiplied with it, at most 6 at a time (24 sums in registers). The
// tile four further on is asked for meanwhile, spread over the work, which is what hides memory behind arithmetic. With up
// to 3 rows there is little arithmetic to hide behind, and one row of the weight after another is read fastest.
//
// Each element of y is summed in an order that depends on H alone: a row's result is the same bits however many threads
// share the work.
#include "tile.h"

namespace linear {
constexpr int64_t SERIAL = 1 << 15; // fewer multiplications than this are not worth waking a second thread
}

extern "C" void firstlight_linear(
    const bf16 *weight, const bf16 *bias, const bf16 *x, bf16 *y, int64_t T, int64_t F, int64_t H, int threads) {
    using namespace linear;
    int64_t tiles = (F + TILE - 1) / TILE;
    if (T * F * H < SERIAL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t first, last;
        share(tiles, omp_get_thread_num(), omp_get_num_threads(), &first, &last);
        for (int64_t t = 0; t < T; t += GROUP) {
            int64_t count = T - t < GROUP ? T - t : GROUP;
            for (int64_t tile = first; tile < last; tile++) {
                int64_t f = tile * TILE;
                const bf16 *w = weight + f * H, *b = bias ? bias + f : nullptr;
                const bf16 *x_group = x + t * H;
                bf16 *y_group = y + t * F + f;
                if (F - f >= TILE) multiply_group<TILE>(w, x_group, count, H, b, y_group, F);
                else
                    for (int64_t r = 0; r < F - f; r++)
                        multiply_group<1>(w + r * H, x_group, count, H, b ? b + r : nullptr, y_group + r, F);
            }
        }
    }
}

extern "C" int firstlight_has_bf16_dot() { return HAS_BF16_DOT; }
