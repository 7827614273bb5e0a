/* The text of a kernel library: embedded .metal files and their headers, put together for one shape
 * as the device's compiler takes it, which knows no include folders. */
#ifndef LILY_METAL_SOURCE_H
#define LILY_METAL_SOURCE_H

#include "base/buf.h"
#include "model/shape.h"

/* Every file of kernels/ and shape_common.h, ended by a NULL name (tools/metal_sources.sh). */
struct metal_source {
    const char *name; /* without folders: "decode_moe.metal" */
    const char *text;
};
extern const struct metal_source metal_sources[];

/* Appends to out: the shape as SHAPE_... macros, then the file with each #include "name" replaced,
 * once, by that file's text. Line numbers in the compiler's messages are those of the files. */
int metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                         lily_err *err);

#endif
