/* lily synth: the values of synth.c as an MLX folder or as a packed file. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bf16.h"
#include "base/buf.h"
#include "base/file.h"
#include "ckpt/ckpt.h"
#include "ckpt/pack.h"
#include "ckpt/parallel.h"
#include "ckpt/synth.h"
#include "ckpt/synth_texts.h"

/* A shard's data, as MLX cuts them; and what one thread makes and writes at a time. */
#define SHARD_BYTES ((uint64_t)5 << 30)
#define PIECE_BYTES ((size_t)4 << 20)

enum part_kind { PART_CODES, PART_SCALES, PART_BIASES, PART_VALUES };

/* One tensor of the folder: a quantised matrix is three of them. */
struct part {
    const struct tensor_role *role;
    int32_t layer;
    enum part_kind kind;
    size_t items, item_bytes;
    int shard;
    uint64_t offset; /* in the shard's data */
};

/* A run of a part's bytes: whole items where they are small, else a cut of one. */
struct piece {
    int part;
    size_t item, items;
    size_t from, bytes; /* within each item */
};

struct shard {
    char name[64];
    struct file_writer *writer;
    uint64_t data_bytes, header_bytes;
};

struct folder_writer {
    struct synth synth;
    int32_t layers;
    struct part *parts; /* [n_parts] owned */
    int n_parts;
    struct piece *pieces; /* [n_pieces] owned */
    size_t n_pieces, cap_pieces;
    struct shard *shards; /* [n_shards] owned */
    int n_shards;
    char *folder; /* owned; the temporary one while writing */
    struct work work;
};

static const char *part_name(const struct part *p, char *out, size_t size) {
    static const char *const suffixes[] = {".weight", ".scales", ".biases"};
    char path[128];
    tensor_path(p->role, p->layer, path, sizeof path);
    bool head = p->role->class == CLASS_LM_HEAD;
    snprintf(out, size, "language_model.%s%s%s", head ? "" : "model.", path,
             p->kind == PART_VALUES ? p->role->suffix : suffixes[p->kind]);
    return out;
}

static json_t *part_entry(const struct folder_writer *w, const struct part *p) {
    const struct tensor_role *r = p->role;
    json_int_t rows = tensor_rows(r, w->synth.shape), cols = tensor_cols(r, w->synth.shape);
    json_t *shape = json_array();
    if (r->kind == KIND_EXPERTS) json_array_append_new(shape, json_integer((json_int_t)p->items));
    json_array_append_new(shape, json_integer(rows));
    if (p->kind == PART_CODES) cols = cols * r->bits / 32;
    if (p->kind == PART_SCALES || p->kind == PART_BIASES) cols /= w->synth.shape->group;
    if (r->kind != KIND_VECTOR) json_array_append_new(shape, json_integer(cols));
    if (r->kind == KIND_CONV) json_array_append_new(shape, json_integer(1));
    json_int_t begin = (json_int_t)p->offset;
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", p->kind == PART_CODES ? "U32" : "BF16",
                     "shape", shape, "data_offsets", begin,
                     begin + (json_int_t)(p->items * p->item_bytes));
}

static void add_part(struct folder_writer *w, struct part p) {
    uint64_t bytes = (uint64_t)p.items * p.item_bytes;
    struct shard *s = &w->shards[w->n_shards - 1];
    if (s->data_bytes > 0 && s->data_bytes + bytes > SHARD_BYTES) {
        s = &w->shards[w->n_shards++];
    }
    p.shard = w->n_shards - 1;
    p.offset = s->data_bytes;
    s->data_bytes += bytes;
    w->work.total += bytes;
    w->parts[w->n_parts++] = p;
}

static int plan_parts(struct folder_writer *w, lily_err *err) {
    size_t most = (size_t)(w->layers + 1) * (size_t)tensor_role_count * 3;
    w->parts = calloc(most, sizeof *w->parts);
    w->shards = calloc(most, sizeof *w->shards);
    if (!w->parts || !w->shards) return ERR_NOMEM(err, "synthetic checkpoint");
    w->n_shards = 1;
    struct tensor_walk walk;
    tensor_walk_start(&walk, w->synth.shape, w->layers);
    while (tensor_walk_next(&walk)) {
        const struct tensor_role *r = walk.role;
        size_t n = (size_t)tensor_rows(r, walk.shape) * (size_t)tensor_cols(r, walk.shape);
        struct part p = {.role = r,
                         .layer = walk.layer,
                         .kind = PART_VALUES,
                         .items = (size_t)tensor_items(r, walk.shape),
                         .item_bytes = 2 * n};
        if (r->kind == KIND_VECTOR || r->kind == KIND_CONV) {
            add_part(w, p);
            continue;
        }
        p.kind = PART_CODES;
        p.item_bytes = n * (size_t)r->bits / 8;
        add_part(w, p);
        p.item_bytes = n / (size_t)walk.shape->group * 2;
        p.kind = PART_SCALES;
        add_part(w, p);
        p.kind = PART_BIASES;
        add_part(w, p);
    }
    return 0;
}

static int plan_pieces(struct folder_writer *w, lily_err *err) {
    for (int i = 0; i < w->n_parts; i++) {
        const struct part *p = &w->parts[i];
        size_t run = PIECE_BYTES / p->item_bytes ? PIECE_BYTES / p->item_bytes : 1;
        for (size_t item = 0; item < p->items; item += run) {
            for (size_t from = 0; from < p->item_bytes; from += PIECE_BYTES) {
                if (w->n_pieces == w->cap_pieces) {
                    size_t cap = w->cap_pieces ? 2 * w->cap_pieces : 4096;
                    void *grown = realloc(w->pieces, cap * sizeof *w->pieces);
                    if (!grown) return ERR_NOMEM(err, "synthetic checkpoint");
                    w->pieces = grown;
                    w->cap_pieces = cap;
                }
                size_t left = p->item_bytes - from;
                w->pieces[w->n_pieces++] =
                    (struct piece){.part = i,
                                   .item = item,
                                   .items = p->items - item < run ? p->items - item : run,
                                   .from = from,
                                   .bytes = left < PIECE_BYTES ? left : PIECE_BYTES};
            }
        }
    }
    return 0;
}

static void make_item(const struct folder_writer *w, const struct part *p, int32_t item,
                      size_t from, size_t bytes, uint8_t *out) {
    uint16_t *values = (uint16_t *)(void *)out;
    switch (p->kind) {
    case PART_CODES:
        synth_codes(&w->synth, p->role, p->layer, item, from, bytes, out);
        break;
    case PART_SCALES:
        synth_scales(&w->synth, p->role, p->layer, item, from / 2, bytes / 2, values, NULL);
        break;
    case PART_BIASES:
        synth_scales(&w->synth, p->role, p->layer, item, from / 2, bytes / 2, NULL, values);
        break;
    case PART_VALUES:
        synth_small(&w->synth, p->role, p->layer, bytes / 2, values);
        break;
    }
}

static int write_piece(void *arg, size_t i, lily_err *err) {
    struct folder_writer *w = arg;
    const struct piece *piece = &w->pieces[i];
    const struct part *p = &w->parts[piece->part];
    uint8_t *bytes = malloc(piece->items * piece->bytes);
    if (!bytes) return ERR_NOMEM(err, "synthetic checkpoint");
    for (size_t e = 0; e < piece->items; e++) {
        make_item(w, p, (int32_t)(piece->item + e), piece->from, piece->bytes,
                  bytes + e * piece->bytes);
    }
    struct shard *s = &w->shards[p->shard];
    uint64_t at = s->header_bytes + p->offset + piece->item * p->item_bytes + piece->from;
    int rc = file_writer_write_at(s->writer, at, bytes, piece->items * piece->bytes, err);
    free(bytes);
    work_add(&w->work, piece->items * piece->bytes);
    return rc;
}

static int tick(void *arg, lily_err *err) {
    struct folder_writer *w = arg;
    return work_report(&w->work, err);
}

/* Header of one shard: its tensors, padded with spaces so that the data begins at a multiple of 8.
 */
static int write_shard_header(struct folder_writer *w, int shard, lily_err *err) {
    struct shard *s = &w->shards[shard];
    json_t *header = json_pack("{s:{s:s}}", "__metadata__", "format", "mlx");
    char name[192];
    for (int i = 0; i < w->n_parts; i++) {
        if (w->parts[i].shard != shard) continue;
        json_object_set_new(header, part_name(&w->parts[i], name, sizeof name),
                            part_entry(w, &w->parts[i]));
    }
    char *text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    struct buf b = {0};
    uint64_t n = text ? (strlen(text) + 7) / 8 * 8 : 0;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(n >> (8 * i));
    bool ok = text && buf_append(&b, length, sizeof length) && buf_puts(&b, text);
    while (ok && b.len < 8 + n) ok = buf_puts(&b, " ");
    free(text);
    s->header_bytes = 8 + n;
    int rc = ok ? file_writer_write_at(s->writer, 0, b.data, b.len, err)
                : ERR_NOMEM(err, "synthetic checkpoint");
    buf_free(&b);
    return rc;
}

static char *join(const char *folder, const char *name) {
    size_t n = strlen(folder) + strlen(name) + 2;
    char *path = malloc(n);
    if (path) snprintf(path, n, "%s/%s", folder, name);
    return path;
}

static int write_text(const struct folder_writer *w, const char *name, const char *text, size_t n,
                      lily_err *err) {
    char *path = join(w->folder, name);
    if (!path) return ERR_NOMEM(err, name);
    struct file_writer *f;
    int rc = file_writer_open(path, &f, err);
    free(path);
    if (rc != 0) return rc;
    rc = file_writer_write(f, text, n, err);
    if (rc == 0) return file_writer_commit(f, err);
    file_writer_abort(f);
    return rc;
}

static const char index_name[] = "model.safetensors.index.json";

static int write_index(const struct folder_writer *w, lily_err *err) {
    json_t *map = json_object();
    char name[192];
    for (int i = 0; i < w->n_parts; i++) {
        json_object_set_new(map, part_name(&w->parts[i], name, sizeof name),
                            json_string(w->shards[w->parts[i].shard].name));
    }
    json_t *root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)w->work.total,
                             "weight_map", map);
    char *text = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    int rc = text ? write_text(w, index_name, text, strlen(text), err) : ERR_NOMEM(err, index_name);
    free(text);
    return rc;
}

static int open_shards(struct folder_writer *w, lily_err *err) {
    int rc = 0;
    for (int i = 0; rc == 0 && i < w->n_shards; i++) {
        struct shard *s = &w->shards[i];
        if (w->n_shards == 1) {
            snprintf(s->name, sizeof s->name, "model.safetensors");
        } else {
            snprintf(s->name, sizeof s->name, "model-%05d-of-%05d.safetensors", i + 1, w->n_shards);
        }
        char *path = join(w->folder, s->name);
        rc = path ? file_writer_open(path, &s->writer, err) : ERR_NOMEM(err, s->name);
        free(path);
        if (rc == 0) rc = write_shard_header(w, i, err);
    }
    return rc;
}

static int write_files(struct folder_writer *w, const struct texts *texts, lily_err *err) {
    int rc = open_shards(w, err);
    if (rc == 0) rc = parallel_for(w->n_pieces, write_piece, tick, w, err);
    for (int i = 0; i < w->n_shards; i++) {
        struct file_writer *f = w->shards[i].writer;
        w->shards[i].writer = NULL;
        if (f && rc == 0) {
            rc = file_writer_commit(f, err);
        } else if (f) {
            file_writer_abort(f);
        }
    }
    if (rc == 0) rc = write_index(w, err);
    for (int i = 0; rc == 0 && i < TEXT_COUNT; i++) {
        if (!texts->file[i].data) continue;
        rc = write_text(w, text_file_name((enum text_file)i), texts->file[i].data,
                        texts->file[i].size, err);
    }
    return rc;
}

/* Takes back what write_files may have committed to the temporary folder. */
static void remove_files(const struct folder_writer *w) {
    for (int i = 0; i < w->n_shards + TEXT_COUNT + 1; i++) {
        const char *name = i < w->n_shards ? w->shards[i].name
                           : i < w->n_shards + TEXT_COUNT
                               ? text_file_name((enum text_file)(i - w->n_shards))
                               : index_name;
        char *path = *name ? join(w->folder, name) : NULL;
        if (path) unlink(path);
        free(path);
    }
    rmdir(w->folder);
}

/* All files in a temporary folder beside out, which is then renamed. */
static int write_folder(struct folder_writer *w, const struct texts *texts, const char *out,
                        lily_err *err) {
    size_t n = strlen(out) + sizeof ".part-XXXXXX";
    w->folder = malloc(n);
    if (!w->folder) return ERR_NOMEM(err, out);
    size_t length = strlen(out); /* "name/" is the same folder as "name" */
    while (length > 1 && out[length - 1] == '/') length--;
    snprintf(w->folder, n, "%.*s.part-XXXXXX", (int)length, out);
    if (!mkdtemp(w->folder)) {
        return err_system(err, errno, out, "create");
    }
    mode_t mask = umask(0);
    umask(mask);
    chmod(w->folder, 0777 & ~mask); /* mkdtemp made it private */
    int rc = write_files(w, texts, err);
    if (rc == 0 && rename(w->folder, out) != 0) {
        rc = err_system(err, errno, out, "rename into place");
    }
    if (rc != 0) remove_files(w);
    return rc;
}

static int synth_folder(const struct ckpt_synth_options *o, const struct shape *shape,
                        int32_t layers, const struct texts *texts, const char *out, lily_err *err) {
    struct folder_writer w = {.layers = layers,
                              .work = {.progress = o->progress, .arg = o->progress_arg}};
    int rc = synth_init(&w.synth, shape, o->seed, err);
    if (rc == 0) rc = plan_parts(&w, err);
    if (rc == 0) rc = plan_pieces(&w, err);
    if (rc == 0) rc = pack_check_space(out, w.work.total, err);
    if (rc == 0) {
        rc = write_folder(&w, texts, out, err);
        rc = pack_write_failed(out, w.work.total, rc, err);
    }
    synth_free(&w.synth);
    free(w.parts);
    free(w.pieces);
    free(w.shards);
    free(w.folder);
    return rc;
}

static int32_t recipe_bits(const void *arg, const struct tensor_role *r, int32_t layer) {
    (void)arg;
    (void)layer;
    return r->bits;
}

static int fill_packed(void *arg, const struct packed_tensor *t, int32_t item, uint8_t *codes,
                       uint16_t *scales, uint16_t *biases, lily_err *err) {
    const struct synth *s = arg;
    size_t n = (size_t)tensor_rows(t->role, s->shape) * (size_t)tensor_cols(t->role, s->shape);
    if (t->bits != 32) {
        synth_codes(s, t->role, t->layer, item, 0, n * (size_t)t->bits / 8, codes);
        synth_scales(s, t->role, t->layer, item, 0, n / (size_t)s->shape->group, scales, biases);
        return 0;
    }
    uint16_t *stored = malloc(n * sizeof *stored);
    if (!stored) return ERR_NOMEM(err, "synthetic checkpoint");
    synth_small(s, t->role, t->layer, n, stored);
    float *values = (float *)(void *)codes;
    for (size_t i = 0; i < n; i++) values[i] = bf16_to_f32(stored[i]);
    free(stored);
    return 0;
}

static int synth_packed(const struct ckpt_synth_options *o, const struct shape *shape,
                        int32_t layers, const struct texts *texts, int32_t vocab_used,
                        const char *out, lily_err *err) {
    struct synth synth = {0};
    struct packed_plan plan = {0};
    struct work work = {.progress = o->progress, .arg = o->progress_arg};
    int rc = synth_init(&synth, shape, o->seed, err);
    if (rc == 0) rc = packed_plan_make(shape, layers, recipe_bits, NULL, &plan, err);
    if (rc == 0) {
        struct pack_source source = {.fill = fill_packed,
                                     .arg = &synth,
                                     .texts = texts,
                                     .vocab_used = vocab_used,
                                     .source = "synthetic"};
        rc = pack_write(&plan, &source, out, &work, err);
    }
    packed_plan_free(&plan);
    synth_free(&synth);
    return rc;
}

int ckpt_synth(const char *out, const struct ckpt_synth_options *options, lily_err *err) {
    const struct shape *shape = shape_find(options->shape ? options->shape : "mini");
    if (!shape) {
        char names[256] = "";
        size_t used = 0;
        for (int i = 0; shape_all[i] && used < sizeof names; i++)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? " or " : "",
                                     shape_all[i]->name);
        return ERR(err, LILY_EINVAL, "shape: found %.60s, expected %s; choose one of them",
                   options->shape, names);
    }
    int32_t layers = options->layers ? options->layers : shape->layers;
    if (layers < 0 || layers % shape->attention_every != 0 || layers > shape->layers) {
        return ERR(err, LILY_EINVAL,
                   "layers: found %d, expected a multiple of %d up to %d for %s; choose another "
                   "number",
                   layers, shape->attention_every, shape->layers, shape->name);
    }
    if (file_exists(out) && !(options->packed && !file_is_dir(out))) {
        return ERR(err, LILY_EINVAL,
                   "%s: found something there already, expected a new name; remove it or choose "
                   "another name",
                   out);
    }
    struct texts texts;
    int32_t vocab_used;
    int rc = synth_texts_make(shape, layers, &texts, &vocab_used, err);
    if (rc != 0) return rc;
    rc = options->packed ? synth_packed(options, shape, layers, &texts, vocab_used, out, err)
                         : synth_folder(options, shape, layers, &texts, out, err);
    synth_texts_free(&texts);
    return rc;
}
