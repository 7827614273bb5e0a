#include "ckpt/bind.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/buf.h"
#include "ckpt/finite.h"
#include "ckpt/parallel.h"

enum { NAME_MAX_BYTES = 256 };

/* Values to be checked once everything is bound, all tensors in parallel. */
struct scan {
    const struct catalog_entry *entry;
    size_t bad; /* index of the first value that is not finite, SIZE_MAX: none */
};

struct binder {
    struct catalog *catalog;
    const struct config *config;
    const char *where;
    const char *prefix; /* of every tensor but lm_head */
    const char *head;   /* lm_head's own */
    const struct bind_options *options;
    struct pool *pool;
    struct weights *w;
    struct bind_stats *stats;
    struct faults *f;
    struct scan *scans; /* [n_scans] */
    size_t n_scans, cap_scans;
};

/* The prefixes in use: MLX, Hugging Face as published, text-only models. */
static const struct {
    const char *prefix, *head;
} namings[] = {
    {"language_model.model.", "language_model."},
    {"model.language_model.", ""},
    {"model.", ""},
};

static const char *module_name(const struct binder *b, const struct tensor_role *r, int32_t layer,
                               char *out) {
    char path[128];
    tensor_path(r, layer, path, sizeof path);
    bool head = r->class == CLASS_LM_HEAD;
    snprintf(out, NAME_MAX_BYTES, "%s%s", head ? b->head : b->prefix, path);
    return out;
}

static int find_naming(struct binder *b) {
    char name[NAME_MAX_BYTES];
    for (size_t i = 0; i < sizeof namings / sizeof *namings; i++) {
        snprintf(name, sizeof name, "%sembed_tokens.weight", namings[i].prefix);
        if (!catalog_find(b->catalog, name)) continue;
        b->prefix = namings[i].prefix;
        b->head = namings[i].head;
        return 0;
    }
    if (b->catalog->damaged) return 0;
    return fault(b->f, LILY_EMODEL,
                 "%s: found no embed_tokens.weight (first tensor: %.120s), expected names that "
                 "begin with %s, %s or %s; use an unmodified checkpoint",
                 b->where, b->catalog->n ? b->catalog->entries[0].tensor->name : "none",
                 namings[0].prefix, namings[1].prefix, namings[2].prefix);
}

/* Looks a tensor up and compares dtype and shape. *out is NULL when an inspection noted a fault. */
static int take(struct binder *b, const struct tensor_role *r, const char *name,
                enum st_dtype dtype, const size_t *dims, int rank,
                const struct catalog_entry **out) {
    char want[96], got[96];
    struct catalog_entry *e = catalog_find(b->catalog, name);
    *out = NULL;
    if (!e) {
        if (b->catalog->damaged && b->f->list) return 0;
        return fault(b->f, LILY_EFORMAT,
                     "%s: tensor %.160s: found none, expected %s %s; download the checkpoint again",
                     b->where, name, st_dtype_name(dtype),
                     st_shape_text(dims, rank, want, sizeof want));
    }
    const struct st_tensor *t = e->tensor;
    bool same = t->dtype == dtype && t->rank == rank;
    for (int i = 0; same && i < rank; i++) same = t->dims[i] == dims[i];
    e->used = true;
    if (!same) {
        return fault(b->f, LILY_EFORMAT,
                     "%s: tensor %.160s: found %s %s, expected %s %s; use the MLX 4-bit or the "
                     "bf16 checkpoint",
                     e->shard->path, name, st_dtype_name(t->dtype),
                     st_shape_text(t->dims, t->rank, got, sizeof got), st_dtype_name(dtype),
                     st_shape_text(dims, rank, want, sizeof want));
    }
    b->stats->class[r->class].tensors++;
    b->stats->class[r->class].bytes += t->bytes;
    b->w->bytes += t->bytes;
    *out = e;
    return 0;
}

static int add_scan(struct binder *b, const struct catalog_entry *e) {
    if (b->n_scans == b->cap_scans) {
        size_t cap = b->cap_scans ? b->cap_scans * 2 : 256;
        void *grown = realloc(b->scans, cap * sizeof *b->scans);
        if (!grown) return ERR_NOMEM(b->f->err, b->where);
        b->scans = grown;
        b->cap_scans = cap;
    }
    b->scans[b->n_scans++] = (struct scan){.entry = e, .bad = SIZE_MAX};
    return 0;
}

/* bfloat16 values as the kernels read them: in place, or copied where the file put them at an odd
 * address. */
static int aligned_bf16(struct binder *b, const struct st_tensor *t, const uint16_t **out) {
    if (((uintptr_t)t->data & 1) == 0) {
        *out = (const uint16_t *)(const void *)t->data;
        return 0;
    }
    uint16_t *copy = pool_alloc(b->pool, t->bytes);
    if (!copy) return ERR_NOMEM(b->f->err, t->name);
    memcpy(copy, t->data, t->bytes);
    *out = copy;
    return 0;
}

/* Bits of a module; 0 when an inspection noted that they are not supported. */
static int module_bits(struct binder *b, const struct tensor_role *r, const char *module,
                       int32_t *bits) {
    int rc = config_module_bits(b->config, module, bits, b->f);
    if (rc != 0 || *bits == 0 || *bits == 16 || *bits == 4 || *bits == r->bits) return rc;
    int32_t found = *bits;
    *bits = 0;
    return fault(b->f, LILY_EMODEL,
                 "%s: module %.160s: found %d-bit weights, expected 4 bits here; use the MLX 4-bit "
                 "checkpoint, or let this program quantise the bf16 one",
                 b->where, module, found);
}

/* A quantised matrix, or one for each of n experts (rank 3), as weight, scales and biases. */
static int take_quantised(struct binder *b, const struct tensor_role *r, const char *module,
                          int32_t bits, struct mat *m, size_t n) {
    size_t rows = (size_t)tensor_rows(r, b->w->shape), cols = (size_t)tensor_cols(r, b->w->shape);
    size_t group = (size_t)b->w->shape->group;
    int skip = r->kind == KIND_EXPERTS ? 0 : 1;
    size_t codes_dims[3] = {n, rows, cols * (size_t)bits / 32};
    size_t group_dims[3] = {n, rows, cols / group};
    const struct catalog_entry *codes = NULL, *scales = NULL, *biases = NULL;
    char name[NAME_MAX_BYTES + 16];
    snprintf(name, sizeof name, "%s.weight", module);
    int rc = take(b, r, name, ST_U32, codes_dims + skip, 3 - skip, &codes);
    snprintf(name, sizeof name, "%s.scales", module);
    if (rc == 0) rc = take(b, r, name, ST_BF16, group_dims + skip, 3 - skip, &scales);
    snprintf(name, sizeof name, "%s.biases", module);
    if (rc == 0) rc = take(b, r, name, ST_BF16, group_dims + skip, 3 - skip, &biases);
    if (rc != 0 || !codes || !scales || !biases) return rc;
    rc = add_scan(b, scales);
    if (rc == 0) rc = add_scan(b, biases);
    const uint16_t *s = NULL, *z = NULL;
    if (rc == 0) rc = aligned_bf16(b, scales->tensor, &s);
    if (rc == 0) rc = aligned_bf16(b, biases->tensor, &z);
    if (rc != 0) return rc;
    size_t step = rows * cols * (size_t)bits / 8, groups = rows * (cols / group);
    for (size_t i = 0; i < n; i++) {
        m[i] = (struct mat){.data = codes->tensor->data + i * step,
                            .scales = s + i * groups,
                            .biases = z + i * groups,
                            .rows = (int32_t)rows,
                            .cols = (int32_t)cols,
                            .bits = bits};
    }
    return 0;
}

static void set_bf16(struct mat *m, const uint8_t *data, size_t rows, size_t cols) {
    *m = (struct mat){.data = data, .rows = (int32_t)rows, .cols = (int32_t)cols, .bits = 16};
}

static int take_bf16(struct binder *b, const struct tensor_role *r, const char *name,
                     const size_t *dims, int rank, const struct catalog_entry **out) {
    int rc = take(b, r, name, ST_BF16, dims, rank, out);
    if (rc == 0 && *out && !b->options->skip_matrix_scan) rc = add_scan(b, *out);
    return rc;
}

static int bind_matrix(struct binder *b, const struct tensor_role *r, int32_t layer) {
    char module[NAME_MAX_BYTES], name[NAME_MAX_BYTES + 16];
    module_name(b, r, layer, module);
    int32_t bits;
    struct mat m = {0};
    int rc = module_bits(b, r, module, &bits);
    if (rc != 0 || bits == 0) return rc;
    if (bits != 16) {
        rc = take_quantised(b, r, module, bits, &m, 1);
    } else {
        size_t dims[2] = {(size_t)tensor_rows(r, b->w->shape), (size_t)tensor_cols(r, b->w->shape)};
        const struct catalog_entry *e;
        snprintf(name, sizeof name, "%s.weight", module);
        rc = take_bf16(b, r, name, dims, 2, &e);
        if (rc == 0 && e) set_bf16(&m, e->tensor->data, dims[0], dims[1]);
    }
    if (rc == 0) tensor_set_mats(r, b->w, layer, &m);
    return rc;
}

/* experts.E.gate_proj.weight and its like: one tensor per expert. */
static int take_each_expert(struct binder *b, const struct tensor_role *r, int32_t layer,
                            struct mat *m, size_t n) {
    size_t dims[2] = {(size_t)tensor_rows(r, b->w->shape), (size_t)tensor_cols(r, b->w->shape)};
    char name[NAME_MAX_BYTES];
    for (size_t i = 0; i < n; i++) {
        const struct catalog_entry *e;
        snprintf(name, sizeof name, "%slayers.%d.mlp.experts.%zu.%s.weight", b->prefix, layer, i,
                 r->hf_each);
        int rc = take_bf16(b, r, name, dims, 2, &e);
        if (rc != 0) return rc;
        if (e) set_bf16(&m[i], e->tensor->data, dims[0], dims[1]);
    }
    return 0;
}

/* One part (gate or up, or all of down) of a tensor that holds every expert. Its bytes are counted
 * once, with part 0. */
static int take_stacked_experts(struct binder *b, const struct tensor_role *r, const char *name,
                                size_t part, size_t parts, struct mat *m, size_t n) {
    size_t rows = (size_t)tensor_rows(r, b->w->shape), cols = (size_t)tensor_cols(r, b->w->shape);
    size_t dims[3] = {n, parts * rows, cols};
    const struct catalog_entry *e;
    if (part > 0) {
        struct catalog_entry *counted = catalog_find(b->catalog, name);
        if (!counted || counted->tensor->bytes != 2 * n * parts * rows * cols) return 0;
        e = counted; /* part 0 compared its dtype and shape */
    } else {
        int rc = take_bf16(b, r, name, dims, 3, &e);
        if (rc != 0 || !e) return rc;
    }
    for (size_t i = 0; i < n; i++) {
        set_bf16(&m[i], e->tensor->data + 2 * cols * rows * (i * parts + part), rows, cols);
    }
    return 0;
}

static int bind_experts(struct binder *b, const struct tensor_role *r, int32_t layer) {
    size_t n = (size_t)b->w->shape->experts;
    struct mat *m = pool_alloc(b->pool, n * sizeof *m);
    if (!m) return ERR_NOMEM(b->f->err, b->where);
    memset(m, 0, n * sizeof *m);
    tensor_set_mats(r, b->w, layer, m);

    char module[NAME_MAX_BYTES], name[NAME_MAX_BYTES + 16];
    module_name(b, r, layer, module);
    int32_t bits;
    int rc = module_bits(b, r, module, &bits);
    if (rc != 0 || bits == 0) return rc;
    if (bits != 16) return take_quantised(b, r, module, bits, m, n);

    snprintf(name, sizeof name, "%s.weight", module);
    if (catalog_find(b->catalog, name)) return take_stacked_experts(b, r, name, 0, 1, m, n);
    snprintf(name, sizeof name, "%slayers.%d.mlp.experts.0.%s.weight", b->prefix, layer,
             r->hf_each);
    if (catalog_find(b->catalog, name)) return take_each_expert(b, r, layer, m, n);
    snprintf(name, sizeof name, "%slayers.%d.%s", b->prefix, layer, r->hf_fused);
    return take_stacked_experts(b, r, name, (size_t)r->part, (size_t)r->parts, m, n);
}

static float small_value(const struct st_tensor *t, size_t i) {
    if (t->dtype == ST_F32) {
        float v;
        memcpy(&v, t->data + 4 * i, sizeof v);
        return v;
    }
    return bf16_to_f32((uint16_t)(t->data[2 * i] | t->data[2 * i + 1] << 8));
}

/* Norms, convolution, decay: to float32, the 1 of zero-centred norms added. */
static int bind_small(struct binder *b, const struct tensor_role *r, int32_t layer) {
    char name[NAME_MAX_BYTES + 16], module[NAME_MAX_BYTES];
    snprintf(name, sizeof name, "%s%s", module_name(b, r, layer, module), r->suffix);
    size_t rows = (size_t)tensor_rows(r, b->w->shape), cols = (size_t)tensor_cols(r, b->w->shape);
    bool converted = b->stats->converted;
    size_t dims[3] = {rows, converted ? cols : 1, converted ? 1 : cols};
    const struct catalog_entry *e = catalog_find(b->catalog, name);
    /* A_log and its like are float32 in some files of this family. */
    enum st_dtype dtype = e && e->tensor->dtype == ST_F32 ? ST_F32 : ST_BF16;
    int rc = take(b, r, name, dtype, dims, r->kind == KIND_CONV ? 3 : 1, &e);
    if (rc != 0 || !e) return rc;
    float *values = pool_alloc(b->pool, rows * cols * sizeof *values);
    if (!values) return ERR_NOMEM(b->f->err, name);
    bool add_one = r->zero_centred && !converted;
    for (size_t i = 0; i < rows * cols; i++) {
        float v = small_value(e->tensor, i);
        if (!float_is_finite(v)) {
            return fault(b->f, LILY_EFORMAT,
                         "%s: tensor %.160s: found a value that is not finite at index %zu, "
                         "expected finite numbers; download the shard again",
                         e->shard->path, name, i);
        }
        if (add_one) v = 1.0f + v;
        if (add_one && b->options->round_norms) v = bf16_to_f32(f32_to_bf16(v));
        values[i] = v;
    }
    tensor_set_floats(r, b->w, layer, values);
    return 0;
}

/* The layout mark: the last dimension of the first convolution. */
static void find_layout(struct binder *b) {
    char name[NAME_MAX_BYTES];
    snprintf(name, sizeof name, "%slayers.0.linear_attn.conv1d.weight", b->prefix);
    const struct catalog_entry *e = catalog_find(b->catalog, name);
    b->stats->converted = e && e->tensor->rank == 3 && e->tensor->dims[2] == 1;
}

static int scan_item(void *arg, size_t i, lily_err *err) {
    (void)err;
    struct binder *b = arg;
    const struct st_tensor *t = b->scans[i].entry->tensor;
    b->scans[i].bad = bf16_find_not_finite(t->data, t->bytes / 2);
    work_add(b->options->work, t->bytes);
    return 0;
}

static int scan_tick(void *arg, lily_err *err) {
    const struct binder *b = arg;
    return work_report(b->options->work, err);
}

static int scan_values(struct binder *b) {
    if (b->options->work) {
        for (size_t i = 0; i < b->n_scans; i++) {
            b->options->work->total += b->scans[i].entry->tensor->bytes;
        }
    }
    int rc = parallel_for(b->n_scans, scan_item, scan_tick, b, b->f->err);
    for (size_t i = 0; rc == 0 && i < b->n_scans; i++) {
        const struct scan *s = &b->scans[i];
        if (s->bad == SIZE_MAX) continue;
        rc = fault(b->f, LILY_EFORMAT,
                   "%s: tensor %.160s: found a value that is not finite at index %zu, expected "
                   "finite numbers; download the shard again",
                   s->entry->shard->path, s->entry->tensor->name, s->bad);
    }
    return rc;
}

static bool has_prefix(const char *name, const char *const *prefixes) {
    for (size_t i = 0; prefixes[i]; i++) {
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) return true;
    }
    return false;
}

enum bind_skip bind_skipped(const char *name) {
    static const char *const vision[] = {"vision_tower.", "visual.", "model.visual.",
                                         "model.vision_tower.", NULL};
    static const char *const mtp[] = {"mtp.", "language_model.mtp.", "model.mtp.", NULL};
    if (has_prefix(name, vision)) return SKIP_VISION;
    return has_prefix(name, mtp) ? SKIP_MTP : SKIP_NONE;
}

/* What is left over: vision and multi-token-prediction tensors are skipped knowingly, anything else
 * is a part of the model that would be ignored. */
static int account_for_rest(struct binder *b) {
    const char *first_vision = NULL, *first_mtp = NULL;
    struct bind_stats *s = b->stats;
    for (size_t i = 0; i < b->catalog->n; i++) {
        struct catalog_entry *e = &b->catalog->entries[i];
        const struct st_tensor *t = e->tensor;
        if (e->used) continue;
        enum bind_skip skip = bind_skipped(t->name);
        if (skip == SKIP_VISION) {
            if (s->vision.tensors++ == 0) first_vision = t->name;
            s->vision.bytes += t->bytes;
        } else if (skip == SKIP_MTP) {
            if (s->mtp.tensors++ == 0) first_mtp = t->name;
            s->mtp.bytes += t->bytes;
        } else {
            s->unknown.tensors++;
            s->unknown.bytes += t->bytes;
            int rc = fault(b->f, LILY_EMODEL,
                           "%s: tensor %.160s: found a tensor that a model of %d layers does not "
                           "have, expected none beyond the model's own; use an unmodified "
                           "checkpoint",
                           e->shard->path, t->name, b->w->layers);
            if (rc != 0) return rc;
            continue;
        }
        e->used = true;
    }
    if (first_vision) {
        fault_warn(b->f, "%s: skipped %zu vision tensors (%.2f GB, the first is %.80s): text only",
                   b->where, s->vision.tensors, (double)s->vision.bytes * 1e-9, first_vision);
    }
    if (first_mtp) {
        fault_warn(b->f,
                   "%s: skipped %zu tensors of the multi-token-prediction head (%.2f GB, the first "
                   "is %.80s): not used",
                   b->where, s->mtp.tensors, (double)s->mtp.bytes * 1e-9, first_mtp);
    }
    return 0;
}

static int bind_all(struct binder *b) {
    int rc = find_naming(b);
    if (rc != 0 || !b->prefix) return rc;
    find_layout(b);
    struct tensor_walk walk;
    tensor_walk_start(&walk, b->w->shape, b->w->layers);
    while (rc == 0 && tensor_walk_next(&walk)) {
        switch (walk.role->kind) {
        case KIND_MATRIX:
            rc = bind_matrix(b, walk.role, walk.layer);
            break;
        case KIND_EXPERTS:
            rc = bind_experts(b, walk.role, walk.layer);
            break;
        case KIND_VECTOR:
        case KIND_CONV:
            rc = bind_small(b, walk.role, walk.layer);
            break;
        }
    }
    if (rc == 0) rc = account_for_rest(b);
    if (rc == 0) rc = scan_values(b);
    return rc;
}

int bind_weights(struct catalog *c, const struct config *config, const char *where,
                 const struct bind_options *options, struct pool *p, struct weights *w,
                 struct bind_stats *stats, struct faults *f) {
    struct binder b = {.catalog = c,
                       .config = config,
                       .where = where,
                       .options = options,
                       .pool = p,
                       .w = w,
                       .stats = stats,
                       .f = f};
    *stats = (struct bind_stats){0};
    *w = (struct weights){.shape = config->shape, .layers = config->layers};
    w->layer = pool_alloc(p, (size_t)w->layers * sizeof *w->layer);
    if (!w->layer) return ERR_NOMEM(f->err, where);
    memset(w->layer, 0, (size_t)w->layers * sizeof *w->layer);
    int rc = bind_all(&b);
    free(b.scans);
    return rc;
}
