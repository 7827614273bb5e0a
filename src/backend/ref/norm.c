/* Norms (docs/model.md), and the softmax of attention and router. Sums are added in double.
 */
#include "backend/ref/ref.h"

static double sum_of_squares(const float *x, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

/* The weight is the factor itself: where a checkpoint stores zero-centred weights, 1 was added when
 * it was loaded. */
void ref_rms_norm(const float *x, const float *weight, float *y, int32_t n, float eps) {
    float r = (float)(1.0 / sqrt(sum_of_squares(x, n) / n + (double)eps));
    for (int32_t i = 0; i < n; i++) y[i] = x[i] * r * weight[i];
}

/* Of DeltaNet's queries and keys. Here eps joins the sum, not the mean. */
void ref_l2_norm(float *x, int32_t n, float factor) {
    float r = (float)(1.0 / sqrt(sum_of_squares(x, n) + 1e-6)) * factor;
    for (int32_t i = 0; i < n; i++) x[i] *= r;
}

/* The largest exponent is 0, so nothing overflows. */
void ref_softmax(float *x, int32_t n) {
    float max = x[0];
    for (int32_t i = 1; i < n; i++) max = fmaxf(max, x[i]);
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        x[i] = expf(x[i] - max);
        sum += (double)x[i];
    }
    for (int32_t i = 0; i < n; i++) x[i] = (float)((double)x[i] / sum);
}
