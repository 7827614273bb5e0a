#include "model/weights.h"

#include <string.h>

#include "base/bf16.h"

enum { GROUP = 64 };

/* Values of group g of row r: element i lies in bits i * bits .. of the row, least significant
 * first. */
static void mat_group(const struct mat *m, int32_t r, int32_t g, float *out) {
    const uint8_t *q = m->data + (size_t)r * mat_row_bytes(m) + (size_t)g * GROUP * m->bits / 8;
    if (m->bits == 16) {
        uint16_t bits[GROUP]; /* little endian, like every machine this runs on */
        memcpy(bits, q, sizeof bits);
        for (size_t i = 0; i < GROUP; i++) out[i] = bf16_to_f32(bits[i]);
        return;
    }
    size_t at = (size_t)r * (size_t)(m->cols / GROUP) + (size_t)g;
    float scale = bf16_to_f32(m->scales[at]), bias = bf16_to_f32(m->biases[at]);
    if (m->bits == 8) {
        for (size_t i = 0; i < GROUP; i++) out[i] = scale * (float)q[i] + bias;
        return;
    }
    for (size_t i = 0; i < GROUP / 2; i++) {
        out[2 * i] = scale * (float)(q[i] & 15) + bias;
        out[2 * i + 1] = scale * (float)(q[i] >> 4) + bias;
    }
}

void mat_row(const struct mat *m, int32_t r, float *out) {
    for (int32_t g = 0; g < m->cols / GROUP; g++) mat_group(m, r, g, out + (size_t)g * GROUP);
}

/* Eight float32 sums within a group, in a fixed order, are what compilers turn into vector code;
 * groups are added in double. */
void mat_vec(const struct mat *m, const float *x, float *y) {
    enum { LANES = 8 };
    float values[GROUP];
    for (int32_t r = 0; r < m->rows; r++) {
        double sum = 0;
        for (int32_t g = 0; g < m->cols / GROUP; g++) {
            const float *in = x + (size_t)g * GROUP;
            float lane[LANES] = {0};
            mat_group(m, r, g, values);
            for (size_t i = 0; i < GROUP; i += LANES) {
                for (size_t j = 0; j < LANES; j++) lane[j] += values[i + j] * in[i + j];
            }
            for (size_t j = 0; j < LANES; j++) sum += (double)lane[j];
        }
        y[r] = (float)sum;
    }
}
