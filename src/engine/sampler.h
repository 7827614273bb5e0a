/* Picks one token from a row of logits on the host, or tells a device how to:
 *   repetition penalty (prompt and output), frequency and presence penalties (output only),
 *   logit bias, division by the temperature, top_k, top_p, min_p, softmax, one draw.
 * vLLM's v1 sampler has the same order but for two: it adds the bias before the penalties and
 * applies min_p before top_k (docs/sampling.md).
 * All selection is exact with ties to the lower id. A pick costs a few passes over the vocabulary
 * and no sort; nothing is allocated after sampler_new. */
#ifndef LILY_ENGINE_SAMPLER_H
#define LILY_ENGINE_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "base/err.h"
#include "lily.h"

struct sampler_vocab {
    int32_t used;         /* ids below this may be sampled: the rows above are padding */
    const int32_t *holes; /* [n_holes] ids below used without a token, never sampled */
    int32_t n_holes;
};

struct sampler;
/* vocab's holes outlive the sampler. */
int sampler_new(const struct sampler_vocab *vocab, struct sampler **out, lily_err *err);
void sampler_free(struct sampler *s); /* NULL is fine */

/* Whether every field is in its range; the message names the field, what was found and expected. */
int sampler_check(const lily_sampling *sampling, int32_t vocab_used, lily_err *err);

/* Starts a sequence: checks sampling, draws the seed when it asks for a random one, and forgets the
 * earlier sequence. sampling's bias arrays must outlive the last pick; prompt is not kept. */
int sampler_begin(struct sampler *s, const lily_sampling *sampling, const int32_t *prompt,
                  size_t n_prompt, lily_err *err);
uint64_t sampler_seed(const struct sampler *s); /* of the running sequence */

/* The next token of the sequence from logits[used], all finite; counts it as output. The n-th pick
 * depends on seed, n, the logits and the tokens so far, on nothing else. */
int32_t sampler_pick(struct sampler *s, const float *logits);

/* Whether a device can go on with the running sequence by itself; *out and *pick, the number of the
 * next pick, say how. Its picks are those that sampler_pick would make, but for rounding. */
bool sampler_for_device(const struct sampler *s, struct backend_sampling *out, uint64_t *pick);

#endif
