#include "cli/measure.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

/* For qsort; the difference of two doubles does not fit an int. */
static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(double *v, size_t n) {
    qsort(v, n, sizeof *v, compare_doubles);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* median has sorted v: its ends are the extremes. */
double spread(double *v, size_t n) {
    double middle = median(v, n);
    return middle > 0 ? (v[n - 1] - v[0]) / middle : 0;
}

/* FNV-1a: equal digests are to mean equal bits, there is no one to forge them. */
uint64_t digest_add(uint64_t digest, const void *bytes, size_t n) {
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++) digest = (digest ^ p[i]) * UINT64_C(0x100000001b3);
    return digest;
}

/* Knuth's multiplicative hash: spread over the vocabulary, and simple enough to be repeated by
 * another engine's benchmark. */
int32_t measured_token(uint32_t i, int32_t vocab) {
    return (int32_t)(i * UINT32_C(2654435761) % (uint32_t)vocab);
}

/* ---- read bandwidth -------------------------------------------------------------------------- */

enum { BANDWIDTH_BYTES = 512 << 20, BANDWIDTH_PASSES = 10, BANDWIDTH_THREADS = 256 };

struct reader {
    const uint64_t *data; /* [n] this thread's part */
    size_t n;
    uint64_t sum; /* so that the reads are not optimised away */
    pthread_t thread;
};

/* Four streams at a time: one alone leaves the memory system waiting for its next address. */
static void *read_part(void *arg) {
    struct reader *r = arg;
    const size_t quarter = r->n / 4;
    const uint64_t *a = r->data, *b = a + quarter, *c = b + quarter, *d = c + quarter;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= quarter; i += 8)
        for (size_t k = 0; k < 8; k++) sum[k] += a[i + k] + b[i + k] + c[i + k] + d[i + k];
    for (size_t k = 0; k < 8; k++) r->sum += sum[k];
    return NULL;
}

/* One pass over the buffer; returns seconds, or a negative number when threads cannot start. */
static double read_pass(const uint64_t *data, size_t n, struct reader *readers, int threads) {
    size_t part = n / (size_t)threads;
    double started = clock_seconds();
    int running = 0;
    for (; running < threads; running++) {
        readers[running] = (struct reader){.data = data + part * (size_t)running, .n = part};
        if (pthread_create(&readers[running].thread, NULL, read_part, &readers[running])) break;
    }
    for (int i = 0; i < running; i++) pthread_join(readers[i].thread, NULL);
    return running == threads ? clock_seconds() - started : -1;
}

/* The best pass counts and not the median: a bound is what the machine can do, and every
 * disturbance only lowers it. 512 MiB is past the caches of the machines this runs on. */
int read_bandwidth(int threads, double *bytes_per_second, lily_err *err) {
    static struct reader readers[BANDWIDTH_THREADS];
    if (threads <= 0) threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (threads <= 0) threads = 1;
    if (threads > BANDWIDTH_THREADS) threads = BANDWIDTH_THREADS;
    uint64_t *data = malloc(BANDWIDTH_BYTES);
    if (!data) return ERR_NOMEM(err, "read bandwidth");
    memset(data, 1, BANDWIDTH_BYTES); /* pages exist before the clock runs */
    double best = 0;
    for (int pass = 0; pass < BANDWIDTH_PASSES; pass++) {
        double seconds = read_pass(data, BANDWIDTH_BYTES / sizeof *data, readers, threads);
        if (seconds < 0) {
            free(data);
            return ERR(err, LILY_EBUSY, "read bandwidth: cannot start %d threads", threads);
        }
        double rate = BANDWIDTH_BYTES / seconds;
        if (rate > best) best = rate;
    }
    free(data);
    *bytes_per_second = best;
    return LILY_OK;
}

/* ---- logits ---------------------------------------------------------------------------------- */

int32_t argmax(const float *v, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (v[i] > v[best]) best = i;
    return best;
}

/* In double and by log1p: for a near-certain token exp and log of floats would give exactly 0, and
 * perplexities of good models differ there. */
double log_probability(const float *logits, int32_t n, int32_t target) {
    const int32_t best = argmax(logits, n);
    double rest = 0; /* of the mass, relative to the best one's */
    for (int32_t i = 0; i < n; i++)
        if (i != best) rest += exp((double)logits[i] - logits[best]);
    return (double)logits[target] - logits[best] - log1p(rest);
}
