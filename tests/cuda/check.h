/* Checks of the CUDA backend that go on after a failure and end with a table. */
#ifndef TESTS_CUDA_CHECK_H
#define TESTS_CUDA_CHECK_H

#include <stdbool.h>
#include <stdio.h>

#include "backend/backend.h"
#include "ckpt/ckpt.h"

/* What the checks run on: the CUDA backend, and the one it is held against. */
struct bench_model {
    const struct ckpt *ckpt;
    const struct weights *w;
    const struct backend *cuda, *truth;
    const char *truth_name;
    int32_t context;
    int32_t vocab;
    bool trained;  /* its text means something */
    bool emulated; /* a processor stands in for the card: small sizes */
    bool pieces;   /* the recurrent state of prompts advances in pieces of the grid (prompt.c) */
};

/* Notes a result: value must be at most limit (NaN never is). unit and what are for people. */
void note(const char *what, double value, double limit);
void record(const char *what, double value, const char *unit); /* a measurement */
/* A measurement that should be at least goal (0: none) on the device that goals are for. */
void reach(const char *what, double value, const char *unit, double goal);
void note_error(const char *what, int rc, const lily_err *err);
int report(const char *json_path,
           const char *device); /* prints the table; the number of failures */

#ifdef CUDA_EMULATED
/* tests/cuda/emulator: weights of the emulated kernels' shape; NULL: those of the stand-in. */
const struct weights *emulated_weights(void);
#endif

/* Token i of every test's text: the method of spec-conforming measurements, any vocabulary. */
static inline int32_t token_at(int64_t i, int32_t vocab) {
    return (int32_t)(((uint64_t)i * 2654435761u & 0xffffffffu) % (uint64_t)vocab);
}

/* Two tokens of which the truth prefers one to the other are nearly tied when taking the wrong one
 * loses no more than the mean divergence that a backend is allowed (tie_cost in side.h). */
static const double NEAR_TIE = 1e-3;

void check_stages(const struct bench_model *b, int32_t n, bool decode);
void check_selftest(const struct bench_model *b); /* what lily doctor runs */
void check_logits(const struct bench_model *b, const int32_t *lengths, int32_t n_lengths);
void check_cuts(const struct bench_model *b, int32_t n);
void check_states(const struct bench_model *b, int32_t n);
void check_batch(const struct bench_model *b, int32_t slots, int32_t steps);
void check_compositions(const struct bench_model *b, int32_t slots);
void check_kinds(const struct bench_model *b);
/* against_ref: ref is fast enough for it. */
void check_sampling(const struct bench_model *b, int32_t steps, bool against_ref);
void check_greedy(const struct bench_model *b, int32_t prompts, int32_t steps);
void check_long_run(const struct bench_model *b, int64_t tokens, int32_t slots);
void check_depth(const struct bench_model *b, int32_t depth);
void measure(const struct bench_model *b);
void measure_batches(const struct bench_model *b);
void measure_sweep(const struct bench_model *b);
void steps_for_profiler(const struct bench_model *b);
void hold_memory(double left);
void profile(const struct bench_model *b);

/* checks_ties.c: keeps what the truth's routers are given at positions [0, rows) (ties_keep is a
 * trace), and tells how rows near a tie of experts differ from the rest. Rows [n][vocab]. */
struct ties;
struct ties *ties_new(const struct bench_model *b, int32_t rows);
void ties_keep(void *arg, enum stage stage, int32_t layer, int32_t pos, const float *row,
               int32_t n);
void ties_tell(const struct ties *t, const float *truth, const float *own, int32_t n);
void ties_free(struct ties *t);
/* Whether ref agrees with the card's row behind ids [0, n) once the eighth and the ninth expert of
 * one layer are exchanged there, which must be nearly tied; tie: the layer that comes nearest. */
struct expert_tie {
    int32_t layer;  /* -1: none */
    double gap, kl; /* of the two scores, of their root mean square; left of the divergence */
};
bool tie_of_experts(const struct bench_model *b, const int32_t *ids, int32_t n, const float *own,
                    struct expert_tie *tie);

/* profile.c: begin before a model is opened, start before a step, print after it, end at last. */
void profile_begin(void);
void profile_start(void);
/* The step is a decode step of n rows: bytes of its kernels, experts chosen at random. */
void profile_batch(const struct shape *s, int32_t layers, int32_t n);
void profile_print(const char *what);
void profile_end(void);
void profiler_window(bool open);

/* The card counts as one of this capability (80: 8.0); before a model is opened. */
int pretend_capability(int tens, lily_err *err);

#endif
