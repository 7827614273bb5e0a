/* What the tests of the Metal host share: the embedded stand-in on an emulated device, and ref
 * beside it. */
#ifndef TESTS_METAL_HARNESS_H
#define TESTS_METAL_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "base/buf.h"
#include "ckpt/ckpt.h"
#include "runtime/emulator.h"

/* One model and one session of a backend. */
struct bench {
    const struct backend *b;
    struct backend_model *m;
    struct backend_session *s;
};

/* Of a test program's arguments, `full|quick [file]`: whether more is to be run, and where figures
 * go. */
bool harness_begin(int argc, char **argv);

/* One measured value, for bench/metal-emulated.json (figures.py): a line of JSON in that file. The
 * same name may come often; least and most are kept. */
void figure(const char *name, double value);

void ok(int rc, const lily_err *err); /* fails with the message */

/* Replaces what text holds exactly once. */
void put_fault(struct buf *text, const char *right, const char *wrong);

struct ckpt *stand_in(void); /* the embedded checkpoint, loaded once */

/* Configures the emulator; checked: every access is watched. */
void emulate(bool checked, uint64_t seed);

/* Opens with these weights and options (NULL: one session of 512 tokens). */
struct bench bench_open(const struct backend *b, const struct weights *w,
                        const struct backend_options *options);
void bench_close(struct bench *x);

/* Feeds ids by prefill; logits NULL or [V] of the last. */
void bench_prefill(struct bench *x, const int32_t *ids, int32_t n, float *logits);
/* Appends one token by decode; logits [V]. Returns the result. */
struct decode_result bench_step(struct bench *x, int32_t token,
                                const struct backend_sampling *sampling, uint64_t pick,
                                float *logits);

struct gap {
    double kl, worst;
    bool same_top;
    double margin; /* of ref's best over its second, when the tops differ */
};
struct gap logits_gap(const float *ref, const float *mine, int32_t vocab);
int32_t argmax(const float *x, int32_t n);

/* Fails when the emulator has found anything. */
void nothing_found(void);

#endif
