/* A name for a checkpoint's contents, cheap enough for every load. */
#ifndef LILY_CKPT_IDENTITY_H
#define LILY_CKPT_IDENTITY_H

#include "ckpt/hash.h"

struct ckpt;

/* SHA-256 as 64 hex digits over
 *   a folder:       config.json; then of every shard its name, size, header (names, dtypes, shapes,
 *                   ranges) and 64 samples of 4 KiB spread evenly over its data, ends included;
 *   a packed file:  its header, which holds the SHA-256 of every section and so covers all data;
 * and, for both, whether the matrices are used as 16 bits or quantised, since results differ.
 * A change inside a shard that misses every sample and leaves its header alone is not seen. */
void identity_of(const struct ckpt *c, char out[HASH_HEX]);

#endif
