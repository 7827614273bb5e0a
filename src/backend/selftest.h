/* What the backends' self-tests (`lily doctor`) share: the text they run, what the reference says
 * of every stage of it, and how far a row may be from that. */
#ifndef LILY_BACKEND_SELFTEST_H
#define LILY_BACKEND_SELFTEST_H

#include "backend/backend.h"

enum {
    SELFTEST_LAYERS = 4,  /* both kinds, and a last one */
    SELFTEST_DECODED = 4, /* rows that decode brings; distinct tokens */
    SELFTEST_ROWS = 48    /* rows of the prompt; most are one token, so that some experts get a full
                             tile of rows and others a few */
};

/* What the reference's trace reported: float [n] for each layer (-1 is 0), stage and position. */
struct selftest_rows {
    float **row; /* [(layers + 1) * STAGE_COUNT * SELFTEST_ROWS], each owned; NULL: not reported */
    int32_t layers;
    bool whole; /* memory sufficed */
};

/* One test: made by selftest_begin, which runs the reference, and freed by selftest_end. */
struct selftest_text {
    const struct selftest_args *args;
    struct weights w; /* the first layers of args->w */
    const struct shape *s;
    int32_t ids[SELFTEST_ROWS];
    int32_t picked[SELFTEST_DECODED]; /* by the reference, after each of the first ids */
    struct selftest_rows right;
    float *logits;        /* [V] for whoever needs room for a row; owned */
    uint64_t done, total; /* steps, for progress */
};

/* The sampling of decoded rows: every part of the pipeline takes part. */
extern const struct backend_sampling selftest_sampling;

/* runs: steps of progress that the backend's own part will take. Call selftest_end also after an
 * error. */
int selftest_begin(struct selftest_text *t, const struct selftest_args *args, int32_t runs,
                   lily_err *err);
void selftest_end(struct selftest_text *t);
/* A step is done; LILY_ECANCELED when the caller asks to stop. */
int selftest_advance(struct selftest_text *t, lily_err *err);

/* Decodes the first ids, each sampled; the picks are compared and not fed. logits: [V], of the
 * last, or all != 0: of each, [SELFTEST_DECODED][V]. */
int selftest_decode(const struct backend *b, struct backend_model *m, struct backend_session *s,
                    struct selftest_text *t, int32_t *picked, float *logits, bool all,
                    lily_err *err);
/* ids [from, SELFTEST_ROWS) by prefill, at most `slice` to a call; logits of the last or NULL. */
int selftest_prefill(const struct backend *b, struct backend_session *s, struct selftest_text *t,
                     int32_t from, int32_t slice, float *logits, lily_err *err);

/* The reference's row, NULL where it reported none; of the residual stream before a layer. */
const float *selftest_right(const struct selftest_text *t, enum stage stage, int32_t layer,
                            int32_t pos);
const float *selftest_before(const struct selftest_text *t, int32_t layer, int32_t pos);

/* max |a - b| over the root mean square of b; infinite when that is no number. */
double selftest_error(const float *a, const float *b, int32_t n);
/* Of a stage whose input was the reference's. */
double selftest_limit(const struct selftest_text *t, bool prefill, enum stage stage, int32_t layer);
/* Whether two rows of routing choose other experts. */
bool selftest_other_experts(const float *a, const float *b, int32_t k);

#endif
