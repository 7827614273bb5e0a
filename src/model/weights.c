#include "model/weights.h"

#include "base/bf16.h"

/* MLX affine groups, element i of a row in byte i * bits / 8, least significant first. */
void mat_row(const struct mat *m, int32_t r, float *out) {
    const uint8_t *q = m->data + (size_t)r * mat_row_bytes(m);
    if (m->bits == 16) {
        for (int32_t i = 0; i < m->cols; i++) {
            out[i] = bf16_to_f32((uint16_t)(q[2 * i] | q[2 * i + 1] << 8));
        }
        return;
    }
    int32_t groups = m->cols / 64;
    const uint16_t *scales = m->scales + (size_t)r * (size_t)groups;
    const uint16_t *biases = m->biases + (size_t)r * (size_t)groups;
    for (int32_t g = 0; g < groups; g++) {
        float scale = bf16_to_f32(scales[g]), bias = bf16_to_f32(biases[g]);
        for (int32_t i = g * 64; i < g * 64 + 64; i++) {
            int code = m->bits == 8 ? q[i] : (i & 1 ? q[i / 2] >> 4 : q[i / 2] & 15);
            out[i] = scale * (float)code + bias;
        }
    }
}

void mat_vec(const struct mat *m, const float *x, float *y) {
    float row[64];
    for (int32_t r = 0; r < m->rows; r++) {
        /* One group at a time keeps the dequantised values in registers and on the stack. */
        struct mat part = *m;
        double sum = 0;
        for (int32_t c = 0; c < m->cols; c += 64) {
            size_t group = (size_t)r * (size_t)(m->cols / 64) + (size_t)(c / 64);
            part.data = m->data + (size_t)r * mat_row_bytes(m) + (size_t)c * (size_t)m->bits / 8;
            part.scales = m->scales ? m->scales + group : NULL;
            part.biases = m->biases ? m->biases + group : NULL;
            part.rows = 1;
            part.cols = 64;
            mat_row(&part, 0, row);
            for (int32_t i = 0; i < 64; i++) sum += (double)row[i] * (double)x[c + i];
        }
        y[r] = (float)sum;
    }
}
