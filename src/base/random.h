/* The random stream behind sampling. Host and device sampler read the same numbers. */
#ifndef LILY_BASE_RANDOM_H
#define LILY_BASE_RANDOM_H

#include <stdint.h>

/* The output function of SplitMix64 (Steele, Lea, Flood 2014; Vigna's constants): a bijection on 64
 * bits. */
static inline uint64_t random_mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The n-th number of a stream, from 0. Mixing a counter times an odd constant is a full-period
 * generator, so that a number is known without the ones before it. */
static inline uint64_t random_at(uint64_t stream, uint64_t n) {
    return random_mix(stream + (n + 1) * 0x9e3779b97f4a7c15u);
}

#endif
