/* The packed file: one mapping that the kernels can use as it lies (docs/packed-format.md).
 *
 *     0    8   magic "LILYPACK"
 *     8    4   layout version, little endian as all numbers
 *     12   4   bytes of the directory
 *     16   8   bytes of the file
 *     24   32  SHA-256 of bytes 0..23 and of the directory
 *     56   8   zero
 *     64   ..  directory: a JSON object (shape, layers, texts, sections, tensors)
 *     then sections, each at a multiple of 4096 with a SHA-256 of its own.
 *
 * Where everything lies follows from shape, layers and bits alone: the plan. A file's directory
 * spells it out for other readers, and a reader here accepts it only when it equals its own plan,
 * so that no offset is ever believed. */
#ifndef LILY_CKPT_PACKED_H
#define LILY_CKPT_PACKED_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ckpt/faults.h"
#include "ckpt/hash.h"
#include "ckpt/table.h"
#include "ckpt/texts.h"

struct ckpt;

enum {
    PACKED_LAYOUT = 1,   /* rises with every change of the layout */
    PACKED_ALIGN = 4096, /* of sections and experts: pages, direct I/O */
    PACKED_PART = 64,    /* of codes, scales, biases and vectors: cache lines, vector loads */
    PACKED_FIXED = 64,   /* bytes before the directory */
    PACKED_RUN = 32      /* experts in one section */
};

/* One row of the tensor table in one layer. Item i (an expert, or 0) has its codes (or float32
 * values) at offset + i * stride, scales and biases at the same distance from theirs. */
struct packed_tensor {
    const struct tensor_role *role;
    int32_t layer; /* -1 outside layers */
    int32_t bits;  /* 4 or 8; 32: float32 values */
    uint64_t offset, scales, biases;
    uint64_t stride; /* 0 for a single item */
};

struct packed_section {
    char name[40];
    uint64_t offset, bytes; /* bytes: without the padding up to the next section */
    int first, count;       /* its tensors */
    bool experts;           /* of which it holds the experts, or all others */
    int32_t item, items;    /* its experts of each of them; 0, 1 for other sections */
    char sha256[HASH_HEX];
};

struct packed_plan {
    const struct shape *shape;
    int32_t layers;
    struct packed_tensor *tensors; /* [n_tensors] owned, in the order of tensor_walk */
    int n_tensors;
    struct packed_section *sections; /* [n_sections] owned; texts first */
    int n_sections;
    struct {
        uint64_t offset, bytes;
        bool present;
    } text[TEXT_COUNT];
    uint64_t file_bytes;
    uint64_t weight_bytes; /* of all tensors, without padding */
};

/* Lists tensors, with bits(arg, role, layer) for each matrix; the caller ends *out with
 * packed_plan_free. Offsets come with packed_plan_place. */
int packed_plan_make(const struct shape *s, int32_t layers,
                     int32_t (*bits)(const void *arg, const struct tensor_role *r, int32_t layer),
                     const void *arg, struct packed_plan *out, lily_err *err);
void packed_plan_free(struct packed_plan *p);

/* Computes every offset after a header of that many bytes (a multiple of PACKED_ALIGN); text sizes
 * and presence are set by the caller. */
void packed_plan_place(struct packed_plan *p, uint64_t header_bytes);

/* Bytes of codes and of scales (equal to biases) of one item. */
uint64_t packed_code_bytes(const struct packed_plan *p, const struct packed_tensor *t);
uint64_t packed_scale_bytes(const struct packed_plan *p, const struct packed_tensor *t);

/* The directory of a placed plan; the caller's to json_decref, NULL: out of memory. */
json_t *packed_directory(const struct packed_plan *p, int32_t vocab_used, const char *source);

bool packed_recognise(const uint8_t *data, size_t size);

/* Header and directory of a file that was opened. */
size_t packed_header_bytes(const uint8_t *data);

/* Maps c->path and fills c's weights, texts and stats. Checks header and directory completely, the
 * data not at all (packed_verify does). */
int packed_open(struct ckpt *c, struct faults *f);

/* The same for bytes that are already in memory, without taking ownership (fuzzing). */
int packed_open_bytes(struct ckpt *c, const uint8_t *data, size_t size, struct faults *f);

/* Reads all of an opened file and compares every section's SHA-256, on all cores. */
int packed_verify(const struct ckpt *c, struct faults *f);

#endif
