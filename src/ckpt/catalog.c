#include "ckpt/catalog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/json.h"

static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";

/* Adds the shard, mapped and parsed. A damaged one is a fault and is left out. */
static int add_shard(struct catalog *c, const char *name, char *path, struct file_map map,
                     struct faults *f) {
    struct catalog_shard *s = &c->shards[c->n_shards];
    *s = (struct catalog_shard){.name = strdup(name), .path = path, .map = map};
    lily_err err = {0};
    int rc = s->name && path ? st_parse(path, map.data, map.size, &s->file, &err)
                             : ERR_NOMEM(&err, name);
    if (rc == 0) {
        c->n_shards++;
        return 0;
    }
    free(s->name);
    free(s->path);
    file_unmap(&s->map);
    c->damaged = true;
    return fault_from(f, rc, &err);
}

static int open_shard(struct catalog *c, const struct folder *folder, const char *name,
                      struct faults *f) {
    struct file_map map;
    lily_err err = {0};
    int rc = folder_map(folder, name, &map, &err);
    if (rc == 0) return add_shard(c, name, folder_join(folder, name), map, f);
    c->damaged = true;
    if (rc == LILY_ENOENT) {
        return fault(f, rc,
                     "%s/%.120s: found no such file, expected a shard that %s names; download the "
                     "missing shard",
                     folder->path, name, index_name);
    }
    return fault_from(f, rc, &err);
}

static int by_name(const void *a, const void *b) {
    const struct catalog_entry *x = a, *y = b;
    return strcmp(x->tensor->name, y->tensor->name);
}

/* Gathers the shards' tensors into one sorted list; a name in two shards is a fault. */
static int build_entries(struct catalog *c, struct faults *f) {
    size_t total = 0;
    for (size_t i = 0; i < c->n_shards; i++) total += c->shards[i].file.n;
    c->entries = calloc(total + 1, sizeof *c->entries);
    if (!c->entries) return ERR_NOMEM(f->err, "tensor list");
    for (size_t i = 0; i < c->n_shards; i++) {
        struct st_file *file = &c->shards[i].file;
        for (size_t j = 0; j < file->n; j++) {
            c->entries[c->n++] = (struct catalog_entry){&file->tensors[j], &c->shards[i], false};
        }
    }
    qsort(c->entries, c->n, sizeof *c->entries, by_name);
    for (size_t i = 1; i < c->n; i++) {
        if (by_name(&c->entries[i - 1], &c->entries[i]) != 0) continue;
        int rc = fault(f, LILY_EFORMAT,
                       "%s: tensor %.120s: found it in %.80s too, expected every name once; "
                       "download the checkpoint again",
                       c->entries[i].shard->path, c->entries[i].tensor->name,
                       c->entries[i - 1].shard->name);
        if (rc != 0) return rc;
    }
    return 0;
}

/* A shard lies in the folder itself: nothing in an index may name a file elsewhere. */
static bool plain_file_name(const char *name) {
    return name && *name && *name != '.' && !strchr(name, '/') && strlen(name) < 200;
}

static int open_indexed_shards(struct catalog *c, const struct folder *folder, const char *path,
                               json_t *map, struct faults *f) {
    json_t *seen = json_object();
    if (!seen) return ERR_NOMEM(f->err, path);
    const char *tensor;
    json_t *value;
    int rc = 0;
    json_object_foreach(map, tensor, value) {
        const char *name = json_string_value(value);
        if (!plain_file_name(name)) {
            rc = fault(f, LILY_EFORMAT,
                       "%s: tensor %.120s: found no plain file name, expected the name of a shard "
                       "in this folder; download the index again",
                       path, tensor);
        } else if (!json_object_get(seen, name)) {
            void *grown = realloc(c->shards, (c->n_shards + 1) * sizeof *c->shards);
            if (grown) c->shards = grown;
            if (!grown || json_object_set_new(seen, name, json_true()) != 0) {
                rc = ERR_NOMEM(f->err, path);
            } else {
                rc = open_shard(c, folder, name, f);
            }
        }
        if (rc != 0) break;
    }
    json_decref(seen);
    return rc;
}

/* Every tensor lies where the index says, and the index knows every tensor of its shards. */
static int check_index(struct catalog *c, const char *path, json_t *map, struct faults *f) {
    const char *name;
    json_t *value;
    int rc = 0;
    json_object_foreach(map, name, value) {
        const char *shard = json_string_value(value);
        const struct catalog_entry *e = catalog_find(c, name);
        if (!shard || (!e && c->damaged) || (e && strcmp(e->shard->name, shard) == 0)) continue;
        rc = fault(f, LILY_EFORMAT,
                   "%s: tensor %.120s: found %s%.80s, expected it in %.80s; download shards and "
                   "index of one revision",
                   path, name, e ? "it in " : "no such tensor", e ? e->shard->name : "", shard);
        if (rc != 0) return rc;
    }
    for (size_t i = 0; i < c->n; i++) {
        if (json_object_get(map, c->entries[i].tensor->name)) continue;
        rc = fault(f, LILY_EFORMAT,
                   "%s: tensor %.120s: found it in the file only, expected it in %s too; download "
                   "shards and index of one revision",
                   c->entries[i].shard->path, c->entries[i].tensor->name, index_name);
        if (rc != 0) return rc;
    }
    return 0;
}

static int open_by_index(struct catalog *c, const struct folder *folder, struct faults *f) {
    char *path = folder_join(folder, index_name);
    if (!path) return ERR_NOMEM(f->err, index_name);
    struct file_map text = {0};
    json_t *root = NULL;
    lily_err err = {0};
    int rc = folder_map(folder, index_name, &text, &err);
    if (rc == 0) rc = json_parse_object(path, (const char *)text.data, text.size, &root, &err);
    json_t *map = json_object_get(root, "weight_map");
    if (rc == 0 && !json_is_object(map)) {
        rc = ERR(&err, LILY_EFORMAT,
                 "%s: found no weight_map, expected an object from tensor names to shards; "
                 "download the index again",
                 path);
    }
    if (rc != 0) {
        c->damaged = true;
        rc = fault_from(f, rc, &err);
    } else {
        rc = open_indexed_shards(c, folder, path, map, f);
        if (rc == 0) rc = build_entries(c, f);
        if (rc == 0) rc = check_index(c, path, map, f);
    }
    json_decref(root);
    file_unmap(&text);
    free(path);
    return rc;
}

static int open_single(struct catalog *c, char *path, struct file_map map, struct faults *f) {
    c->shards = calloc(1, sizeof *c->shards);
    if (!c->shards) {
        file_unmap(&map);
        free(path);
        return ERR_NOMEM(f->err, single_name);
    }
    int rc = add_shard(c, single_name, path, map, f);
    return rc == 0 ? build_entries(c, f) : rc;
}

int catalog_open(const struct folder *folder, struct catalog *out, struct faults *f) {
    *out = (struct catalog){0};
    int rc;
    if (folder_has(folder, index_name)) {
        rc = open_by_index(out, folder, f);
    } else {
        struct file_map map;
        lily_err err = {0};
        rc = folder_map(folder, single_name, &map, &err);
        if (rc == 0) {
            rc = open_single(out, folder_join(folder, single_name), map, f);
        } else {
            out->damaged = true;
            rc = rc == LILY_ENOENT
                     ? fault(f, rc,
                             "%s: found neither %s nor %s, expected a checkpoint folder; check the "
                             "path, or download the missing file",
                             folder->path, index_name, single_name)
                     : fault_from(f, rc, &err);
        }
    }
    if (rc != 0) catalog_close(out);
    return rc;
}

int catalog_open_file(const char *path, struct catalog *out, struct faults *f) {
    *out = (struct catalog){0};
    struct file_map map;
    int rc = file_map_open(path, &map, f->err);
    if (rc == 0) rc = open_single(out, strdup(path), map, f);
    if (rc != 0) catalog_close(out);
    return rc;
}

void catalog_close(struct catalog *c) {
    for (size_t i = 0; i < c->n_shards; i++) {
        st_close(&c->shards[i].file);
        file_unmap(&c->shards[i].map);
        free(c->shards[i].name);
        free(c->shards[i].path);
    }
    free(c->shards);
    free(c->entries);
    *c = (struct catalog){0};
}

struct catalog_entry *catalog_find(const struct catalog *c, const char *name) {
    size_t low = 0, high = c->n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int order = strcmp(c->entries[mid].tensor->name, name);
        if (order == 0) return &c->entries[mid];
        if (order < 0) {
            low = mid + 1;
        } else {
            high = mid;
        }
    }
    return NULL;
}

const struct catalog_entry *catalog_locate(const struct catalog *c, const uint8_t *address) {
    for (size_t i = 0; i < c->n; i++) {
        const struct st_tensor *t = c->entries[i].tensor;
        if (address >= t->data && address < t->data + t->bytes) return &c->entries[i];
    }
    return NULL;
}
