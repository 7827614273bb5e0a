/* Sampling on the device (docs/sampling.md), in float32: what a GPU does so that the next step need
 * not wait for the host. Same rules and order as the host's sampler, without a logit bias:
 *   penalties, division by the temperature, top_k, top_p, min_p, softmax, one draw.
 * Selection is exact with ties to the lower id. */
#include <float.h>

#include "backend/ref/ref.h"

/* A token that may be drawn. The best one's weight is 1. */
struct candidate {
    int32_t id;
    float weight;
    bool kept;
};

/* A logit after the penalties. count: 0 not seen, 1 in the prompt only, 1 + n: n times as output.
 */
static float penalised(const struct backend_sampling *p, float x, int32_t count) {
    if (count == 0) return x;
    if (p->repetition != 1) {
        x = x > 0 ? x / p->repetition : x * p->repetition;
        x = fminf(fmaxf(x, -FLT_MAX), FLT_MAX);
    }
    x -= p->frequency * (float)(count - 1);
    return count > 1 ? x - p->presence : x;
}

/* The largest of x[n] that comes after x[last] in descending order, of equals the lower id first;
 * last is -1 for the largest of all. Ids that may not be sampled are -infinity and none. -1: there
 * is no other. */
static int32_t next_largest(const float *x, int32_t n, int32_t last) {
    float value = last < 0 ? INFINITY : x[last];
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++) {
        if (x[i] == -INFINITY) continue;
        bool after = x[i] < value || (x[i] == value && i > last);
        if (after && (best < 0 || x[i] > x[best])) best = i;
    }
    return best;
}

/* The top_k largest of x[n], by ascending id; returns their number. */
static int32_t choose(const float *x, int32_t n, const struct backend_sampling *p,
                      struct candidate *out) {
    int32_t m = 0, last = -1, best = next_largest(x, n, -1);
    while (m < p->top_k && (last = next_largest(x, n, last)) >= 0) {
        int32_t at = m++;
        for (; at > 0 && out[at - 1].id > last; at--) out[at] = out[at - 1];
        out[at] = (struct candidate){last, expf((x[last] - x[best]) / p->temperature), true};
    }
    return m;
}

/* The sum of the kept ones, by ascending id. */
static float kept_weight(const struct candidate *c, int32_t n) {
    float sum = 0;
    for (int32_t i = 0; i < n; i++) {
        if (c[i].kept) sum += c[i].weight;
    }
    return sum;
}

/* Keeps the smallest set whose share of all candidates reaches top_p: the heaviest first. */
static void keep_top_p(struct candidate *c, int32_t n, float top_p) {
    float want = top_p * kept_weight(c, n), taken = 0;
    for (int32_t i = 0; i < n; i++) c[i].kept = false;
    do {
        int32_t best = -1;
        for (int32_t i = 0; i < n; i++) {
            if (!c[i].kept && (best < 0 || c[i].weight > c[best].weight)) best = i;
        }
        if (best < 0) return; /* rounding: all of them fall short of top_p */
        c[best].kept = true;
        taken += c[best].weight;
    } while (taken < want);
}

/* A kept candidate with probability proportional to its weight; u in [0, 1). */
static int32_t draw(const struct candidate *c, int32_t n, float u) {
    float left = u * kept_weight(c, n);
    int32_t last = 0; /* the last one with any weight takes what rounding leaves over */
    for (int32_t i = 0; i < n; i++) {
        if (!c[i].kept || !(c[i].weight > 0)) continue;
        last = i;
        left -= c[i].weight;
        if (left < 0) break;
    }
    return c[last].id;
}

int32_t ref_sample(const struct backend_sampling *p, uint64_t pick, const float *logits,
                   const int32_t *counts, const uint32_t *sampled, int32_t n, float *x) {
    struct candidate c[BACKEND_TOP_K];
    for (int32_t i = 0; i < n; i++) {
        bool allowed = sampled[i / 32] >> i % 32 & 1;
        x[i] = allowed ? penalised(p, logits[i], counts[i]) : -INFINITY;
    }
    if (p->temperature == 0) return next_largest(x, n, -1);
    int32_t m = choose(x, n, p, c);
    if (p->top_p < 1) keep_top_p(c, m, p->top_p);
    for (int32_t i = 0; i < m; i++) c[i].kept = c[i].kept && c[i].weight >= p->min_p;
    return draw(c, m, (float)(random_at(p->stream, pick) >> 40) * 0x1p-24f);
}
