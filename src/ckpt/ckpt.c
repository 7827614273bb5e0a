#include "ckpt/ckpt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/identity.h"
#include "ckpt/load.h"
#include "ckpt/memory.h"
#include "ckpt/packed.h"
#include "ckpt/quantise.h"

static struct faults faults_for(const struct ckpt_options *o, lily_err *err) {
    struct faults f = {.err = err};
    if (o) {
        f.warn = o->warn;
        f.warn_arg = o->warn_arg;
    }
    return f;
}

static bool has_suffix(const char *text, const char *suffix) {
    size_t n = strlen(text), m = strlen(suffix);
    return n >= m && strcmp(text + n - m, suffix) == 0;
}

int load_form(const char *path, enum ckpt_form *out, lily_err *err) {
    *out = FORM_FOLDER;
    if (!path || file_is_dir(path)) return 0;
    struct file_map map;
    int rc = file_map_open(path, &map, err);
    if (rc == LILY_ENOENT) {
        return ERR(err, rc,
                   "%s: found nothing there, expected a checkpoint folder or a packed file; check "
                   "the path",
                   path);
    }
    if (rc != 0) return rc;
    if (packed_recognise(map.data, map.size)) {
        *out = FORM_PACKED;
    } else if (has_suffix(path, ".safetensors")) {
        *out = FORM_SAFETENSORS;
    } else {
        *out = FORM_UNKNOWN;
        bool gguf = map.size >= 4 && memcmp(map.data, "GGUF", 4) == 0;
        rc = ERR(err, LILY_EMODEL,
                 "%s: found %s, expected a checkpoint folder or a packed file; give the folder of "
                 "the MLX 4-bit or the bf16 checkpoint",
                 path, gguf ? "a GGUF file" : "a file of an unknown kind");
    }
    file_unmap(&map);
    return rc;
}

static const char *folder_kind(const struct ckpt *c) {
    if (c->folder.embedded) return "embedded";
    if (c->config.quantised) return "MLX 4-bit folder";
    if (c->catalog.n == 0) return "folder without weights";
    return c->stats.converted ? "MLX bf16 folder" : "Hugging Face bf16 folder";
}

int load_name_bad_weight(const struct ckpt *c, const uint8_t *bad, struct faults *f) {
    const struct catalog_entry *e = catalog_locate(&c->catalog, bad);
    if (!e) return ERR(f->err, LILY_ENUMERIC, "%s: a weight is not finite", c->path);
    return fault(f, LILY_EFORMAT,
                 "%s: tensor %.160s: found a value that is not finite (or a range beyond bfloat16) "
                 "at index %zu, expected finite numbers; download the shard again",
                 e->shard->path, e->tensor->name, (size_t)(bad - e->tensor->data) / 2);
}

/* The quantised form of a 16-bit folder is held in memory: say so before the system gives out. */
static int check_memory(const struct ckpt *c, lily_err *err) {
    uint64_t needed = memory_quantised_bytes(c->weights.shape, c->weights.layers);
    uint64_t present = memory_present();
    if (present == 0 || needed < present / 10 * 9) return 0;
    return ERR(err, LILY_ENOMEM,
               "%s: found %.1f GB of memory, expected more than %.1f GB to quantise these weights "
               "in; write a packed file first (lily pack) and run that",
               c->path, (double)present * 1e-9, (double)needed * 1e-9);
}

/* Binds the tensors, when config and shards allow it at all. */
static int bind_folder(struct ckpt *c, enum load_matrices matrices, struct work *work,
                       struct faults *f) {
    if (!c->config.shape || c->config.bits == 0) return 0;
    struct bind_options options = {.round_norms = matrices != LOAD_BF16,
                                   .skip_matrix_scan = matrices != LOAD_BF16,
                                   .work = work};
    int rc = bind_weights(&c->catalog, &c->config, c->folder.path, &options, &c->pool, &c->weights,
                          &c->stats, f);
    if (rc == 0) {
        rc = texts_vocab_used(&c->texts, c->folder.path, c->config.shape->vocab,
                              &c->weights.vocab_used, f);
    }
    if (rc == 0) rc = texts_check_template(&c->texts, c->folder.path, f);
    if (rc != 0 || matrices != LOAD_QUANTISED || f->list) return rc;
    if (c->weights.embed.bits == 16) rc = check_memory(c, f->err);
    if (rc != 0) return rc;
    const uint8_t *bad;
    rc = quantise_weights(&c->weights, &c->pool, work, &bad, f->err);
    return rc == LILY_ENUMERIC ? load_name_bad_weight(c, bad, f) : rc;
}

static int open_folder(struct ckpt *c, const char *path, enum load_matrices matrices,
                       struct work *work, struct faults *f) {
    int rc = folder_open(path, &c->folder, f->err);
    if (rc != 0) return rc;
    c->path = strdup(c->folder.path);
    char *config = folder_join(&c->folder, "config.json");
    if (!c->path || !config) {
        free(config);
        return ERR_NOMEM(f->err, "checkpoint");
    }
    /* The config first: for another model it gives the clearest refusal. */
    rc = texts_open(&c->folder, &c->texts, f);
    if (rc == 0 && c->texts.file[TEXT_CONFIG].data) {
        rc = config_parse(config, c->texts.file[TEXT_CONFIG].data, c->texts.file[TEXT_CONFIG].size,
                          &c->config, f);
    }
    free(config);
    if (rc == 0) rc = catalog_open(&c->folder, &c->catalog, f);
    if (rc == 0) rc = bind_folder(c, matrices, work, f);
    if (rc == 0) c->kind = folder_kind(c);
    return rc;
}

int load_open(struct ckpt *c, const char *path, enum load_matrices matrices, struct work *work,
              struct faults *f) {
    int rc = load_form(path, &c->form, f->err);
    if (rc != 0) return rc;
    if (c->form == FORM_SAFETENSORS) {
        return ERR(f->err, LILY_EINVAL,
                   "%s: found one safetensors file, expected a checkpoint folder; give the folder "
                   "that holds it, with its config.json",
                   path);
    }
    if (c->form == FORM_FOLDER) return open_folder(c, path, matrices, work, f);
    c->path = strdup(path);
    c->kind = "packed file";
    if (!c->path) return ERR_NOMEM(f->err, path);
    rc = packed_open(c, f);
    if (rc == 0 && c->weights.shape) rc = texts_check_template(&c->texts, path, f);
    return rc;
}

void load_close(struct ckpt *c) {
    texts_close(&c->texts);
    config_close(&c->config);
    catalog_close(&c->catalog);
    file_unmap(&c->packed);
    pool_free(&c->pool);
    folder_close(&c->folder);
    free(c->path);
    *c = (struct ckpt){0};
}

int ckpt_load(const char *path, const struct ckpt_options *options, struct ckpt **out,
              lily_err *err) {
    struct faults f = faults_for(options, err);
    struct work work = {0};
    if (options) {
        work.progress = options->progress;
        work.arg = options->progress_arg;
    }
    struct ckpt *c = calloc(1, sizeof *c);
    if (!c) return ERR_NOMEM(err, "checkpoint");
    bool keep = options && options->keep_bf16;
    int rc = load_open(c, path, keep ? LOAD_BF16 : LOAD_QUANTISED, &work, &f);
    if (rc == 0) identity_of(c, c->identity);
    if (rc != 0) {
        load_close(c);
        free(c);
        return rc;
    }
    *out = c;
    return 0;
}

void ckpt_free(struct ckpt *c) {
    if (!c) return;
    load_close(c);
    free(c);
}

const struct weights *ckpt_weights(const struct ckpt *c) {
    return &c->weights;
}

const char *ckpt_kind(const struct ckpt *c) {
    return c->kind;
}

const char *ckpt_path(const struct ckpt *c) {
    return c->path;
}

const char *ckpt_text(const struct ckpt *c, const char *name, size_t *size) {
    for (int i = 0; i < TEXT_COUNT; i++) {
        if (strcmp(text_file_name((enum text_file)i), name) != 0) continue;
        if (size) *size = c->texts.file[i].size;
        return c->texts.file[i].data;
    }
    if (size) *size = 0;
    return NULL;
}

const char *ckpt_identity(const struct ckpt *c) {
    return c->identity;
}
