/* Reading a packed file: header, directory, pointers into the mapping. */
#include "ckpt/packed.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/json.h"
#include "ckpt/load.h"
#include "ckpt/parallel.h"

static const char magic[8] = {'L', 'I', 'L', 'Y', 'P', 'A', 'C', 'K'};

/* Far above any real directory (0.2 MB for 40 layers). */
#define DIRECTORY_LIMIT ((uint32_t)16 << 20)

static uint64_t number(const uint8_t *at, int bytes) {
    uint64_t v = 0;
    for (int i = bytes - 1; i >= 0; i--) v = v << 8 | at[i];
    return v;
}

bool packed_recognise(const uint8_t *data, size_t size) {
    return size >= sizeof magic && memcmp(data, magic, sizeof magic) == 0;
}

size_t packed_header_bytes(const uint8_t *data) {
    return PACKED_FIXED + (size_t)number(data + 12, 4);
}

/* Magic, version, lengths and checksum: after this the directory is what was written. */
static int check_header(const char *path, const uint8_t *data, size_t size, lily_err *err) {
    if (size < PACKED_FIXED || !packed_recognise(data, size)) {
        return ERR(
            err, LILY_EFORMAT,
            "%s: found no packed file's header, expected LILYPACK; pack the checkpoint again",
            path);
    }
    uint64_t version = number(data + 8, 4), directory = number(data + 12, 4);
    uint64_t file_bytes = number(data + 16, 8);
    if (version != PACKED_LAYOUT) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found layout version %" PRIu64 ", expected %d; pack the checkpoint again "
                   "with this program (lily pack)",
                   path, version, PACKED_LAYOUT);
    }
    if (file_bytes != size) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found %zu bytes, expected the %" PRIu64 " that its header names: the file "
                   "is cut short or damaged; copy it or pack it again",
                   path, size, file_bytes);
    }
    if (directory > DIRECTORY_LIMIT || directory > size - PACKED_FIXED) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found a directory of %" PRIu64 " bytes, expected at most %zu; pack the "
                   "checkpoint again",
                   path, directory, size - PACKED_FIXED);
    }
    char sha[HASH_HEX], stored[HASH_HEX];
    struct hash *h = hash_new();
    hash_add(h, data, 24);
    hash_add(h, data + PACKED_FIXED, (size_t)directory);
    hash_end_hex(h, sha);
    for (int i = 0; i < HASH_BYTES; i++) snprintf(stored + 2 * i, 3, "%02x", data[24 + i]);
    if (strcmp(sha, stored) != 0) {
        return ERR(err, LILY_EFORMAT,
                   "%s: found a header with SHA-256 %.16s..., expected %.16s...: it is damaged; "
                   "copy the file or pack it again",
                   path, sha, stored);
    }
    return 0;
}

static int damaged(const char *path, const char *part, lily_err *err) {
    return ERR(err, LILY_EFORMAT,
               "%s: directory: found %s other than this layout has, expected its own; pack the "
               "checkpoint again with this program (lily pack)",
               path, part);
}

/* Bits of the plan's tensors as the directory tells them, entry by entry in walk order. */
struct bits_source {
    const json_t *tensors;
    size_t *next;
};

static int32_t bits_from_directory(const void *arg, const struct tensor_role *r, int32_t layer) {
    const struct bits_source *s = arg;
    char name[128];
    tensor_path(r, layer, name, sizeof name);
    /* Small tensors have entries too: skip forward to the one of this name. */
    for (;;) {
        const json_t *e = json_array_get(s->tensors, (*s->next)++);
        if (!e) return r->bits;
        const char *found = json_string_value(json_object_get(e, "name"));
        if (!found || strcmp(found, name) != 0) continue;
        json_int_t bits = json_integer_value(json_object_get(e, "bits"));
        return bits == 4 || bits == r->bits ? (int32_t)bits : r->bits;
    }
}

static int read_texts(const char *path, const json_t *root, struct packed_plan *p, size_t size,
                      lily_err *err) {
    size_t i;
    json_t *e;
    json_array_foreach(json_object_get(root, "texts"), i, e) {
        const char *name = json_string_value(json_object_get(e, "name"));
        json_int_t bytes = json_integer_value(json_object_get(e, "bytes"));
        int file = 0;
        while (name && file < TEXT_COUNT &&
               strcmp(text_file_name((enum text_file)file), name) != 0) {
            file++;
        }
        if (!name || file == TEXT_COUNT || bytes < 0 || (uint64_t)bytes > size) {
            return damaged(path, "texts", err);
        }
        p->text[file].present = true;
        p->text[file].bytes = (uint64_t)bytes;
    }
    return 0;
}

/* Copies the section checksums, then compares the whole directory with the one the plan makes. */
static int compare_directory(const char *path, const json_t *root, struct packed_plan *p,
                             int32_t vocab_used, lily_err *err) {
    const json_t *sections = json_object_get(root, "sections");
    if (json_array_size(sections) != (size_t)p->n_sections) {
        return damaged(path, "a number of sections", err);
    }
    for (int i = 0; i < p->n_sections; i++) {
        const json_t *sha = json_object_get(json_array_get(sections, (size_t)i), "sha256");
        if (json_string_length(sha) != HASH_HEX - 1) return damaged(path, "checksums", err);
        memcpy(p->sections[i].sha256, json_string_value(sha), HASH_HEX);
    }
    const char *source = json_string_value(json_object_get(root, "source"));
    json_t *want = packed_directory(p, vocab_used, source ? source : "");
    if (!want) return ERR_NOMEM(err, path);
    bool same = json_equal(want, (json_t *)(uintptr_t)root);
    json_decref(want);
    return same ? 0 : damaged(path, "tensors or sections", err);
}

/* Shape, layers and bits from the directory -> the plan, which must give the same directory. */
static int read_plan(const char *path, const json_t *root, size_t size, uint64_t header_bytes,
                     struct packed_plan *p, int32_t *vocab_used, lily_err *err) {
    const char *name = json_string_value(json_object_get(root, "shape"));
    const struct shape *s = name ? shape_find(name) : NULL;
    json_int_t layers = json_integer_value(json_object_get(root, "layers"));
    json_int_t used = json_integer_value(json_object_get(root, "vocab_used"));
    if (!s) {
        return ERR(err, LILY_EMODEL,
                   "%s: found the shape %.60s, expected one this program has; use a newer program",
                   path, name ? name : "(none)");
    }
    if (layers < s->attention_every || layers > s->layers || layers % s->attention_every != 0 ||
        used < 1 || used > s->vocab) {
        return damaged(path, "a layer count or vocabulary", err);
    }
    *vocab_used = (int32_t)used;
    size_t next = 0;
    struct bits_source bits = {json_object_get(root, "tensors"), &next};
    int rc = packed_plan_make(s, (int32_t)layers, bits_from_directory, &bits, p, err);
    if (rc == 0) rc = read_texts(path, root, p, size, err);
    if (rc != 0) return rc;
    packed_plan_place(p, header_bytes);
    if (p->file_bytes != size) return damaged(path, "a length", err);
    return compare_directory(path, root, p, *vocab_used, err);
}

static int bind_tensor(struct ckpt *c, const struct packed_plan *p, const struct packed_tensor *t,
                       const uint8_t *data, lily_err *err) {
    struct weights *w = &c->weights;
    if (t->bits == 32) {
        tensor_set_floats(t->role, w, t->layer, (const float *)(const void *)(data + t->offset));
        return 0;
    }
    size_t n = (size_t)tensor_items(t->role, p->shape);
    struct mat *m = pool_alloc(&c->pool, n * sizeof *m);
    if (!m) return ERR_NOMEM(err, c->path);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *at = data + i * t->stride;
        m[i] = (struct mat){.data = at + t->offset,
                            .scales = (const uint16_t *)(const void *)(at + t->scales),
                            .biases = (const uint16_t *)(const void *)(at + t->biases),
                            .rows = tensor_rows(t->role, p->shape),
                            .cols = tensor_cols(t->role, p->shape),
                            .bits = t->bits};
    }
    tensor_set_mats(t->role, w, t->layer, m);
    return 0;
}

static int bind_plan(struct ckpt *c, const struct packed_plan *p, int32_t vocab_used,
                     const uint8_t *data, lily_err *err) {
    c->weights = (struct weights){
        .shape = p->shape, .layers = p->layers, .vocab_used = vocab_used, .bytes = p->weight_bytes};
    c->weights.layer = pool_alloc(&c->pool, (size_t)p->layers * sizeof *c->weights.layer);
    if (!c->weights.layer) return ERR_NOMEM(err, c->path);
    memset(c->weights.layer, 0, (size_t)p->layers * sizeof *c->weights.layer);
    for (int i = 0; i < p->n_tensors; i++) {
        const struct packed_tensor *t = &p->tensors[i];
        int rc = bind_tensor(c, p, t, data, err);
        if (rc != 0) return rc;
        uint64_t one = packed_code_bytes(p, t) + 2 * packed_scale_bytes(p, t);
        c->stats.class[t->role->class].tensors += t->bits == 32 ? 1 : 3;
        c->stats.class[t->role->class].bytes += one * (uint64_t)tensor_items(t->role, p->shape);
    }
    for (int i = 0; i < TEXT_COUNT; i++) {
        if (!p->text[i].present) continue;
        c->texts.file[i].data = (const char *)data + p->text[i].offset;
        c->texts.file[i].size = (size_t)p->text[i].bytes;
    }
    c->stats.converted = true;
    return 0;
}

/* The directory parsed and planned; the caller frees *plan and *root. */
static int open_plan(const char *path, const uint8_t *data, size_t size, json_t **root,
                     struct packed_plan *plan, int32_t *vocab_used, lily_err *err) {
    *root = NULL;
    *plan = (struct packed_plan){0};
    int rc = check_header(path, data, size, err);
    if (rc != 0) return rc;
    size_t header = packed_header_bytes(data);
    char what[320];
    snprintf(what, sizeof what, "%.280s: directory", path);
    rc = json_parse_object(what, (const char *)data + PACKED_FIXED, header - PACKED_FIXED, root,
                           err);
    if (rc != 0) return rc;
    uint64_t padded = (header + PACKED_ALIGN - 1) / PACKED_ALIGN * PACKED_ALIGN;
    return read_plan(path, *root, size, padded, plan, vocab_used, err);
}

int packed_open_bytes(struct ckpt *c, const uint8_t *data, size_t size, struct faults *f) {
    json_t *root;
    struct packed_plan plan;
    int32_t vocab_used = 0;
    lily_err err = {0};
    int rc = open_plan(c->path, data, size, &root, &plan, &vocab_used, &err);
    if (rc == 0) rc = bind_plan(c, &plan, vocab_used, data, &err);
    packed_plan_free(&plan);
    json_decref(root);
    return rc == 0 ? 0 : fault_from(f, rc, &err);
}

int packed_open(struct ckpt *c, struct faults *f) {
    int rc = file_map_open(c->path, &c->packed, f->err);
    if (rc == 0) rc = packed_open_bytes(c, c->packed.data, c->packed.size, f);
    if (rc == 0) c->weights.map = c->packed.data;
    return rc;
}

struct verifying {
    const struct packed_plan *plan;
    const uint8_t *data;
    char (*found)[HASH_HEX]; /* [n_sections] */
};

static int verify_section(void *arg, size_t i, lily_err *err) {
    (void)err;
    struct verifying *v = arg;
    const struct packed_section *s = &v->plan->sections[i];
    hash_hex(v->data + s->offset, (size_t)s->bytes, v->found[i]);
    return 0;
}

int packed_verify(const struct ckpt *c, struct faults *f) {
    json_t *root;
    struct packed_plan plan;
    int32_t vocab_used;
    lily_err err = {0};
    int rc = open_plan(c->path, c->packed.data, c->packed.size, &root, &plan, &vocab_used, &err);
    if (rc != 0) fault_from(f, rc, &err);
    struct verifying v = {.plan = &plan, .data = c->packed.data};
    if (rc == 0) {
        v.found = calloc((size_t)plan.n_sections, sizeof *v.found);
        rc = v.found ? 0 : ERR_NOMEM(f->err, c->path);
    }
    if (rc == 0) rc = parallel_for((size_t)plan.n_sections, verify_section, NULL, &v, f->err);
    for (int i = 0; rc == 0 && i < plan.n_sections; i++) {
        const struct packed_section *s = &plan.sections[i];
        if (strcmp(v.found[i], s->sha256) == 0) continue;
        rc = fault(f, LILY_EFORMAT,
                   "%s: section %s: found SHA-256 %.16s..., expected %.16s...: its data is "
                   "damaged; copy the file or pack it again",
                   c->path, s->name, v.found[i], s->sha256);
    }
    free(v.found);
    packed_plan_free(&plan);
    json_decref(root);
    return rc;
}
