/* The packed file's reader: on any bytes, and on any directory under a right header, of a file as
 * long as a real one would be. An accepted file's pointers must all lie inside it. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ckpt/hash.h"
#include "ckpt/load.h"
#include "ckpt/packed.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_inside(const void *p, size_t n, const uint8_t *data, size_t size) {
    const uint8_t *at = p;
    if (at < data || at > data + size || n > (size_t)(data + size - at)) abort();
}

static void check_weights(const struct weights *w, const uint8_t *data, size_t size) {
    struct tensor_walk walk;
    tensor_walk_start(&walk, w->shape, w->layers);
    while (tensor_walk_next(&walk)) {
        const struct mat *m = tensor_mats(walk.role, w, walk.layer);
        int32_t rows = tensor_rows(walk.role, w->shape), cols = tensor_cols(walk.role, w->shape);
        for (int32_t i = 0; m && i < tensor_items(walk.role, w->shape); i++) {
            size_t groups = (size_t)rows * (size_t)(cols / 64);
            check_inside(m[i].data, (size_t)rows * mat_row_bytes(&m[i]), data, size);
            check_inside(m[i].scales, 2 * groups, data, size);
            check_inside(m[i].biases, 2 * groups, data, size);
        }
        const float *f = tensor_floats(walk.role, w, walk.layer);
        if (f) check_inside(f, 4 * (size_t)rows * (size_t)cols, data, size);
    }
}

static void check(const uint8_t *data, size_t size) {
    struct ckpt c = {.form = FORM_PACKED};
    c.path = strdup("fuzz");
    lily_err err = {0};
    struct faults f = {.err = &err};
    if (packed_open_bytes(&c, data, size, &f) == 0) {
        check_weights(&c.weights, data, size);
        for (int i = 0; i < TEXT_COUNT; i++) {
            if (c.texts.file[i].data) {
                check_inside(c.texts.file[i].data, c.texts.file[i].size, data, size);
            }
        }
    }
    load_close(&c);
}

/* Length of a file of mini's shape, from the directory's own claims; the reader must not trust it
 * either. Untouched pages of the mapping cost nothing. */
enum { FORGED_BYTES = 64 << 20 };

static void check_forged(const uint8_t *directory, size_t n, size_t claimed) {
    uint8_t *file = mmap(NULL, FORGED_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (file == MAP_FAILED) return;
    uint32_t version = PACKED_LAYOUT, length = (uint32_t)n;
    uint64_t size = claimed;
    memcpy(file, "LILYPACK", 8);
    memcpy(file + 8, &version, 4);
    memcpy(file + 12, &length, 4);
    memcpy(file + 16, &size, 8);
    memcpy(file + PACKED_FIXED, directory, n);
    struct hash *h = hash_new();
    hash_add(h, file, 24);
    hash_add(h, directory, n);
    char hex[HASH_HEX];
    hash_end_hex(h, hex);
    for (int i = 0; i < HASH_BYTES; i++) {
        char digits[3] = {hex[2 * i], hex[2 * i + 1], 0};
        file[24 + i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    check(file, claimed);
    munmap(file, FORGED_BYTES);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    check(data, size);
    /* The first three bytes choose the file's length, in steps of 64 bytes. */
    if (size < 3 || size > 1 << 20) return 0;
    size_t claimed = ((size_t)data[0] | (size_t)data[1] << 8 | (size_t)(data[2] & 15) << 16) * 64;
    size_t least = PACKED_FIXED + size - 3;
    check_forged(data + 3, size - 3, claimed < least ? least : claimed);
    return 0;
}
