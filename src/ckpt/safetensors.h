/* One .safetensors file: 8 bytes of header length (little endian), a JSON header, the tensors' data
 * end to end. Nothing is believed: the header's length, every dtype, shape and range is checked
 * against the file's real size before a pointer is handed out, and the last tensor must end exactly
 * where the file does, so that a file cut by a single byte is found.
 * Format: https://github.com/huggingface/safetensors (README, "Format"). */
#ifndef LILY_CKPT_SAFETENSORS_H
#define LILY_CKPT_SAFETENSORS_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

enum { ST_MAX_RANK = 8 };
/* The format's own bound on the header, 100 MB. */
#define ST_MAX_HEADER ((uint64_t)100000000)

/* name as spelled in the header, bytes of one element */
#define ST_DTYPE_MAP(XX)                                                                           \
    XX(BOOL, 1)                                                                                    \
    XX(U8, 1)                                                                                      \
    XX(I8, 1)                                                                                      \
    XX(F8_E4M3, 1)                                                                                 \
    XX(F8_E5M2, 1)                                                                                 \
    XX(F8_E8M0, 1)                                                                                 \
    XX(I16, 2)                                                                                     \
    XX(U16, 2)                                                                                     \
    XX(F16, 2)                                                                                     \
    XX(BF16, 2)                                                                                    \
    XX(I32, 4)                                                                                     \
    XX(U32, 4)                                                                                     \
    XX(F32, 4)                                                                                     \
    XX(C64, 8)                                                                                     \
    XX(I64, 8)                                                                                     \
    XX(U64, 8)                                                                                     \
    XX(F64, 8)

enum st_dtype {
#define ST_DTYPE_ENUM(name, bytes) ST_##name,
    ST_DTYPE_MAP(ST_DTYPE_ENUM)
#undef ST_DTYPE_ENUM
        ST_DTYPE_COUNT
};
const char *st_dtype_name(enum st_dtype dtype);

struct st_tensor {
    const char *name; /* owned by the file's header */
    enum st_dtype dtype;
    int rank;
    size_t dims[ST_MAX_RANK];
    const uint8_t *data; /* [bytes], at any alignment */
    size_t bytes;
};

struct st_file {
    json_t *header;            /* owned; holds the names */
    struct st_tensor *tensors; /* [n] owned, in order of their data */
    size_t n;
    size_t header_bytes; /* length field and header: where the data begins */
};

/* Parses and checks data[size], which must outlive *out. path names the file in messages. On
 * success the caller ends *out with st_close. */
int st_parse(const char *path, const uint8_t *data, size_t size, struct st_file *out,
             lily_err *err);
void st_close(struct st_file *f);

/* "[8192, 1, 4]" in out, cut to its size; returns out. */
const char *st_shape_text(const size_t *dims, int rank, char *out, size_t size);

#endif
