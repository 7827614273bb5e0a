#include "backend/metal/source.h"

#include <string.h>

enum { MOST_FILES = 64 };

struct assembly {
    struct buf *out;
    bool included[MOST_FILES];
    bool whole; /* memory sufficed */
};

static int32_t find(const char *name, size_t n) {
    for (int32_t i = 0; i < MOST_FILES && metal_sources[i].name; i++) {
        if (strlen(metal_sources[i].name) == n && memcmp(metal_sources[i].name, name, n) == 0) {
            return i;
        }
    }
    return -1;
}

/* The file name in `#include "folder/name"`, or NULL. */
static const char *included_name(const char *line, size_t n, size_t *name_bytes) {
    static const char start[] = "#include \"";
    const size_t prefix = sizeof start - 1;
    if (n <= prefix || memcmp(line, start, prefix) != 0) return NULL;
    const char *name = line + prefix;
    const char *end = memchr(name, '"', n - prefix);
    if (!end) return NULL;
    for (const char *c = name; c < end; c++) {
        if (*c == '/') name = c + 1;
    }
    *name_bytes = (size_t)(end - name);
    return name;
}

static void append(struct assembly *a, const char *text, size_t n) {
    a->whole = a->whole && buf_append(a->out, text, n);
}

/* Depth is bounded: each file is taken once. */
static int append_file(struct assembly *a, int32_t file, lily_err *err) {
    const char *line = metal_sources[file].text;
    a->included[file] = true;
    a->whole = a->whole && buf_printf(a->out, "#line 1 \"%s\"\n", metal_sources[file].name);
    for (int number = 1; *line; number++) {
        size_t n = strcspn(line, "\n"), name_bytes = 0;
        const char *name = included_name(line, n, &name_bytes);
        if (!name) {
            append(a, line, n);
            append(a, "\n", 1);
        } else {
            int32_t found = find(name, name_bytes);
            if (found < 0) {
                return ERR(err, LILY_EBACKEND,
                           "%s:%d: found an include of %.*s, expected a file of "
                           "src/backend/metal/kernels; build again",
                           metal_sources[file].name, number, (int)name_bytes, name);
            }
            int rc = a->included[found] ? LILY_OK : append_file(a, found, err);
            if (rc != LILY_OK) return rc;
            a->whole = a->whole && buf_printf(a->out, "#line %d \"%s\"\n", number + 1,
                                              metal_sources[file].name);
        }
        line += n + (line[n] == '\n');
    }
    return LILY_OK;
}

static void append_shape(struct assembly *a, const struct shape *s) {
    const struct {
        const char *name;
        int32_t value;
    } numbers[] = {{"HIDDEN", s->hidden},
                   {"LAYERS", s->layers},
                   {"VOCAB", s->vocab},
                   {"Q_HEADS", s->q_heads},
                   {"KV_HEADS", s->kv_heads},
                   {"HEAD_DIM", s->head_dim},
                   {"ROTARY_DIM", s->rotary_dim},
                   {"GDN_K_HEADS", s->gdn_k_heads},
                   {"GDN_V_HEADS", s->gdn_v_heads},
                   {"EXPERTS", s->experts},
                   {"EXPERT_WIDTH", s->expert_width},
                   {"SHARED_WIDTH", s->shared_width},
                   {"MAX_CONTEXT", s->max_context}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        a->whole = a->whole &&
                   buf_printf(a->out, "#define SHAPE_%s %d\n", numbers[i].name, numbers[i].value);
    }
}

int metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                         lily_err *err) {
    static const char common[] = "shape_common.h";
    struct assembly a = {.out = out, .whole = true};
    int32_t shared = find(common, sizeof common - 1), main_file = find(file, strlen(file));
    if (shared < 0 || main_file < 0) {
        return ERR(err, LILY_EBACKEND, "%s: found no such kernel file in this program; build again",
                   shared < 0 ? common : file);
    }
    append_shape(&a, shape);
    int rc = append_file(&a, shared, err);
    if (rc == LILY_OK) rc = append_file(&a, main_file, err);
    if (rc == LILY_OK && !a.whole) rc = ERR_NOMEM(err, "Metal library");
    return rc;
}
