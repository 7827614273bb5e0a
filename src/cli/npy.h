/* NumPy's .npy file, version 1.0, written row by row: a float32 matrix whose row count is known at
 * the start. The file appears complete or not at all.
 * Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html */
#ifndef LILY_CLI_NPY_H
#define LILY_CLI_NPY_H

#include <stddef.h>

#include "base/err.h"

struct npy_writer;
int npy_open(const char *path, size_t rows, size_t columns, struct npy_writer **out, lily_err *err);
int npy_row(struct npy_writer *w, const float *row, lily_err *err); /* row[columns] */
/* Exactly one of these ends a writer. commit fails when rows are missing. */
int npy_commit(struct npy_writer *w, lily_err *err);
void npy_abort(struct npy_writer *w); /* NULL is fine */

#endif
