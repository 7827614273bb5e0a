#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/driver.h"
#include "base/clock.h"
#include "check.h"
#include "side.h"

/* Tokens a second of greedy decoding at a depth, two steps in flight. */
static double decode_speed(struct side *x, int32_t steps) {
    const struct backend_sampling p = {.temperature = 0, .top_p = 1, .repetition = 1};
    struct decode_slot slot = {.session = x->s[0], .token = 1, .sampling = &p};
    struct decode_result result;
    lily_err err;
    if (!x->bad) side_failed(x, x->b->sample_begin(x->s[0], NULL, 0, &err), &err);
    int64_t began = clock_ns();
    for (int32_t k = 0; k <= steps && !x->bad; k++) {
        if (k == 8) began = clock_ns(); /* after a warm start */
        if (k < steps) side_failed(x, x->b->decode_submit(x->m, &slot, 1, &err), &err);
        slot.token = -1;
        if (k > 0 && !x->bad) side_failed(x, x->b->decode_wait(x->m, &result, 1, &err), &err);
    }
    /* Step 7 had just begun. */
    return (steps - 7) / ((double)(clock_ns() - began) * 1e-9);
}

/* Tokens a second of n sessions together, two steps in flight. */
static double batch_speed(const struct bench_model *b, struct side *x, int32_t n, int32_t steps) {
    static const struct backend_sampling p = {.temperature = 0, .top_p = 1, .repetition = 1};
    struct decode_slot slot[32];
    struct decode_result result[32];
    lily_err err;
    int64_t began = clock_ns();
    for (int32_t i = 0; i < n && !x->bad; i++) {
        side_begin_slot(b, x, i, i);
        if (!x->bad) side_failed(x, b->cuda->sample_begin(x->s[i], NULL, 0, &err), &err);
        slot[i] = (struct decode_slot){.session = x->s[i], .token = i + 1, .sampling = &p};
    }
    for (int32_t k = 0; k <= steps && !x->bad; k++) {
        if (k == 4) began = clock_ns();
        if (k < steps) side_failed(x, b->cuda->decode_submit(x->m, slot, n, &err), &err);
        for (int32_t i = 0; i < n; i++) slot[i].token = -1;
        if (k > 0 && !x->bad) side_failed(x, b->cuda->decode_wait(x->m, result, n, &err), &err);
    }
    /* Step 3 had just begun. */
    return (double)n * (steps - 3) / ((double)(clock_ns() - began) * 1e-9);
}

void measure_batches(const struct bench_model *b) {
    static const int32_t sizes[] = {1, 2, 4, 8, 16, 32};
    static const double goals[] = {0, 0, 0, 2500, 0, 4500};
    struct bench_model narrow = *b;
    narrow.context = 1024;
    struct side x = side_open(&narrow, b->cuda, "speed of batches", 32, NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !x.bad; i++) {
        char what[96];
        snprintf(what, sizeof what, "decode of %d sessions", sizes[i]);
        reach(what, batch_speed(&narrow, &x, sizes[i], 36), "tok/s", goals[i]);
    }
    side_close(&x);
}

/* Seconds of a prompt of n from the start: the median of so many, after one that is not counted. */
static double prompt_time(const struct bench_model *b, struct side *x, int32_t n, int repeats,
                          float *logits) {
    double s[9] = {0};
    for (int k = 0; k < repeats + 1 && !x->bad; k++) {
        b->cuda->reset(x->s[0]);
        int64_t began = clock_ns();
        side_feed(b, x, 0, 0, n, n, NULL, logits);
        if (k) s[k - 1] = (double)(clock_ns() - began) * 1e-9;
    }
    return x->bad ? (double)NAN : median(s, repeats);
}

/* The goals are those of one H200 and all layers of the real shape. */
void measure(const struct bench_model *b) {
    static const int32_t prompts[] = {1, 2, 8, 16, 32, 64, 128, 512, 2048, 4096, 16384, 65536};
    static const double goals[] = {0, 0, 0, 0, 0, 0, 0, 15000, 0, 30000, 30000, 20000};
    static const int32_t depths[] = {0, 4096, 32768};
    static const double depth_goals[] = {1000, 950, 800};
    struct bench_model wide = *b;
    char what[96];
    wide.context = 66560;
    int64_t began = clock_ns();
    struct side x = side_open(&wide, b->cuda, "speed", 1, NULL);
    float *logits = side_rows(b, 1);
    printf("speed\n");
    record("open", (double)(clock_ns() - began) * 1e-9, "s");
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts && !x.bad; i++) {
        double m = prompt_time(&wide, &x, prompts[i], prompts[i] > 4096 ? 2 : 5, logits);
        snprintf(what, sizeof what, "prompt of %d (%.3f ms)", prompts[i], m * 1e3);
        reach(what, prompts[i] / m, "tok/s", goals[i]);
    }
    for (size_t i = 0; i < sizeof depths / sizeof *depths && !x.bad; i++) {
        b->cuda->reset(x.s[0]);
        if (depths[i]) side_feed(&wide, &x, 0, 0, depths[i], depths[i], NULL, NULL);
        snprintf(what, sizeof what, "decode at %d", depths[i]);
        reach(what, decode_speed(&x, 264), "tok/s", depth_goals[i]);
    }
    free(logits);
    side_close(&x);
}

/* ---- time over prompt length ----------------------------------------------------------------- */

/* No length may take more than 1.25 x what its neighbours' times, joined by a line, say for it. */
void measure_sweep(const struct bench_model *b) {
    static const int32_t n[] = {1,    2,    3,    4,    5,    7,    8,    9,    12,  15,  16,
                                17,   20,   24,   28,   31,   32,   33,   40,   48,  57,  63,
                                64,   65,   80,   96,   112,  127,  128,  129,  160, 192, 224,
                                255,  256,  257,  320,  384,  448,  511,  512,  513, 640, 768,
                                1000, 1024, 1025, 1280, 1536, 1792, 2000, 2047, 2048};
    enum { COUNT = sizeof n / sizeof *n };
    struct bench_model narrow = *b;
    double ms[COUNT], worst = 0;
    int32_t where = 0;
    char what[96];
    narrow.context = 2112;
    struct side x = side_open(&narrow, b->cuda, "sweep", 1, NULL);
    float *logits = side_rows(b, 1);
    printf("time over prompt length\n");
    for (int i = 0; i < COUNT && !x.bad; i++) {
        ms[i] = 1e3 * prompt_time(&narrow, &x, n[i], 5, logits);
        snprintf(what, sizeof what, "sweep, prompt of %d", n[i]);
        record(what, ms[i], "ms");
    }
    for (int i = 1; i + 1 < COUNT && !x.bad; i++) {
        double along = (double)(n[i] - n[i - 1]) / (n[i + 1] - n[i - 1]);
        double ratio = ms[i] / (ms[i - 1] + along * (ms[i + 1] - ms[i - 1]));
        if (ratio <= worst) continue;
        worst = ratio;
        where = n[i];
    }
    snprintf(what, sizeof what, "sweep: largest time over its neighbours' trend (length %d)",
             where);
    note(what, x.bad ? (double)NAN : worst, 1.25);
    free(logits);
    side_close(&x);
}

/* ---- for profilers --------------------------------------------------------------------------- */

/* One step of the first n sessions, with logits [n][vocab]. */
static void decode_once(struct side *x, int32_t n, int32_t vocab, float *logits) {
    struct decode_slot slot[32];
    struct decode_result result[32];
    lily_err err;
    for (int32_t k = 0; k < n; k++) {
        slot[k] = (struct decode_slot){
            .session = x->s[k], .token = k, .logits = logits + (size_t)k * (size_t)vocab};
    }
    side_failed(x, x->b->decode_submit(x->m, slot, n, &err), &err);
    if (!x->bad) side_failed(x, x->b->decode_wait(x->m, result, n, &err), &err);
}

/* The steps that a profiler should see (tests/cuda/kernel_table.py knows their order), each run
 * once before: a prompt of 4,096, decode steps of 1, 8 and 32 sessions. */
void steps_for_profiler(const struct bench_model *b) {
    static const int32_t slots[] = {1, 8, 32};
    struct bench_model narrow = *b;
    narrow.context = 4352;
    struct side x = side_open(&narrow, b->cuda, "profiler", 32, NULL);
    float *logits = side_rows(b, 32);
    for (int k = 0; k < 2 && !x.bad; k++) {
        b->cuda->reset(x.s[0]);
        if (k) profiler_window(true);
        side_feed(&narrow, &x, 0, 0, 4096, 4096, NULL, logits);
        if (k) profiler_window(false);
    }
    for (int i = 0; i < 3 && !x.bad; i++) {
        side_decode_slots(&narrow, &x, slots[i], 1, logits);
        profiler_window(true);
        decode_once(&x, slots[i], b->vocab, logits);
        profiler_window(false);
    }
    note("steps for a profiler that failed", x.bad, 0);
    free(logits);
    side_close(&x);
}

/* Fills the card's memory until so many bytes are left, says so, and holds it until standard input
 * ends: another program then finds a full card. */
void hold_memory(double left) {
    lily_err err = {0};
    const struct cuda_driver *d = cuda_driver_open(&err);
    CUdevice device;
    CUcontext context;
    CUdeviceptr block;
    size_t free_now = 0, total = 0, piece = (size_t)256 << 20;
    if (!d || d->device_get(&device, 0) || d->context_retain(&context, device) ||
        d->context_set(context)) {
        note_error("hold", LILY_EBACKEND, &err);
        return;
    }
    while (piece >= 1 << 20) {
        if (d->memory_info(&free_now, &total) || (double)free_now < left + (double)piece ||
            d->memory_new(&block, piece)) {
            piece /= 2;
        }
    }
    record("memory left free", (double)free_now * 1e-6, "MB");
    while (getchar() != EOF) continue;
    d->context_release(device);
}

/* The kernels of some steps, each run alone. */
void profile(const struct bench_model *b) {
    static const int32_t prompts[] = {16, 512, 4096};
    static const int32_t slots[] = {1, 8, 32};
    struct bench_model narrow = *b;
    char what[96];
    narrow.context = 4352;
    profile_begin();
    struct side x = side_open(&narrow, b->cuda, "profile", 32, NULL);
    float *logits = side_rows(b, 32);
    for (int i = 0; i < 3 && !x.bad; i++) {
        b->cuda->reset(x.s[0]);
        profile_start();
        side_feed(&narrow, &x, 0, 0, prompts[i], prompts[i], NULL, logits);
        snprintf(what, sizeof what, "prompt of %d", prompts[i]);
        profile_print(what);
    }
    for (int i = 0; i < 3 && !x.bad; i++) {
        side_decode_slots(&narrow, &x, slots[i], 1, logits);
        profile_start();
        decode_once(&x, slots[i], b->vocab, logits);
        snprintf(what, sizeof what, "decode of %d", slots[i]);
        profile_batch(b->w->shape, b->w->layers, slots[i]);
        profile_print(what);
    }
    free(logits);
    side_close(&x);
    profile_end();
}
