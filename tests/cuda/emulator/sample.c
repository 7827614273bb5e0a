/* The device's sampling kernels against ref/sample.c, on this processor: the same token from the
 * same logits, also where many ids may not be sampled, or fewer than top_k. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels/device.h"
#include "backend/ref/ref.h"
#include "base/random.h"

enum { VOCAB = 4096, USED = 4000, POOL = 64 * 64, ROWS = 12 };

int cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name);
int cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra);

static float logits[VOCAB], scratch[VOCAB];
static int32_t counts[VOCAB];
static uint32_t some[VOCAB / 32];
static struct cuda_slot slot;
static struct cuda_result result;
static int32_t token, good;
static uint64_t pool[POOL];

static uint64_t address(const void *p) {
    return (uint64_t)(uintptr_t)p;
}

static void launch(const char *name, unsigned gx, void **arguments) {
    CUfunction f;
    if (cuModuleGetFunction(&f, (CUmodule) "mini/portable_sample", name) ||
        cuLaunchKernel(f, gx, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL)) {
        fprintf(stderr, "sampling: found no kernel %s\n", name);
        exit(1);
    }
}

/* Logits of a row: smooth, or from a few values so that most are equal to others. */
static void fill(uint64_t row) {
    for (uint64_t v = 0; v < VOCAB; v++) {
        uint64_t z = random_at(row, v);
        logits[v] = row % 3 == 0 ? (float)(z % 5) : (float)(z >> 40) * 0x1p-21f - 4;
        if (v >= USED) logits[v] = 1000; /* padding */
        counts[v] = z % 7 == 0 ? (int32_t)(z % 4) : 0;
    }
}

static int32_t on_device(const struct backend_sampling *p, uint64_t pick, const uint32_t *sampled) {
    int32_t used = USED;
    uint64_t row = address(logits), slots = address(&slot), mask = address(sampled);
    uint64_t to = address(pool), flags = address(&good), results = address(&result);
    slot = (struct cuda_slot){.token = address(&token),
                              .counts = address(counts),
                              .sample = 1,
                              .temperature = p->temperature,
                              .top_p = p->top_p,
                              .min_p = p->min_p,
                              .repetition = p->repetition,
                              .frequency = p->frequency,
                              .presence = p->presence,
                              .top_k = p->top_k,
                              .stream = p->stream,
                              .pick = pick};
    good = 1;
    launch("candidates", 64, (void *[]){&row, &slots, &used, &mask, &to, &flags});
    launch("pick", 1, (void *[]){&to, &slots, &flags, &results});
    return result.token;
}

/* Picks that differ. keep: of so many ids one may be sampled, 1: all; fewest: so many of them. */
static int differing(const struct backend_sampling *p, int32_t keep, int32_t most) {
    int different = 0, kept = 0;
    memset(some, 0, sizeof some);
    for (int32_t v = 0; v < USED; v++) {
        if (v % keep != keep / 2 || kept == most) continue;
        some[v / 32] |= 1u << v % 32;
        kept++;
    }
    for (uint64_t row = 0; row < ROWS; row++) {
        fill(row);
        int32_t got = on_device(p, row, keep == 1 ? NULL : some);
        different += got != ref_sample(p, row, logits, counts, some, VOCAB, scratch);
    }
    return different;
}

int main(void) {
    static const struct backend_sampling kinds[] = {
        {.temperature = 0, .top_p = 1, .repetition = 1},
        {.temperature = 0, .top_p = 1, .repetition = 1.3f, .frequency = 0.2f, .presence = 1.5f},
        {.temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 7},
        {.temperature = 1.5f, .top_p = 1, .min_p = 0.05f, .repetition = 1.1f, .top_k = 64},
        {.temperature = 2, .top_p = 0.5f, .repetition = 1, .top_k = 64, .stream = 5}};
    static const struct {
        int32_t keep, most;
    } masks[] = {{1, VOCAB}, {3, VOCAB}, {700, VOCAB}, {90, 10}, {50, 1}};
    int failed = 0;
    for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            int n = differing(&kinds[k], masks[m].keep, masks[m].most);
            if (n) {
                printf("sampling %zu of one id in %d: %d of %d picks unlike ref's\n", k,
                       masks[m].keep, n, ROWS);
            }
            failed += n > 0;
        }
    }
    printf("sampling kernels against ref: %d of %zu checks failed\n", failed,
           sizeof masks / sizeof *masks * (sizeof kinds / sizeof *kinds));
    return failed != 0;
}
