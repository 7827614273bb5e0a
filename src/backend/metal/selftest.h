/* The self-test (`lily doctor`): every kernel at the shape of some weights, on the device at hand.
 *
 * The reference backend computes all stages of a few dozen rows. Then decode and prefill run here
 * in the pieces of trace.c, each from an empty session, and each stage is compared. After each half
 * of a layer the residual stream is replaced by the reference's, so that a difference belongs to
 * the kernels of the piece that shows it (the recorded graph tells which) and not to what came
 * before; pieces between a failed one and the next replacement are not judged. Attention at depth,
 * which has kernels of its own, is held against the formula itself over a cache of random rows.
 * Last, whole command buffers, two of them in flight, must repeat the bits of the pieces: a barrier
 * that is missing, or a token handed over too early, shows there.
 *
 * This header is what the files selftest*.c share. */
#ifndef LILY_METAL_SELFTEST_H
#define LILY_METAL_SELFTEST_H

#include "backend/metal/metal.h"
#include "backend/selftest.h"

/* What is known of one kernel. */
struct selftest_verdict {
    int32_t rows, flips; /* compared; with other experts than the reference's at a near-tie */
    double error, limit; /* the worst, relative to its limit */
    enum stage stage;    /* of the worst; with layer and position */
    int32_t layer, position;
    bool failed;
};

enum selftest_mode { SELFTEST_IGNORE, SELFTEST_COMPARE, SELFTEST_DEEP };

struct selftest {
    struct selftest_text text;
    struct backend_model *m;
    struct backend_session *session;
    enum selftest_mode mode;
    bool prefill;                /* what runs now */
    int32_t failed_mark;         /* the newest piece that failed, -1: none */
    bool flipped[SELFTEST_ROWS]; /* rows whose experts differ in this half of the layer */
    struct selftest_verdict verdict[METAL_KERNELS];
};

int metal_selftest(const struct selftest_args *args, lily_err *err);

/* selftest_compare.c */
/* One row of one piece: judged, then replaced where the residual stream is. */
void selftest_compare(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                      const float *row, int32_t n);
/* Puts an error on a kernel's account. */
void selftest_credit(struct selftest *t, int32_t kernel, enum stage stage, int32_t layer,
                     int32_t pos, double error, double limit);

/* selftest_attention.c: one decoded token, then a few of a prompt, behind random keys and values.
 */
int selftest_attention(struct selftest *t, lily_err *err);
void selftest_attention_row(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                            const float *row, int32_t n);

#endif
