#include "cli/npy.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/file.h"

struct npy_writer {
    struct file_writer *file;
    size_t rows, columns, written;
};

enum { NPY_ALIGN = 64, NPY_MAGIC = 10 /* magic, version, header length */ };

/* The header is padded with spaces so that the data begins on a multiple of 64 bytes. */
static int write_header(struct npy_writer *w, lily_err *err) {
    const uint16_t probe = 1;
    const char order = *(const char *)&probe ? '<' : '>';
    char head[256];
    int text = snprintf(head + NPY_MAGIC, sizeof head - NPY_MAGIC,
                        "{'descr': '%cf4', 'fortran_order': False, 'shape': (%zu, %zu), }", order,
                        w->rows, w->columns);
    size_t used = NPY_MAGIC + (size_t)text;
    size_t total = (used + 1 + NPY_ALIGN - 1) / NPY_ALIGN * NPY_ALIGN;
    memset(head + used, ' ', total - used);
    head[total - 1] = '\n';
    memcpy(head, "\x93NUMPY\x01\x00", 8);
    head[8] = (char)((total - NPY_MAGIC) & 0xff); /* little-endian */
    head[9] = (char)((total - NPY_MAGIC) >> 8);
    return file_writer_write(w->file, head, total, err);
}

int npy_open(const char *path, size_t rows, size_t columns, struct npy_writer **out,
             lily_err *err) {
    size_t bytes;
    if (!size_mul(rows, columns, &bytes) || !size_mul(bytes, sizeof(float), &bytes))
        return ERR(err, LILY_EINVAL, "%s: %zu x %zu values are too many", path, rows, columns);
    struct npy_writer *w = calloc(1, sizeof *w);
    if (!w) return ERR_NOMEM(err, path);
    *w = (struct npy_writer){.rows = rows, .columns = columns};
    int rc = file_writer_open(path, &w->file, err);
    if (rc) {
        free(w);
        return rc;
    }
    rc = write_header(w, err);
    if (rc) {
        npy_abort(w);
        return rc;
    }
    *out = w;
    return LILY_OK;
}

/* Rows go out as they come: a vocabulary times a book does not fit memory. */
int npy_row(struct npy_writer *w, const float *row, lily_err *err) {
    if (w->written == w->rows)
        return ERR(err, LILY_EINVAL, "npy: found more than the %zu rows announced", w->rows);
    w->written++;
    return file_writer_write(w->file, row, w->columns * sizeof *row, err);
}

/* A file with fewer rows than its header says would be read as damaged: it does not appear. */
int npy_commit(struct npy_writer *w, lily_err *err) {
    if (w->written != w->rows) {
        size_t rows = w->rows, written = w->written;
        npy_abort(w);
        return ERR(err, LILY_EINVAL, "npy: found %zu rows, expected %zu", written, rows);
    }
    int rc = file_writer_commit(w->file, err);
    free(w);
    return rc;
}

void npy_abort(struct npy_writer *w) {
    if (!w) return;
    file_writer_abort(w->file);
    free(w);
}
