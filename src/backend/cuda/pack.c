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

/* n tiles side by side, row by row: memory is read in its own order. */
static void fill_wide(const struct row *rows, int32_t col, size_t n, char *tiles) {
    for (int32_t r = 0; r < TILE_WIDE_ROWS; r++) {
        const struct row *row = &rows[r];
        if (!row->bits) continue;
        const uint8_t *codes = row->codes + col / 2;
        char *tile = tiles;
        for (size_t i = 0; i < n; i++, tile += TILE_WIDE_BYTES) {
            int32_t group = col / 64 + 2 * (int32_t)i;
            memcpy(tile + tile_wide_codes(r, 0), codes + i * (TILE_WIDE_COLS / 2),
                   TILE_WIDE_COLS / 2);
            put_factors(row, group, tile + tile_wide_scale(r, 0));
            put_factors(row, group + 1, tile + tile_wide_scale(r, 1));
        }
    }
}

static void fill_down(const struct row *rows, int32_t col, char *tile) {
    for (int32_t r = 0; r < TILE_DOWN_ROWS; r++) {
        const struct row *row = &rows[r];
        if (!row->bits) continue;
        uint32_t eights[TILE_DOWN_COLS / 8];
        memcpy(eights, row->codes + col / 2, sizeof eights);
        for (int32_t i = 0; i < TILE_DOWN_COLS / 8; i++) {
            memcpy(tile + tile_down_codes(r, 8 * i), &eights[i], sizeof *eights);
        }
        put_factors(row, col / 64, tile + tile_down_scale(r));
    }
}

/* Codes of 4 bits as bytes: the same values with the same scales and biases. */
static void fill_bytes(const struct row *rows, int32_t col, char *tile) {
    for (int32_t r = 0; r < TILE_BYTE_ROWS; r++) {
        const struct row *row = &rows[r];
        if (!row->bits) continue;
        for (int32_t k = 0; k < TILE_BYTE_COLS; k++) {
            int32_t at = col + k;
            int code = row->bits == 8 ? row->codes[at] : row->codes[at / 2] >> (4 * (k & 1)) & 15;
            tile[tile_byte_codes(r, k)] = (char)code;
        }
        for (int32_t g = 0; g < 2; g++)
            put_factors(row, col / 64 + g, tile + tile_byte_scale(r, g));
    }
}

/* The rows of one row of tiles. */
struct tile_rows {
    size_t number;
    bool known;
    struct row row[TILE_DOWN_ROWS];
};

/* Tiles [index, index + most) or fewer of them, of one row of tiles; how many. */
static size_t fill_tiles(const struct cuda_tiles *t, size_t index, size_t most,
                         struct tile_rows *rows, char *out) {
    struct tile_size size = size_of(t->layout);
    size_t row_tiles = (size_t)row_tiles_of(t), slices = (size_t)(t->cols / size.cols);
    size_t number = t->slices ? index % row_tiles : index / slices;
    size_t slice = t->slices ? index / row_tiles : index % slices, n = 1;
    int32_t first = (int32_t)number * size.rows, col = (int32_t)slice * size.cols;
    if (!rows->known || rows->number != number) {
        for (int32_t r = 0; r < size.rows; r++) rows->row[r] = row_of(t, first + r);
        rows->number = number;
        rows->known = true;
    }
    if (t->layout == CUDA_WIDE && !t->slices) n = most < slices - slice ? most : slices - slice;
    if (first + size.rows > t->rows) memset(out, 0, n * size.bytes);
    if (t->layout == CUDA_DOWN) {
        fill_down(rows->row, col, out);
    } else if (t->layout == CUDA_BYTE) {
        fill_bytes(rows->row, col, out);
    } else {
        fill_wide(rows->row, col, n, out);
    }
    return n;
}

_Static_assert((int)TILE_DOWN_BYTES >= (int)TILE_WIDE_BYTES &&
                   (int)TILE_DOWN_BYTES >= (int)TILE_BYTE_BYTES &&
                   (int)TILE_DOWN_ROWS >= (int)TILE_WIDE_ROWS,
               "tiles of down have room for any");

void cuda_tiles_fill(const struct cuda_tiles *t, size_t begin, size_t end, char *out) {
    size_t bytes = size_of(t->layout).bytes;
    struct tile_rows rows = {.known = false};
    while (begin < end) {
        size_t index = begin / bytes, at = begin % bytes, left = end - begin, n;
        if (at == 0 && left >= bytes) {
            n = bytes * fill_tiles(t, index, left / bytes, &rows, out);
        } else { /* cut by the end of a chunk */
            char whole[TILE_DOWN_BYTES];
            fill_tiles(t, index, 1, &rows, whole);
            n = bytes - at < left ? bytes - at : left;
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
