/* Where a step's time goes: the driver's launch is wrapped so that every kernel runs alone between
 * two events, and its time is added to its name. */
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/driver.h"
#include "check.h"

enum { MOST = 128 };
static const double PLAIN_READ = 4642; /* GB/s on an H200 */
static struct {
    CUfunction function;
    char name[64];
    double ms;
    double bytes; /* that all calls of a step must move; 0: not known */
    int calls;
} kernels[MOST];
static int n_kernels;
static struct cuda_driver *driver; /* the backend's own table, changed while a profile runs */
static struct cuda_driver plain;
static CUevent begin, end;
static CUresult (*elapsed)(float *ms, CUevent begin, CUevent end); /* NULL: no clock */

/* A function of the driver that the program has no use for; NULL on the emulated card. */
static void *driver_function(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

static CUresult named_function(CUfunction *function, CUmodule module, const char *name) {
    CUresult r = plain.module_function(function, module, name);
    if (r == 0 && n_kernels < MOST) {
        kernels[n_kernels].function = *function;
        snprintf(kernels[n_kernels++].name, sizeof kernels[0].name, "%s", name);
    }
    return r;
}

static void add(CUfunction function) {
    float ms = 0;
    plain.event_wait(end);
    if (elapsed) elapsed(&ms, begin, end);
    for (int i = 0; i < n_kernels; i++) {
        if (kernels[i].function != function) continue;
        kernels[i].ms += (double)ms;
        kernels[i].calls++;
        return;
    }
}

static CUresult timed_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, unsigned shared, CUstream stream,
                             void **parameters, void **extra) {
    plain.event_record(begin, stream);
    CUresult r = plain.launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
    plain.event_record(end, stream);
    add(f);
    return r;
}

static CUresult timed_launch_with(const CUlaunchConfig *c, CUfunction f, void **parameters,
                                  void **extra) {
    return timed_launch(f, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z,
                        c->shared, c->stream, parameters, extra);
}

void profile_begin(void) {
    driver = (struct cuda_driver *)(uintptr_t)cuda_driver_open(NULL);
    plain = *driver;
    void *symbol = driver_function("cuEventElapsedTime");
    memcpy(&elapsed, &symbol, sizeof elapsed);
    driver->module_function = named_function;
    driver->launch = timed_launch;
    driver->launch_with = timed_launch_with;
    n_kernels = 0;
}

void profile_start(void) {
    if (!begin) {
        plain.event_new(&begin, 0);
        plain.event_new(&end, 0);
    }
    for (int i = 0; i < n_kernels; i++) kernels[i].ms = kernels[i].bytes = kernels[i].calls = 0;
}

/* Codes, scales and biases. */
static double matrix(double rows, double cols, double bits) {
    return rows * cols * (bits / 8 + 4.0 / 64);
}

static void must_move(const char *name, double bytes) {
    for (int i = 0; i < n_kernels; i++) {
        if (strcmp(kernels[i].name, name) == 0) kernels[i].bytes = bytes;
    }
}

void profile_batch(const struct shape *s, int32_t layers, int32_t n) {
    double full = shape_attention_layers(s, layers), gdn = layers - full, h = s->hidden;
    /* The experts that n rows of random choices meet. */
    double met = s->experts * (1 - pow(1 - (double)s->top_k / s->experts, n));
    double out = full * matrix(h, s->q_dim, 4) + gdn * matrix(h, s->gdn_v_dim, 4);
    double project = full * matrix(2.0 * s->q_dim + 2.0 * s->kv_dim, h, 4) +
                     gdn * matrix(s->conv_dim + s->gdn_v_dim + 2.0 * s->gdn_v_heads, h, 4) +
                     matrix(s->vocab, h, 4);
    double head = (double)s->gdn_head_dim * s->gdn_head_dim * sizeof(float);
    static const char *const products[][2] = {{"tiles_project_8", "tiles_out_8"},
                                              {"tiles_project_16", "tiles_out_16"},
                                              {"tiles_project_32", "tiles_out_32"}};
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
        must_move(products[i][0], project);
        must_move(products[i][1], out);
    }
    must_move("batch_mix", 2 * gdn * n * s->gdn_v_heads * head);
    must_move("tiles_router", layers * matrix(s->experts + 1.0, h, 8));
    double inner = s->expert_width * met + s->shared_width;
    must_move("tiles_up", layers * 2 * matrix(inner, h, 4));
    must_move("tiles_down", layers * matrix(h, inner, 4));
}

void profile_print(const char *what) {
    double sum = 0;
    for (int i = 0; i < n_kernels; i++) sum += kernels[i].ms;
    printf("profile: %s: %.3f ms in kernels\n", what, sum);
    for (int shown = 0; shown < n_kernels; shown++) {
        int best = -1;
        for (int i = 0; i < n_kernels; i++) {
            if (kernels[i].calls && (best < 0 || kernels[i].ms > kernels[best].ms)) best = i;
        }
        if (best < 0 || kernels[best].ms < 0.01 * sum) break;
        printf("  %-20s %4d x %9.2f us = %8.3f ms  %4.1f %%\n", kernels[best].name,
               kernels[best].calls, kernels[best].ms * 1e3 / kernels[best].calls, kernels[best].ms,
               100 * kernels[best].ms / sum);
        if (kernels[best].bytes > 0) {
            double rate = kernels[best].bytes / kernels[best].ms * 1e-6;
            printf("  %-20s %9.1f MB  %9.0f GB/s  %4.1f %% of what a plain read gets\n", "",
                   kernels[best].bytes * 1e-6, rate, 100 * rate / PLAIN_READ);
        }
        kernels[best].calls = 0;
    }
}

void profile_end(void) {
    *driver = plain;
}

/* A profiler that was told to wait for it looks at what runs between these two. */
void profiler_window(bool open) {
    void *symbol = driver_function(open ? "cuProfilerStart" : "cuProfilerStop");
    CUresult (*call)(void);
    memcpy(&call, &symbol, sizeof call);
    if (symbol) call();
}
