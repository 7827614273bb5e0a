/* What ckpt_load, ckpt_pack and ckpt_inspect share: an opened checkpoint and its steps. */
#ifndef LILY_CKPT_LOAD_H
#define LILY_CKPT_LOAD_H

#include "ckpt/bind.h"
#include "ckpt/catalog.h"
#include "ckpt/ckpt.h"
#include "ckpt/config.h"
#include "ckpt/folder.h"
#include "ckpt/hash.h"
#include "ckpt/pool.h"
#include "ckpt/texts.h"

enum ckpt_form {
    FORM_FOLDER, /* MLX or Hugging Face, embedded or not */
    FORM_PACKED,
    FORM_SAFETENSORS, /* one file by itself: can be inspected, not run */
    FORM_UNKNOWN
};

struct ckpt {
    enum ckpt_form form;
    char *path;       /* as given, or where the stand-in lies */
    const char *kind; /* static */
    struct folder folder;
    struct catalog catalog;
    struct config config;
    struct texts texts;
    struct file_map packed; /* a packed file's whole mapping */
    struct pool pool;       /* small tensors, expert tables, quantised weights */
    struct weights weights;
    struct bind_stats stats;
    char identity[HASH_HEX];
};

enum load_matrices {
    LOAD_QUANTISED, /* 16-bit matrices are quantised into memory */
    LOAD_BF16,      /* they stay as they are, for the reference backend */
    LOAD_TO_PACK    /* they stay as they are, but everything else is as if quantised */
};

/* By what lies at path; fills err when nothing is there. NULL: the stand-in, a folder. */
int load_form(const char *path, enum ckpt_form *out, lily_err *err);

/* Opens folder or packed file into a zeroed *c; on failure (and later) load_close releases it. With
 * f->list set, as much as can be opened is. */
int load_open(struct ckpt *c, const char *path, enum load_matrices matrices, struct work *work,
              struct faults *f);
void load_close(struct ckpt *c);

/* The fault that names the tensor and index of a weight which cannot be quantised. */
int load_name_bad_weight(const struct ckpt *c, const uint8_t *bad, struct faults *f);

#endif
