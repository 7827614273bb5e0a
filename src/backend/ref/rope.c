/* Rotary positions (docs/model.md). Only the first rotary_dim dimensions of a head turn, as
 * rotary_dim / 2 planes; plane i is spanned by dimensions i and i + rotary_dim / 2. Text has one
 * position per token, so the model's three interleaved position sections all read the same number
 * and this is plain RoPE. */
#include "backend/ref/ref.h"

/* inv_freq[i] = theta^(-2i / rotary_dim), i in [0, rotary_dim / 2): a rounded power, then a rounded
 * reciprocal, which are Hugging Face's bits. */
void ref_rope_frequencies(const struct shape *s, float *inv_freq) {
    for (int32_t i = 0; i < s->rotary_dim / 2; i++) {
        inv_freq[i] = 1.0f / (float)pow(s->rope_theta, 2.0 * i / s->rotary_dim);
    }
}

/* The angle pos * inv_freq is a float32 product, as in the model's training code: near the end of
 * the context its rounding is visible (1/64 radian), and part of what the model learned. */
void ref_rope_angles(const float *inv_freq, int32_t pos, int32_t half, float *cosines,
                     float *sines) {
    for (int32_t i = 0; i < half; i++) {
        float angle = (float)pos * inv_freq[i];
        cosines[i] = cosf(angle);
        sines[i] = sinf(angle);
    }
}

/* Turns one head in place; dimensions from 2 * half on stay as they are. */
void ref_rope(float *head, const float *cosines, const float *sines, int32_t half) {
    for (int32_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i] + a * sines[i];
    }
}
