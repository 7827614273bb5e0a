/* What the checks share: a backend with sessions that stops at its first failure, and ways to
 * compare rows of logits. */
#ifndef TESTS_CUDA_SIDE_H
#define TESTS_CUDA_SIDE_H

#include "check.h"

enum { SIDE_SESSIONS = 32 };

/* A model with sessions; the first failure is noted and makes the rest do nothing. */
struct side {
    const struct backend *b;
    struct backend_model *m;
    struct backend_session *s[SIDE_SESSIONS];
    const char *what;
    bool bad;
};

struct side side_open(const struct bench_model *t, const struct backend *b, const char *what,
                      int32_t sessions, const struct backend_options *extra);
void side_close(struct side *x);
void side_failed(struct side *x, int rc, const lily_err *err); /* nothing for LILY_OK */

/* ids [0, n), in calls of at most cut; all: [n][V] or NULL; last: [V] or NULL. */
void side_feed_ids(const struct bench_model *t, struct side *x, int i, const int32_t *ids,
                   int32_t n, int32_t cut, float *all, float *last);
/* Tokens [from, from + n) of the tests' text likewise. */
void side_feed(const struct bench_model *t, struct side *x, int i, int64_t from, int32_t n,
               int32_t cut, float *all, float *last);
/* One step of one session; logits that are not finite are a failure. */
int32_t side_decode(struct side *x, int i, int32_t token, float *logits);
/* Session s begins slot i's sequence: a prompt of its own, from the start. */
void side_begin_slot(const struct bench_model *b, struct side *x, int s, int32_t i);
/* Steps of slots [0, n) together; out: [n][V] of the last. */
void side_decode_slots(const struct bench_model *b, struct side *x, int32_t n, int32_t steps,
                       float *out);

/* n rows of logits, filled with NaN: what is not written is seen. */
float *side_rows(const struct bench_model *t, int32_t n);

int32_t best_of(const float *x, int32_t n); /* the lower index of equal ones */
/* KL(softmax(truth) || softmax(x)). */
double divergence(const float *truth, const float *x, int32_t n);
/* The smallest divergence from truth of any distribution that gives b at least what a gets: what
 * is lost by taking b for a. With p and q their probabilities, p ln(2p / (p + q)) + q ln(2q / (p +
 * q)); 0 where q is not below p. */
double tie_cost(const float *truth, int32_t a, int32_t b, int32_t n);

struct likeness {
    double kl, worst, max, agree; /* mean and largest KL of a row, largest difference, same top-1 */
};
/* Rows r of [0, rows) with r % step == 0, and the last 64; over all processors. */
struct likeness compare_some(const float *truth, const float *x, int32_t rows, int32_t n,
                             int32_t step);
struct likeness compare(const float *truth, const float *x, int32_t rows, int32_t n);

size_t differing(const void *a, const void *b, size_t n); /* bytes */
double median(double *v, int n);                          /* sorts v */

/* one(arg, i, worker) for i in [0, n), by as many threads as workers says. */
void in_parallel(int32_t n, int workers, void (*one)(void *arg, int32_t i, int worker), void *arg);
int processors(void);

#endif
