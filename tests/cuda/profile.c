/* Where a step's time goes: the driver's launch is wrapped so that every kernel runs alone between
 * two events, and its time is added to its name. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/driver.h"
#include "check.h"

enum { MOST = 64 };
static struct {
    CUfunction function;
    char name[64];
    double ms;
    int calls;
} kernels[MOST];
static int n_kernels;
static struct cuda_driver *driver; /* the backend's own table, changed while a profile runs */
static struct cuda_driver plain;
static CUevent begin, end;

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
    plain.event_ms(&ms, begin, end);
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

void profile_begin(void) {
    driver = (struct cuda_driver *)(uintptr_t)cuda_driver_open(NULL);
    plain = *driver;
    driver->module_function = named_function;
    driver->launch = timed_launch;
    n_kernels = 0;
}

void profile_start(void) {
    if (!begin) {
        plain.event_new(&begin, 0);
        plain.event_new(&end, 0);
    }
    for (int i = 0; i < n_kernels; i++) kernels[i].ms = kernels[i].calls = 0;
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
        kernels[best].calls = 0;
    }
}

void profile_end(void) {
    *driver = plain;
}
