#include "engine/sampler.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum {
    BLOCK = 64,    /* logits looked at together when most of them cannot matter */
    HEAP_MAX = 256 /* top_k up to here is selected by a heap, above by partitioning */
};
static const float GREEDY_BELOW = 1e-5f;

struct sampler {
    struct sampler_vocab vocab;
    lily_sampling sampling;
    uint64_t stream; /* start of the random stream, from the seed */
    uint64_t picks;  /* since sampler_begin: the counter of the random stream */

    float *x;       /* [used] logits after penalties and bias */
    int32_t *id;    /* [used] candidates, ascending */
    float *weight;  /* [used] of the candidates, relative to the best one's 1 */
    float *scratch; /* [used] for selection, which reorders */
    float heap[HEAP_MAX];

    int32_t *count; /* [used] 0: not seen, 1: in the prompt only, 1 + n: n times in the output */
    int32_t *seen;  /* [n_seen] ids whose count is not 0 */
    int32_t n_seen;
};

/* Where a selection by value ends: larger values are in, and so are the first `ties` equal ones in
 * order of ids. */
struct cut {
    float value;
    int32_t ties;
};

int sampler_new(const struct sampler_vocab *vocab, struct sampler **out, lily_err *err) {
    *out = NULL;
    if (vocab->used - vocab->n_holes < 1) {
        return ERR(err, LILY_EMODEL, "vocabulary: found no token that can be sampled");
    }
    struct sampler *s = calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM(err, "sampler");
    size_t n = (size_t)vocab->used;
    s->vocab = *vocab;
    s->x = malloc(n * sizeof *s->x);
    s->id = malloc(n * sizeof *s->id);
    s->weight = malloc(n * sizeof *s->weight);
    s->scratch = malloc(n * sizeof *s->scratch);
    s->count = calloc(n, sizeof *s->count);
    s->seen = malloc(n * sizeof *s->seen);
    if (!s->x || !s->id || !s->weight || !s->scratch || !s->count || !s->seen) {
        sampler_free(s);
        return ERR_NOMEM(err, "sampler");
    }
    *out = s;
    return 0;
}

void sampler_free(struct sampler *s) {
    if (!s) return;
    free(s->x);
    free(s->id);
    free(s->weight);
    free(s->scratch);
    free(s->count);
    free(s->seen);
    free(s);
}

/* ---- parameters ------------------------------------------------------------------------------ */

static int check_range(const char *field, float value, float low, float high, lily_err *err) {
    if (value >= low && value <= high) return 0; /* false for NaN */
    return ERR(err, LILY_EINVAL, "%s: found %g, expected %g to %g", field, (double)value,
               (double)low, (double)high);
}

int sampler_check(const lily_sampling *p, int32_t vocab_used, lily_err *err) {
    int rc;
    if ((rc = check_range("temperature", p->temperature, 0, 100, err)) ||
        (rc = check_range("top_p", p->top_p, 0, 1, err)) ||
        (rc = check_range("min_p", p->min_p, 0, 1, err)) ||
        (rc = check_range("presence_penalty", p->presence_penalty, -2, 2, err)) ||
        (rc = check_range("frequency_penalty", p->frequency_penalty, -2, 2, err)) ||
        (rc = check_range("repetition_penalty", p->repetition_penalty, 0.01f, 100, err))) {
        return rc;
    }
    if (p->top_k < 0) {
        return ERR(err, LILY_EINVAL, "top_k: found %d, expected 0 (off) or more", p->top_k);
    }
    if (p->n_bias < 0 || (p->n_bias > 0 && (!p->bias_ids || !p->bias))) {
        return ERR(err, LILY_EINVAL, "logit_bias: found %d entries without ids or values",
                   p->n_bias);
    }
    for (int32_t i = 0; i < p->n_bias; i++) {
        if (p->bias_ids[i] < 0 || p->bias_ids[i] >= vocab_used) {
            return ERR(err, LILY_EINVAL, "logit_bias: found token id %d, expected 0 to %d",
                       p->bias_ids[i], vocab_used - 1);
        }
        if (!(fabsf(p->bias[i]) <= 1000)) {
            return ERR(err, LILY_EINVAL,
                       "logit_bias: found %g for token id %d, expected -1000 to 1000",
                       (double)p->bias[i], p->bias_ids[i]);
        }
    }
    return 0;
}

/* ---- random numbers -------------------------------------------------------------------------- */

/* The n-th number of the stream in [0, 1), 53 bits; a device uses the first 24 of them. */
static double uniform(uint64_t stream, uint64_t n) {
    return (double)(random_at(stream, n) >> 11) * 0x1p-53;
}

/* Marks an id as part of the sequence; output tokens are counted. */
static void note(struct sampler *s, int32_t id, int32_t as_output) {
    if (id < 0 || id >= s->vocab.used) return; /* padding rows cannot be sampled anyway */
    if (!s->count[id]) {
        s->count[id] = 1;
        s->seen[s->n_seen++] = id;
    }
    s->count[id] += as_output;
}

int sampler_begin(struct sampler *s, const lily_sampling *sampling, const int32_t *prompt,
                  size_t n_prompt, lily_err *err) {
    int rc = sampler_check(sampling, s->vocab.used, err);
    if (rc) return rc;
    s->sampling = *sampling;
    if (sampling->random_seed && getentropy(&s->sampling.seed, sizeof s->sampling.seed)) {
        return ERR(err, LILY_EIO, "seed: the system gave no random number; pass a seed");
    }
    /* Neighbouring seeds must not give overlapping streams: scatter the starting points. */
    s->stream = random_mix(s->sampling.seed ^ 0x6c696c7900000000u);
    s->picks = 0;
    for (int32_t i = 0; i < s->n_seen; i++) s->count[s->seen[i]] = 0;
    s->n_seen = 0;
    if (sampling->repetition_penalty != 1) {
        for (size_t i = 0; i < n_prompt; i++) note(s, prompt[i], 0);
    }
    return 0;
}

uint64_t sampler_seed(const struct sampler *s) {
    return s->sampling.seed;
}

/* ---- selection ------------------------------------------------------------------------------- */

/* Whether any of a block is at least t: written so that it compiles to vector compares. */
static bool any_at_least(const float *x, float t) {
    int hit = 0;
    for (int i = 0; i < BLOCK; i++) hit |= x[i] >= t;
    return hit;
}

static int32_t argmax(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t from = 0; from < n; from += BLOCK) {
        int32_t to = from + BLOCK < n ? from + BLOCK : n;
        if (to - from == BLOCK && !any_at_least(x + from, x[best])) continue;
        for (int32_t i = from; i < to; i++) {
            if (x[i] > x[best]) best = i;
        }
    }
    return best;
}

/* Restores the min-heap h[n] after h[i] grew. */
static void sift_down(float *h, int32_t n, int32_t i) {
    for (;;) {
        int32_t least = i, left = 2 * i + 1, right = left + 1;
        if (left < n && h[left] < h[least]) least = left;
        if (right < n && h[right] < h[least]) least = right;
        if (least == i) return;
        float t = h[i];
        h[i] = h[least];
        h[least] = t;
        i = least;
    }
}

/* The cut below the k largest of x[n], 0 < k <= HEAP_MAX, k < n. */
static struct cut cut_by_heap(const float *x, int32_t n, int32_t k, float *heap) {
    memcpy(heap, x, (size_t)k * sizeof *heap);
    for (int32_t i = k / 2 - 1; i >= 0; i--) sift_down(heap, k, i);
    for (int32_t from = k; from < n; from += BLOCK) {
        int32_t to = from + BLOCK < n ? from + BLOCK : n;
        if (to - from == BLOCK && !any_at_least(x + from, heap[0])) continue;
        for (int32_t i = from; i < to; i++) {
            if (x[i] <= heap[0]) continue;
            heap[0] = x[i];
            sift_down(heap, k, 0);
        }
    }
    struct cut cut = {heap[0], 0};
    for (int32_t i = 0; i < k; i++) cut.ties += heap[i] == cut.value;
    return cut;
}

/* The cut below the fewest largest of v[n] whose mass reaches want; the mass of a value is 1 when
 * by_count is set, else the value itself. Quickselect: linear on average, reorders v. */
static struct cut cut_by_mass(float *v, int32_t n, double want, bool by_count) {
    double taken = 0; /* mass of the values known to be in and no longer in v[from, to) */
    int32_t from = 0, to = n;
    uint64_t turn = 0;
    /* What is known to suffice: where rounding makes the last range fall short of want, all of it.
     */
    struct cut enough = {-INFINITY, n};
    while (from < to) {
        float pivot = v[from + (int32_t)(random_mix(turn++) % (uint64_t)(to - from))];
        int32_t above = from, equal = from, below = to; /* > pivot, == pivot, unknown, < pivot */
        double mass = 0;
        while (equal < below) {
            float value = v[equal];
            if (value > pivot) {
                v[equal++] = v[above];
                v[above++] = value;
                mass += by_count ? 1 : (double)value;
            } else if (value < pivot) {
                v[equal] = v[--below];
                v[below] = value;
            } else {
                equal++;
            }
        }
        double each = by_count ? 1 : (double)pivot;
        int32_t n_equal = below - above;
        if (above > from && taken + mass >= want) {
            to = above;
            enough = (struct cut){pivot, 0};
        } else if (taken + mass + each * n_equal >= want) {
            double ties = ceil((want - taken - mass) / each);
            return (struct cut){pivot, ties < 1 ? 1 : ties > n_equal ? n_equal : (int32_t)ties};
        } else {
            taken += mass + each * n_equal;
            from = below;
        }
    }
    return enough;
}

/* ---- a pick ---------------------------------------------------------------------------------- */

/* x = logits after penalties and bias; holes are -infinity. */
static void adjust(struct sampler *s, const float *logits) {
    const lily_sampling *p = &s->sampling;
    float *x = s->x;
    memcpy(x, logits, (size_t)s->vocab.used * sizeof *x);
    for (int32_t i = 0; i < s->n_seen; i++) {
        int32_t id = s->seen[i], outputs = s->count[id] - 1;
        if (p->repetition_penalty != 1) {
            float y = x[id] > 0 ? x[id] / p->repetition_penalty : x[id] * p->repetition_penalty;
            x[id] = fminf(fmaxf(y, -FLT_MAX), FLT_MAX); /* infinity is for holes alone */
        }
        x[id] -= p->frequency_penalty * (float)outputs;
        if (outputs > 0) x[id] -= p->presence_penalty;
    }
    for (int32_t i = 0; i < p->n_bias; i++) x[p->bias_ids[i]] += p->bias[i];
    for (int32_t i = 0; i < s->vocab.n_holes; i++) x[s->vocab.holes[i]] = -INFINITY;
}

/* Fills id[] and weight[] with the candidates top_k leaves, ids ascending; returns their number. */
static int32_t candidates(struct sampler *s) {
    const float *x = s->x;
    int32_t n = s->vocab.used, k = s->sampling.top_k, m = 0;
    struct cut cut = {-INFINITY, 0}; /* holes are out */
    if (k > 0 && k < n - s->vocab.n_holes) {
        if (k <= HEAP_MAX) {
            cut = cut_by_heap(x, n, k, s->heap);
        } else {
            memcpy(s->scratch, x, (size_t)n * sizeof *x);
            cut = cut_by_mass(s->scratch, n, k, true);
        }
    }
    float best = -INFINITY;
    for (int32_t from = 0; from < n; from += BLOCK) {
        int32_t to = from + BLOCK < n ? from + BLOCK : n;
        if (to - from == BLOCK && !any_at_least(x + from, cut.value)) continue;
        for (int32_t i = from; i < to; i++) {
            if (!(x[i] > cut.value || (x[i] == cut.value && cut.ties-- > 0))) continue;
            s->id[m] = i;
            s->weight[m++] = x[i];
            if (x[i] > best) best = x[i];
        }
    }
    float temperature = s->sampling.temperature;
    for (int32_t i = 0; i < m; i++) s->weight[i] = expf((s->weight[i] - best) / temperature);
    return m;
}

/* Keeps the candidates within the cut; returns their number. */
static int32_t keep(struct sampler *s, int32_t n, struct cut cut) {
    int32_t m = 0;
    for (int32_t i = 0; i < n; i++) {
        float w = s->weight[i];
        if (!(w > cut.value || (w == cut.value && cut.ties-- > 0))) continue;
        s->id[m] = s->id[i];
        s->weight[m++] = w;
    }
    return m;
}

static double sum(const float *v, int32_t n) {
    double total = 0;
    for (int32_t i = 0; i < n; i++) total += (double)v[i];
    return total;
}

/* The smallest set of candidates whose share reaches top_p. */
static int32_t filter_top_p(struct sampler *s, int32_t n) {
    double total = sum(s->weight, n), top_p = (double)s->sampling.top_p;
    /* Candidates this light hold less than 1 - top_p even all together, so that none of them is in:
     * few values are left to select among. */
    double light = (1 - top_p) * total / n;
    int32_t m = 0;
    for (int32_t i = 0; i < n; i++) {
        if ((double)s->weight[i] >= light) s->scratch[m++] = s->weight[i];
    }
    return keep(s, n, cut_by_mass(s->scratch, m, top_p * total, false));
}

static int32_t draw(struct sampler *s) {
    int32_t n = candidates(s);
    if (s->sampling.top_p < 1) n = filter_top_p(s, n);
    if (s->sampling.min_p > 0) n = keep(s, n, (struct cut){s->sampling.min_p, n});
    double left = uniform(s->stream, s->picks) * sum(s->weight, n);
    int32_t last = 0; /* the last candidate with any weight takes what rounding leaves over */
    for (int32_t i = 0; i < n; i++) {
        if (!(s->weight[i] > 0)) continue;
        last = i;
        left -= (double)s->weight[i];
        if (left < 0) break;
    }
    return s->id[last];
}

int32_t sampler_pick(struct sampler *s, const float *logits) {
    adjust(s, logits);
    int32_t id = s->sampling.temperature < GREEDY_BELOW ? argmax(s->x, s->vocab.used) : draw(s);
    s->picks++;
    note(s, id, 1);
    return id;
}

bool sampler_for_device(const struct sampler *s, struct backend_sampling *out, uint64_t *pick) {
    const lily_sampling *p = &s->sampling;
    bool greedy = p->temperature < GREEDY_BELOW;
    if (p->n_bias > 0) return false;
    if (!greedy && (p->top_k < 1 || p->top_k > BACKEND_TOP_K)) return false;
    *out = (struct backend_sampling){
        .temperature = greedy ? 0 : p->temperature,
        .top_p = p->top_p,
        .min_p = p->min_p,
        .repetition = p->repetition_penalty,
        .frequency = p->frequency_penalty,
        .presence = p->presence_penalty,
        .top_k = p->top_k,
        .stream = s->stream,
    };
    *pick = s->picks;
    return true;
}
