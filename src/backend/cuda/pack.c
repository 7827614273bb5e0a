/* Matrices of a checkpoint as tiles (kernels/tile.h), made on the way to the device: every weight
 * is on the card once, where the decode kernel's bulk copies want it. */
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/tile.h"

struct tile_size {
    int32_t rows, cols;
    size_t bytes;
};

static struct tile_size size_of(enum cuda_layout layout) {
    if (layout == CUDA_DOWN) {
        return (struct tile_size){TILE_DOWN_ROWS, TILE_DOWN_COLS, TILE_DOWN_BYTES};
    }
    if (layout == CUDA_BYTE) {
        return (struct tile_size){TILE_BYTE_ROWS, TILE_BYTE_COLS, TILE_BYTE_BYTES};
    }
    return (struct tile_size){TILE_WIDE_ROWS, TILE_WIDE_COLS, TILE_WIDE_BYTES};
}

static int32_t row_tiles_of(const struct cuda_tiles *t) {
    int32_t rows = size_of(t->layout).rows;
    return (t->rows + rows - 1) / rows;
}

size_t cuda_tiles_bytes(const struct cuda_tiles *t) {
    struct tile_size size = size_of(t->layout);
    return (size_t)row_tiles_of(t) * (size_t)(t->cols / size.cols) * size.bytes;
}

/* A row as the checkpoint has it; bits 0: there is none. */
struct row {
    const uint8_t *codes;
    const uint16_t *scales, *biases;
    int32_t bits;
};

static struct row row_of(const struct cuda_tiles *t, int32_t r) {
    if (r >= t->rows) return (struct row){0};
    int32_t i = t->in_turns ? r % t->n : 0;
    if (t->in_turns) {
        r /= t->n;
    } else {
        while (r >= t->from[i]->rows) r -= t->from[i++]->rows;
    }
    const struct mat *m = t->from[i];
    size_t groups = (size_t)r * (size_t)(m->cols / 64);
    return (struct row){m->data + (size_t)r * mat_row_bytes(m), m->scales + groups,
                        m->biases + groups, m->bits};
}

static void put_factors(const struct row *row, int32_t group, char *to) {
    uint32_t pair = row->scales[group] | (uint32_t)row->biases[group] << 16;
    memcpy(to, &pair, sizeof pair);
}

static void fill_wide(const struct cuda_tiles *t, int32_t first, int32_t col, char *tile) {
    for (int32_t r = 0; r < TILE_WIDE_ROWS; r++) {
        struct row row = row_of(t, first + r);
        if (!row.bits) continue;
        memcpy(tile + tile_wide_codes(r, 0), row.codes + col / 2, TILE_WIDE_COLS / 2);
        for (int32_t g = 0; g < 2; g++)
            put_factors(&row, col / 64 + g, tile + tile_wide_scale(r, g));
    }
}

static void fill_down(const struct cuda_tiles *t, int32_t first, int32_t col, char *tile) {
    for (int32_t r = 0; r < TILE_DOWN_ROWS; r++) {
        struct row row = row_of(t, first + r);
        if (!row.bits) continue;
        for (int32_t k = 0; k < TILE_DOWN_COLS; k += 8) {
            memcpy(tile + tile_down_codes(r, k), row.codes + (col + k) / 2, 4);
        }
        put_factors(&row, col / 64, tile + tile_down_scale(r));
    }
}

/* Codes of 4 bits as bytes: the same values with the same scales and biases. */
static void fill_bytes(const struct cuda_tiles *t, int32_t first, int32_t col, char *tile) {
    for (int32_t r = 0; r < TILE_BYTE_ROWS; r++) {
        struct row row = row_of(t, first + r);
        if (!row.bits) continue;
        for (int32_t k = 0; k < TILE_BYTE_COLS; k++) {
            uint8_t code =
                row.bits == 8 ? row.codes[col + k] : row.codes[(col + k) / 2] >> (4 * (k & 1)) & 15;
            memcpy(tile + tile_byte_codes(r, k), &code, 1);
        }
        for (int32_t g = 0; g < 2; g++)
            put_factors(&row, col / 64 + g, tile + tile_byte_scale(r, g));
    }
}

static void fill_tile(const struct cuda_tiles *t, size_t index, char *tile) {
    struct tile_size size = size_of(t->layout);
    size_t row_tiles = (size_t)row_tiles_of(t), slices = (size_t)(t->cols / size.cols);
    size_t row = t->slices ? index % row_tiles : index / slices;
    size_t slice = t->slices ? index / row_tiles : index % slices;
    int32_t first = (int32_t)row * size.rows, col = (int32_t)slice * size.cols;
    if (first + size.rows > t->rows) memset(tile, 0, size.bytes);
    if (t->layout == CUDA_DOWN) {
        fill_down(t, first, col, tile);
    } else if (t->layout == CUDA_BYTE) {
        fill_bytes(t, first, col, tile);
    } else {
        fill_wide(t, first, col, tile);
    }
}

void cuda_tiles_fill(const struct cuda_tiles *t, size_t begin, size_t end, char *out) {
    size_t bytes = size_of(t->layout).bytes;
    while (begin < end) {
        size_t index = begin / bytes, at = begin % bytes;
        size_t n = bytes - at < end - begin ? bytes - at : end - begin;
        if (n == bytes) {
            fill_tile(t, index, out);
        } else { /* cut by the end of a chunk */
            char whole[TILE_DOWN_BYTES];
            fill_tile(t, index, whole);
            memcpy(out, whole + at, n);
        }
        begin += n;
        out += n;
    }
}

struct cuda_mat cuda_planar_mat(int32_t rows, int32_t cols, int32_t bits) {
    return (struct cuda_mat){.rows = rows,
                             .cols = cols,
                             .bits = bits,
                             .layout = CUDA_PLANAR,
                             .code_pair = 16 * bits,
                             .code_group = 8 * bits,
                             .factor_pair = 2,
                             .factor_group = 1};
}

struct cuda_mat cuda_tiles_mat(const struct cuda_tiles *t, CUdeviceptr at) {
    struct tile_size size = size_of(t->layout);
    int32_t bytes = (int32_t)size.bytes, next_rows = bytes * (t->cols / size.cols), next = bytes;
    if (t->slices) next_rows = bytes, next = bytes * row_tiles_of(t);
    struct cuda_mat out = {.codes = at,
                           .scales = at + TILE_CODES,
                           .biases = at + TILE_CODES + 2,
                           .rows = t->rows,
                           .cols = t->cols,
                           .bits = t->layout == CUDA_BYTE ? 8 : 4,
                           .layout = t->layout,
                           .row_tiles = next_rows,
                           .doubled = t->in_turns,
                           .code_pair = next,
                           .code_group = 32,
                           .factor_pair = next / 2,
                           .factor_group = 4};
    if (t->layout == CUDA_DOWN) { /* 32 inputs a tile, and a group's factors in both of its two */
        out.code_pair = 4 * next;
        out.code_group = 2 * next;
        out.factor_pair = 2 * next;
        out.factor_group = next;
    }
    return out;
}
