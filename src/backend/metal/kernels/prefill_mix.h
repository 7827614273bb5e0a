// Small functions of the mixers' prefill kernels. MSL only, after metal_stdlib.
#ifndef LILY_METAL_PREFILL_MIX_H
#define LILY_METAL_PREFILL_MIX_H

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}
inline float4 silu(float4 x) {
    return x / (1.0f + exp(-x));
}

// log(1 + e^x). MSL has no log1p: the rounding of 1 + y is undone by what it did to y. From 20 on
// the result is x in float32.
inline float softplus(float x) {
    if (x > 20.0f) return x;
    const float y = exp(x);
    const float one_more = 1.0f + y;
    return one_more == 1.0f ? y : log(one_more) * (y / (one_more - 1.0f));
}

#endif
