/* Checkpoints: from a path to validated, bound weights and the text files beside them.
 *
 *   folder.h       a checkpoint's files by name: a directory, a packed file, or the embedded
 * stand-in safetensors.h  one .safetensors file: header, ranges, dtypes, completely checked
 *   config.h       config.json: which shape, how many layers, which quantisation per module
 *   quantise.h     bf16 -> affine 4/8 bit exactly as MLX does
 *   packed.h       our own file: one mapping, aligned, checksummed
 *   bind.h         tensors by name -> struct weights, every name, dtype, shape and range checked
 *
 * The layer knows names, bytes and shapes, and no mathematics of the model. */
#ifndef LILY_CKPT_CKPT_H
#define LILY_CKPT_CKPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "model/weights.h"

struct ckpt; /* owns the mapping(s), the float32 copies of small tensors and struct weights */

/* What this layer cannot judge, asked of the layer above before a checkpoint is called whole:
 * whether its text files make a tokenizer and defaults. c's weights have a shape. 0, or a negative
 * code with err filled. */
typedef int (*ckpt_check_fn)(const struct ckpt *c, lily_err *err);

struct ckpt_options {
    /* An unquantised folder is quantised into memory at load (as `lily pack` would do to a file)
     * unless keep_bf16 is set: then its matrices stay 16-bit, for the reference backend. */
    bool keep_bf16;
    /* Called now and then with bytes done and to do; nonzero return cancels (LILY_ECANCELED). */
    int (*progress)(void *arg, uint64_t done, uint64_t total);
    void *progress_arg;
    /* One line that a user should read (other template, skipped tensors); may be NULL. */
    void (*warn)(void *arg, const char *line);
    void *warn_arg;
    ckpt_check_fn check; /* of ckpt_pack, before anything is written; may be NULL */
};

/* path: an MLX 4-bit folder, a bf16 Hugging Face folder, a packed file, or NULL for the embedded
 * stand-in. On success the caller owns *out. */
int ckpt_load(const char *path, const struct ckpt_options *options, struct ckpt **out,
              lily_err *err);
void ckpt_free(struct ckpt *c);

const struct weights *ckpt_weights(const struct ckpt *c);

/* "MLX 4-bit folder", "packed file", "embedded", ... and where it lies (static or c's lifetime). */
const char *ckpt_kind(const struct ckpt *c);
const char *ckpt_path(const struct ckpt *c);

/* A text file of the checkpoint ("tokenizer.json", "generation_config.json", "config.json",
 * "tokenizer_config.json", "chat_template.jinja"): its bytes, owned by c, or NULL when absent. */
const char *ckpt_text(const struct ckpt *c, const char *name, size_t *size);

/* 64 hex digits that name this checkpoint's contents (for stored sessions); c's lifetime. */
const char *ckpt_identity(const struct ckpt *c);

/* Writes the packed file, atomically; nothing is left behind on failure or interruption. */
int ckpt_pack(const char *in, const char *out, const struct ckpt_options *options, lily_err *err);

/* What a folder or file is, whether it fits, tensor classes and bytes, every fault found: a JSON
 * document, malloc'd for the caller. check (may be NULL) is asked where no other fault was found.
 * Fails only when nothing at all can be said. */
int ckpt_inspect(const char *path, ckpt_check_fn check, char **json, lily_err *err);

struct ckpt_synth_options {
    const char *shape; /* "qwen3.6-35b-a3b" or "mini" */
    int32_t layers;    /* a multiple of 4; 0: all of the shape's */
    uint64_t seed;
    bool packed; /* a packed file instead of an MLX folder */
    int (*progress)(void *arg, uint64_t done, uint64_t total);
    void *progress_arg;
};
/* A random checkpoint with sane statistics, as fast as the disk takes it. */
int ckpt_synth(const char *out, const struct ckpt_synth_options *options, lily_err *err);

#endif
