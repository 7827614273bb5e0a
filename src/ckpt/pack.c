#include "ckpt/pack.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "base/file.h"
#include "ckpt/load.h"
#include "ckpt/parallel.h"
#include "ckpt/quantise.h"

int pack_check_space(const char *out, uint64_t bytes, lily_err *err) {
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", out);
    char *slash = strrchr(folder, '/');
    if (!slash) {
        snprintf(folder, sizeof folder, ".");
    } else {
        slash[slash == folder] = 0;
    }
    struct statvfs s;
    if (statvfs(folder, &s) != 0) return 0; /* creating the file will tell why */
    uint64_t free_bytes = (uint64_t)s.f_bavail * (uint64_t)s.f_frsize;
    if (free_bytes >= bytes) return 0;
    return ERR(err, LILY_ENOSPC,
               "%s: found %.2f GB free, expected room for %.2f GB; free space or choose another "
               "disk",
               out, (double)free_bytes * 1e-9, (double)bytes * 1e-9);
}

int pack_write_failed(const char *out, uint64_t bytes, int rc, lily_err *err) {
    if (rc != LILY_ENOSPC) return rc;
    return ERR(
        err, rc,
        "%s: found the disk (or a limit on file sizes) full while writing, expected room for "
        "%.2f GB; free space or choose another disk; nothing was kept",
        out, (double)bytes * 1e-9);
}

struct packing {
    struct packed_plan *plan;
    const struct pack_source *source;
    struct file_writer *writer;
    struct work *work;
};

static int fill_section(const struct packing *p, const struct packed_section *s, uint8_t *bytes,
                        lily_err *err) {
    for (int i = s->first; i < s->first + s->count; i++) {
        const struct packed_tensor *t = &p->plan->tensors[i];
        /* A layer's own section leaves out its experts, which have sections of theirs. */
        if ((t->role->kind == KIND_EXPERTS) != s->experts) continue;
        for (int32_t e = s->item; e < s->item + s->items; e++) {
            uint8_t *item = bytes + ((uint64_t)e * t->stride + t->offset - s->offset);
            uint8_t *scales = t->bits == 32 ? NULL : item + (t->scales - t->offset);
            uint8_t *biases = t->bits == 32 ? NULL : item + (t->biases - t->offset);
            int rc = p->source->fill(p->source->arg, t, e, item, (uint16_t *)(void *)scales,
                                     (uint16_t *)(void *)biases, err);
            if (rc != 0) return rc;
        }
    }
    return 0;
}

static void fill_texts(const struct packing *p, const struct packed_section *s, uint8_t *bytes) {
    for (int i = 0; i < TEXT_COUNT; i++) {
        if (!p->plan->text[i].present) continue;
        memcpy(bytes + (p->plan->text[i].offset - s->offset), p->source->texts->file[i].data,
               p->source->texts->file[i].size);
    }
}

static int write_section(void *arg, size_t i, lily_err *err) {
    const struct packing *p = arg;
    struct packed_section *s = &p->plan->sections[i];
    void *memory = NULL;
    if (posix_memalign(&memory, PACKED_ALIGN, s->bytes ? (size_t)s->bytes : 1) != 0) {
        return ERR_NOMEM(err, s->name);
    }
    uint8_t *bytes = memory;
    memset(bytes, 0, (size_t)s->bytes); /* padding is zero: equal input gives equal files */
    int rc = 0;
    if (s->count == 0) {
        fill_texts(p, s, bytes);
    } else {
        rc = fill_section(p, s, bytes, err);
    }
    if (rc == 0) {
        hash_hex(bytes, (size_t)s->bytes, s->sha256);
        rc = file_writer_write_at(p->writer, s->offset, bytes, (size_t)s->bytes, err);
    }
    free(bytes);
    work_add(p->work, s->bytes);
    return rc;
}

static int pack_tick(void *arg, lily_err *err) {
    const struct packing *p = arg;
    return work_report(p->work, err);
}

/* The directory as text, malloc'd. Its length does not depend on the checksums' values. */
static char *directory_text(const struct packing *p) {
    json_t *root = packed_directory(p->plan, p->source->vocab_used, p->source->source);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return text;
}

/* Places everything after a header that is just large enough for the directory that results. */
static int place(struct packing *p, lily_err *err) {
    for (int i = 0; i < TEXT_COUNT; i++) {
        p->plan->text[i].present = p->source->texts->file[i].data != NULL;
        p->plan->text[i].bytes = p->source->texts->file[i].size;
    }
    for (uint64_t header = PACKED_ALIGN, need;; header = need) {
        packed_plan_place(p->plan, header);
        for (int i = 0; i < p->plan->n_sections; i++) hash_hex("", 0, p->plan->sections[i].sha256);
        char *text = directory_text(p);
        if (!text) return ERR_NOMEM(err, "packed file's directory");
        need = (PACKED_FIXED + strlen(text) + PACKED_ALIGN - 1) / PACKED_ALIGN * PACKED_ALIGN;
        free(text);
        if (need == header) return 0;
    }
}

static void put_number(uint8_t *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++) at[i] = (uint8_t)(value >> (8 * i));
}

static int write_header(const struct packing *p, lily_err *err) {
    char *text = directory_text(p);
    if (!text) return ERR_NOMEM(err, "packed file's directory");
    size_t n = strlen(text);
    uint8_t fixed[PACKED_FIXED] = "LILYPACK";
    put_number(fixed + 8, PACKED_LAYOUT, 4);
    put_number(fixed + 12, n, 4);
    put_number(fixed + 16, p->plan->file_bytes, 8);
    char hex[HASH_HEX];
    struct hash *h = hash_new();
    hash_add(h, fixed, 24);
    hash_add(h, text, n);
    hash_end_hex(h, hex);
    for (int i = 0; i < HASH_BYTES; i++) {
        unsigned byte;
        sscanf(hex + 2 * i, "%2x", &byte);
        fixed[24 + i] = (uint8_t)byte;
    }
    int rc = file_writer_write_at(p->writer, 0, fixed, sizeof fixed, err);
    if (rc == 0) rc = file_writer_write_at(p->writer, PACKED_FIXED, text, n, err);
    free(text);
    return rc;
}

int pack_write(struct packed_plan *plan, const struct pack_source *source, const char *out,
               struct work *work, lily_err *err) {
    struct packing p = {.plan = plan, .source = source, .work = work};
    int rc = place(&p, err);
    if (rc == 0) rc = pack_check_space(out, plan->file_bytes, err);
    if (rc != 0) return rc;
    if (work) work->total += plan->file_bytes;
    rc = file_writer_open(out, &p.writer, err);
    if (rc != 0) return rc;
    rc = parallel_for((size_t)plan->n_sections, write_section, pack_tick, &p, err);
    if (rc == 0) rc = write_header(&p, err);
    if (rc != 0) {
        file_writer_abort(p.writer);
    } else {
        rc = file_writer_commit(p.writer, err);
    }
    return pack_write_failed(out, plan->file_bytes, rc, err);
}

/* ---- lily pack ------------------------------------------------------------------------------- */

static int32_t bits_of_weights(const void *arg, const struct tensor_role *r, int32_t layer) {
    const struct mat *m = tensor_mats(r, arg, layer);
    return m->bits == 16 ? r->bits : m->bits;
}

/* Copies what is quantised, quantises what is not, value by value as loading would. */
static int fill_from_weights(void *arg, const struct packed_tensor *t, int32_t item, uint8_t *codes,
                             uint16_t *scales, uint16_t *biases, lily_err *err) {
    const struct ckpt *c = arg;
    if (t->bits == 32) {
        size_t n = (size_t)tensor_rows(t->role, c->weights.shape) *
                   (size_t)tensor_cols(t->role, c->weights.shape);
        memcpy(codes, tensor_floats(t->role, &c->weights, t->layer), n * sizeof(float));
        return 0;
    }
    const struct mat *m = &tensor_mats(t->role, &c->weights, t->layer)[item];
    size_t groups = (size_t)m->rows * (size_t)(m->cols / QUANTISE_GROUP);
    if (m->bits != 16) {
        memcpy(codes, m->data, (size_t)m->rows * mat_row_bytes(m));
        memcpy(scales, m->scales, 2 * groups);
        memcpy(biases, m->biases, 2 * groups);
        return 0;
    }
    size_t bad = quantise_groups(m->data, groups, t->bits, codes, scales, biases);
    if (bad == SIZE_MAX) return 0;
    struct faults f = {.err = err};
    return load_name_bad_weight(c, m->data + 2 * bad, &f);
}

static bool same_file(const struct stat *out, const char *path) {
    struct stat st;
    return path && stat(path, &st) == 0 && st.st_dev == out->st_dev && st.st_ino == out->st_ino;
}

/* A packed file in the place of one of its own folder's files would ruin the folder. (Onto a packed
 * input it may go: the new one holds the same.) */
static int check_not_input(const struct ckpt *c, const char *out, lily_err *err) {
    struct stat st;
    if (c->form != FORM_FOLDER || c->folder.embedded || stat(out, &st) != 0) return 0;
    bool own = false;
    for (size_t i = 0; i < c->catalog.n_shards; i++) {
        own = own || same_file(&st, c->catalog.shards[i].path);
    }
    for (int i = 0; i < TEXT_COUNT; i++) {
        char *path = folder_join(&c->folder, text_file_name((enum text_file)i));
        own = own || same_file(&st, path);
        free(path);
    }
    if (!own) return 0;
    return ERR(err, LILY_EINVAL,
               "%s: found a file of the checkpoint to pack, expected another place; choose a new "
               "name",
               out);
}

int ckpt_pack(const char *in, const char *out, const struct ckpt_options *options, lily_err *err) {
    struct faults f = {.err = err};
    struct work work = {0};
    if (options) {
        f.warn = options->warn;
        f.warn_arg = options->warn_arg;
        work.progress = options->progress;
        work.arg = options->progress_arg;
    }
    if (file_is_dir(out)) {
        return ERR(err, LILY_EINVAL,
                   "%s: found a folder, expected the name of a file to write; "
                   "give a file name",
                   out);
    }
    struct ckpt c = {0};
    struct packed_plan plan = {0};
    int rc = load_open(&c, in, LOAD_TO_PACK, &work, &f);
    if (rc == 0) rc = check_not_input(&c, out, err);
    if (rc == 0 && options && options->check) rc = options->check(&c, err);
    if (rc == 0) {
        rc = packed_plan_make(c.weights.shape, c.weights.layers, bits_of_weights, &c.weights, &plan,
                              err);
    }
    if (rc == 0) {
        struct pack_source source = {.fill = fill_from_weights,
                                     .arg = &c,
                                     .texts = &c.texts,
                                     .vocab_used = c.weights.vocab_used,
                                     .source = c.kind};
        rc = pack_write(&plan, &source, out, &work, err);
    }
    packed_plan_free(&plan);
    load_close(&c);
    return rc;
}
