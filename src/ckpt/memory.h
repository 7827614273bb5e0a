/* What a model needs in memory, against what the machine has. */
#ifndef LILY_CKPT_MEMORY_H
#define LILY_CKPT_MEMORY_H

#include <stdint.h>

#include "model/shape.h"

/* Bytes of the weights once quantised as this program does, whatever their file holds. */
uint64_t memory_quantised_bytes(const struct shape *s, int32_t layers);

/* Bytes of one session: keys and values in bfloat16, recurrent and convolution state in float32. */
uint64_t memory_session_bytes(const struct shape *s, int32_t layers, int32_t context);

/* Bytes of the machine's memory, 0 when unknown. */
uint64_t memory_present(void);

#endif
