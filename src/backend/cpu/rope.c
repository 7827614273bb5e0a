/* Rotary positions (docs/model.md), as ref turns them: plane i of a head is spanned by
 * dimensions i and i + half; angles are float32 products, as in the model's training code. */
#include "backend/cpu/cpu.h"

#include <math.h>

void rope_frequencies(const struct shape *s, float *inv_freq) {
    for (int32_t i = 0; i < s->rotary_dim / 2; i++) {
        inv_freq[i] = 1.0f / (float)pow(s->rope_theta, 2.0 * i / s->rotary_dim);
    }
}

void rope_angles(const float *inv_freq, int32_t pos, int32_t half, float *out) {
    for (int32_t i = 0; i < half; i++) {
        float angle = (float)pos * inv_freq[i];
        out[i] = cosf(angle);
        out[half + i] = sinf(angle);
    }
}

void rope_turn(float *head, const float *angles, int32_t half) {
    for (int32_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half], c = angles[i], s = angles[half + i];
        head[i] = a * c - b * s;
        head[i + half] = b * c + a * s;
    }
}
