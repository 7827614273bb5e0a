/* The embedded kernels. embed.sh lists every kernel file of every shape in one table that the
 * assembler puts into the program; a build without nvcc has an empty one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"

/* kernels.S: { shape, file, image }, ended by a NULL shape. */
struct embedded {
    const char *shape;
    const char *file;
    const void *image; /* a fatbin: machine code for some processors, PTX for later ones */
};
extern const struct embedded cuda_embedded[];

enum { MAX_MODULES = 24 };

struct cuda_modules {
    struct {
        const char *file;
        CUmodule module;
    } list[MAX_MODULES];
    int32_t n;
    int32_t stack; /* bytes, the most of a kernel that was asked for */
    bool any;      /* the driver finds kernels without a module */
};

bool cuda_kernels_embedded(const char *shape) {
    for (const struct embedded *e = cuda_embedded; e->shape; e++) {
        if (!shape || strcmp(e->shape, shape) == 0) return true;
    }
    return false;
}

static bool is_portable(const char *file) {
    return strncmp(file, "portable_", 9) == 0;
}

/* Files that are not portable hold code for sm_90a alone. */
static bool loads_on(const char *file, int32_t capability) {
    return is_portable(file) || capability == 90;
}

int cuda_modules_load(const struct cuda_driver *d, const struct shape *shape, int32_t capability,
                      struct cuda_modules **out, lily_err *err) {
    struct cuda_modules *m = calloc(1, sizeof *m);
    if (!m) return ERR_NOMEM(err, "CUDA kernels");
    for (const struct embedded *e = cuda_embedded; e->shape; e++) {
        if (strcmp(e->shape, shape->name) != 0 || !loads_on(e->file, capability)) continue;
        int rc = LILY_OK;
        if (m->n == MAX_MODULES) {
            rc = ERR(err, LILY_EBACKEND,
                     "CUDA: found more than %d kernel files, expected fewer; raise MAX_MODULES",
                     MAX_MODULES);
        }
        if (rc == LILY_OK) {
            rc = cuda_check(d, d->module_load(&m->list[m->n].module, e->image), e->file, err);
            /* Paths whose kernels are missing are left out at open. */
            if (rc != LILY_OK && !is_portable(e->file)) continue;
        }
        if (rc != LILY_OK) {
            cuda_modules_free(d, m);
            return rc;
        }
        m->list[m->n++].file = e->file;
    }
    *out = m;
    return LILY_OK;
}

int cuda_modules_any(struct cuda_modules **out, lily_err *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return ERR_NOMEM(err, "CUDA kernels");
    (*out)->any = true;
    return LILY_OK;
}

void cuda_modules_free(const struct cuda_driver *d, struct cuda_modules *modules) {
    if (!modules) return;
    for (int32_t i = 0; i < modules->n; i++) d->module_unload(modules->list[i].module);
    free(modules);
}

size_t cuda_modules_stack(const struct cuda_modules *modules) {
    return (size_t)modules->stack;
}

int cuda_function(const struct cuda_driver *d, struct cuda_modules *modules, const char *file,
                  const char *kernel, size_t shared, CUfunction *out, lily_err *err) {
    if (modules->any) return cuda_check(d, d->module_function(out, NULL, kernel), kernel, err);
    for (int32_t i = 0; i < modules->n; i++) {
        if (strcmp(modules->list[i].file, file) != 0) continue;
        int rc =
            cuda_check(d, d->module_function(out, modules->list[i].module, kernel), kernel, err);
        int stack = 0;
        if (rc == LILY_OK) {
            rc = cuda_check(d, d->func_get(&stack, CU_FUNC_LOCAL_BYTES, *out), kernel, err);
        }
        if (stack > modules->stack) modules->stack = stack;
        /* Beyond 48 KB only what was asked for. */
        if (rc == LILY_OK && shared > 48 * 1024) {
            rc = cuda_check(d, d->func_set(*out, CU_FUNC_MAX_DYNAMIC_SHARED, (int)shared), kernel,
                            err);
        }
        return rc;
    }
    return ERR(err, LILY_EBACKEND,
               "CUDA: found no kernels %s in the program, expected them; build it where nvcc is "
               "found (make deps)",
               file);
}
