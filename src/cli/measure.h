/* The arithmetic of measurements. */
#ifndef LILY_CLI_MEASURE_H
#define LILY_CLI_MEASURE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* The middle of v[n] (the mean of the two middle ones); sorts v. n >= 1. */
double median(double *v, size_t n);
/* (largest - smallest) / median; sorts v. */
double spread(double *v, size_t n);

/* FNV-1a, 64 bits: names a run's tokens or logits so that two runs can be compared at a glance. */
#define DIGEST_START UINT64_C(0xcbf29ce484222325)
uint64_t digest_add(uint64_t digest, const void *bytes, size_t n);

/* Token i of a measured prompt: ((i * 2654435761) mod 2^32) mod vocab, the same for every engine
 * that is compared. */
int32_t measured_token(uint32_t i, int32_t vocab);

/* Bytes per second that `threads` threads (0: one per online processor) read from a buffer far
 * larger than the caches; the best of several passes. */
int read_bandwidth(int threads, double *bytes_per_second, lily_err *err);

/* Natural logarithm of the softmax probability of target among logits[n], in double. */
double log_probability(const float *logits, int32_t n, int32_t target);
/* Index of the largest of v[n]; ties: the lowest index. */
int32_t argmax(const float *v, int32_t n);

#endif
