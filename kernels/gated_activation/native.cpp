// activation(gate) * up of bfloat16 rows [gate | up]: float32 inside, rounded once.
#include "../native/common.h"

namespace gated_activation {

enum Kind { SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2, SIGMOID, CLAMPED, CAPPED, SITU };

static FORCE_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

template <Kind KIND> static FORCE_INLINE float activate(float x) {
    switch (KIND) {
        case SILU: return x * sigmoid(x);
        case GELU: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
        case GELU_TANH: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); // (1 + tanh u) / 2
        case QUICK_GELU: return x * sigmoid(1.702f * x);
        case RELU: return x < 0 ? 0 : x;
        case RELU2: return x < 0 ? 0 : x * x;
        case SIGMOID: return sigmoid(x);
        default: break; // of both halves
    }
    return x;
}

// b tanh(x / b): tanh u = 2 sigmoid(2 u) - 1.
static FORCE_INLINE float bounded(float x, float b) { return b * (2.0f * sigmoid(2.0f * x / b) - 1.0f); }

static FORCE_INLINE float least(float x, float limit) { return x > limit ? limit : x; }

static FORCE_INLINE float within(float x, float limit) { return x < -limit ? -limit : least(x, limit); }

// The numbers of the activation, in order.
struct Numbers {
    float a, b, c;
};

template <Kind KIND> static FORCE_INLINE float combine(float gate, float up, Numbers n) {
    if (KIND == CLAMPED) {
        gate = least(gate, n.a);
        return gate * sigmoid(n.b * gate) * (within(up, n.a) + n.c);
    }
    if (KIND == CAPPED) return least(gate * sigmoid(gate), n.a) * within(up, n.a);
    if (KIND == SITU) return bounded(gate, n.a) * sigmoid(gate) * bounded(up, n.b);
    return activate<KIND>(gate) * up;
}

template <Kind KIND> static void run(const bf16 *x, bf16 *y, int64_t T, int64_t F, Numbers n, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && T * F > ENOUGH)
    for (int64_t t = 0; t < T; t++) {
        const bf16 *gate = x + t * 2 * F, *up = gate + F;
        bf16 *out = y + t * F;
        for (int64_t f = 0; f < F; f++) out[f] = to_bf16(combine<KIND>(to_float(gate[f]), to_float(up[f]), n));
    }
}

} // namespace gated_activation

extern "C" void firstlight_gated_activation(
    const bf16 *x, bf16 *y, int64_t T, int64_t F, float a, float b, float c, int kind, int threads
) {
    using namespace gated_activation;
    Numbers n = {a, b, c};
    switch (kind) {
        case SILU: return run<SILU>(x, y, T, F, n, threads);
        case GELU: return run<GELU>(x, y, T, F, n, threads);
        case GELU_TANH: return run<GELU_TANH>(x, y, T, F, n, threads);
        case QUICK_GELU: return run<QUICK_GELU>(x, y, T, F, n, threads);
        case RELU: return run<RELU>(x, y, T, F, n, threads);
        case RELU2: return run<RELU2>(x, y, T, F, n, threads);
        case SIGMOID: return run<SIGMOID>(x, y, T, F, n, threads);
        case CLAMPED: return run<CLAMPED>(x, y, T, F, n, threads);
        case CAPPED: return run<CAPPED>(x, y, T, F, n, threads);
        case SITU: return run<SITU>(x, y, T, F, n, threads);
    }
}
