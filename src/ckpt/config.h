/* config.json: which of the built-in shapes a checkpoint has, how many layers, and how each module
 * is quantised. Every field that the mathematics depends on is compared; another model gets a
 * message that says what was found, what this program runs and what to do. */
#ifndef LILY_CKPT_CONFIG_H
#define LILY_CKPT_CONFIG_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "ckpt/faults.h"
#include "model/shape.h"

struct config {
    const struct shape *shape; /* NULL (inspection only): a model this program does not run */
    int32_t layers;            /* a multiple of 4, at most shape->layers */
    bool quantised;            /* the matrices are MLX affine groups */
    int32_t bits;              /* of modules without an override; 16: not quantised; 0: unusably */
    json_t *root;              /* owned */
    const json_t *overrides;   /* the quantization object, or NULL; inside root */
};

/* what names the file in messages. On success the caller ends *out with config_close. */
int config_parse(const char *what, const char *text, size_t n, struct config *out,
                 struct faults *f);
void config_close(struct config *c);

/* Bits of a module ("language_model.model.layers.0.mlp.gate"): its override's or the default's; 16
 * for a module the config leaves unquantised. Another group size or mode is a fault; then *bits
 * is 0. */
int config_module_bits(const struct config *c, const char *module, int32_t *bits, struct faults *f);

#endif
