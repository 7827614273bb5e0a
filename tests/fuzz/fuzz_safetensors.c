/* The safetensors reader on any bytes. An accepted file must keep its promises: every tensor's data
 * inside the file, end to end. */
#include <stdlib.h>

#include "ckpt/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned sum;

static void check(const uint8_t *data, size_t size) {
    struct st_file f;
    lily_err err;
    if (st_parse("fuzz", data, size, &f, &err) != 0) return;
    const uint8_t *at = data + f.header_bytes;
    for (size_t i = 0; i < f.n; i++) {
        const struct st_tensor *t = &f.tensors[i];
        if (t->data != at || t->bytes > (size_t)(data + size - at)) abort();
        for (size_t j = 0; j < t->bytes; j += 97) sum += t->data[j];
        at += t->bytes;
    }
    if (at != data + size) abort();
    st_close(&f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    check(data, size);
    /* The same bytes as a header of the right length, followed by 64 bytes of data. */
    if (size > 4096) return 0;
    uint8_t *file = calloc(1, size + 72);
    if (!file) return 0;
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)size >> (8 * i));
    for (size_t i = 0; i < size; i++) file[8 + i] = data[i];
    check(file, size + 72);
    free(file);
    return 0;
}
