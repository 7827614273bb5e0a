#include "ckpt/folder.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

#ifdef LILY_EMBEDDED_STANDIN
/* The labels of embedded.S: the same files in the same order. */
#define EMBEDDED_FILES(XX)                                                                         \
    XX(embedded_config, "config.json")                                                             \
    XX(embedded_index, "model.safetensors.index.json")                                             \
    XX(embedded_model, "model.safetensors")                                                        \
    XX(embedded_tokenizer, "tokenizer.json")                                                       \
    XX(embedded_tokenizer_config, "tokenizer_config.json")                                         \
    XX(embedded_generation_config, "generation_config.json")

#define EMBEDDED_LABELS(label, name) extern const uint8_t label##_begin[], label##_end[];
EMBEDDED_FILES(EMBEDDED_LABELS)
#undef EMBEDDED_LABELS

static const struct {
    const char *name;
    const uint8_t *begin, *end;
} embedded[] = {
#define EMBEDDED_ROW(label, name) {name, label##_begin, label##_end},
    EMBEDDED_FILES(EMBEDDED_ROW)
#undef EMBEDDED_ROW
};

static bool embedded_find(const char *name, struct file_map *out) {
    for (size_t i = 0; i < sizeof embedded / sizeof *embedded; i++) {
        if (strcmp(embedded[i].name, name) != 0) continue;
        *out = (struct file_map){.data = embedded[i].begin,
                                 .size = (size_t)(embedded[i].end - embedded[i].begin)};
        return true;
    }
    return false;
}

static bool embedded_present(void) {
    return true;
}
#else
static bool embedded_find(const char *name, struct file_map *out) {
    (void)name;
    (void)out;
    return false;
}

static bool embedded_present(void) {
    return false;
}
#endif

/* The directory the running program lies in, in out[PATH_MAX]. */
static bool program_directory(char *out) {
#ifdef __APPLE__
    uint32_t size = PATH_MAX;
    char raw[PATH_MAX];
    if (_NSGetExecutablePath(raw, &size) != 0 || !realpath(raw, out)) return false;
#else
    ssize_t n = readlink("/proc/self/exe", out, PATH_MAX - 1);
    if (n <= 0) return false;
    out[n] = 0;
#endif
    char *slash = strrchr(out, '/');
    if (!slash) return false;
    *slash = 0;
    return true;
}

/* An installed program has its models beside it, a built one two levels up (build/release). */
static char *find_beside_program(void) {
    static const char *const places[] = {"models/mini", "../models/mini", "../../models/mini"};
    char directory[PATH_MAX], path[PATH_MAX + 32], file[PATH_MAX + 64];
    if (!program_directory(directory)) return NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, places[i]);
        snprintf(file, sizeof file, "%s/model.safetensors", path);
        if (file_exists(file)) return realpath(path, NULL);
    }
    return NULL;
}

int folder_open(const char *path, struct folder *out, lily_err *err) {
    *out = (struct folder){0};
    if (path) {
        if (!file_is_dir(path)) {
            return ERR(err, LILY_EINVAL,
                       "%s: found a file, expected a folder; give the folder that holds it", path);
        }
        out->path = strdup(path);
    } else if (embedded_present()) {
        out->embedded = true;
        out->path = strdup("(embedded)");
    } else {
        out->path = find_beside_program();
        if (!out->path) {
            return ERR(err, LILY_ENOENT,
                       "stand-in: this build has no embedded stand-in and no models/mini lies "
                       "beside the program; give a checkpoint with -m");
        }
    }
    return out->path ? 0 : ERR_NOMEM(err, "checkpoint folder");
}

void folder_close(struct folder *f) {
    free(f->path);
    *f = (struct folder){0};
}

char *folder_join(const struct folder *f, const char *name) {
    size_t n = strlen(f->path) + strlen(name) + 2;
    char *path = malloc(n);
    if (path) snprintf(path, n, "%s/%s", f->path, name);
    return path;
}

bool folder_has(const struct folder *f, const char *name) {
    struct file_map map;
    if (f->embedded) return embedded_find(name, &map);
    char *path = folder_join(f, name);
    struct stat st;
    bool has = path && lstat(path, &st) == 0;
    free(path);
    return has;
}

int folder_map(const struct folder *f, const char *name, struct file_map *out, lily_err *err) {
    *out = (struct file_map){0};
    if (f->embedded) {
        if (embedded_find(name, out)) return 0;
        return ERR(err, LILY_ENOENT, "(embedded)/%s: not part of the embedded stand-in", name);
    }
    char *path = folder_join(f, name);
    if (!path) return ERR_NOMEM(err, name);
    int rc = file_map_open(path, out, err);
    free(path);
    return rc;
}
