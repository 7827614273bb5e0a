/* Are stored values finite? Exponent bits all ones mark infinity and NaN. */
#ifndef LILY_CKPT_FINITE_H
#define LILY_CKPT_FINITE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline bool float_is_finite(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

/* Index of the first of n bfloat16 values at data (any alignment) that is not finite, or SIZE_MAX.
 * Reads as fast as memory delivers: a block at a time, without a branch per value. */
size_t bf16_find_not_finite(const uint8_t *data, size_t n);

#endif
