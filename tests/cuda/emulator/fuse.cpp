/* Router times output projection (decode_fuse.cu) on a processor, against sums in double. */
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emulator.h"

#include "prefill_device.h"

#include "backend/cuda/kernels/decode_fuse.cu"
using namespace decode;

static uint64_t state = 1;
static uint32_t random_bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 32);
}

/* A bfloat16 scale of either sign and a bias that centres codes up to `span`. */
static uint32_t random_factors(int span) {
    float scale = (float)((0.5 + random_bits() * 0x1p-32) / span);
    if (random_bits() & 1) scale = -scale;
    uint32_t low = __float_as_uint(scale) >> 16, high = __float_as_uint(-scale * span / 2) >> 16;
    return low | high << 16;
}

static uint8_t *random_tiles(size_t n, int bytes, int span) {
    uint8_t *at = take<uint8_t>(n * (size_t)bytes);
    for (size_t i = 0; i < n * (size_t)bytes; i += 4) {
        bool code = i % (size_t)bytes < TILE_CODES;
        *(uint32_t *)(at + i) = code ? random_bits() : random_factors(span);
    }
    return at;
}

/* Row e of what scores are made of: what each of 128 inputs of the slice adds. */
static void plain(const uint8_t *router, const float *norm, const uint8_t *out, int e,
                  double (&sum)[TILE_SCORE_COLS]) {
    for (double &x : sum) x = 0;
    for (int h = 0; h < H; h++, out += h % 32 == 0 ? TILE_WIDE_BYTES : 0) {
        double left = (double)router_weight(router, e, h) * norm[h];
        for (int k = 0; k < TILE_SCORE_COLS; k += 4) {
            float4 x = out_weights(out, h % 32, k);
            const float four[4] = {x.x, x.y, x.z, x.w};
            for (int i = 0; i < 4; i++) sum[k + i] += left * four[i];
        }
    }
}

/* The largest difference, in units of a code, of the tiles of one slice of the two that are made.
 */
static double difference(const uint8_t *router, const float *norm, const uint8_t *out,
                         const uint8_t *scores) {
    double most = 0;
    for (int e = 0; e < EXPERTS; e++) {
        double truth[TILE_SCORE_COLS];
        plain(router, norm, out, e, truth);
        int row = e % SCORE_ROWS, r = row % TILE_SCORE_ROWS;
        const uint8_t *tile =
            scores +
            (size_t)(e / SCORE_ROWS * SCORE_TILES + row / TILE_SCORE_ROWS) * TILE_SCORE_BYTES;
        for (int k = 0; k < TILE_SCORE_COLS; k++) {
            const uint8_t *code = tile + tile_score_codes(r, k);
            float scale = *(const float *)(tile + tile_score_scale(r, k / 64));
            double found = ((int8_t)code[0] * 256 + code[TILE_SCORE_PLANE]) * (double)scale;
            double off = fabs(found - truth[k]) / scale;
            if (!(off <= most)) most = off;
        }
    }
    return most;
}

int main() {
    start();
    const int slices = 2, row_tiles_of_out = H / TILE_WIDE_ROWS;
    uint8_t *router = random_tiles((size_t)ROUTER_TILES * SLICES, TILE_BYTE_BYTES, 255);
    uint8_t *out = random_tiles((size_t)slices * row_tiles_of_out, TILE_WIDE_BYTES, 15);
    float *norm = take<float>(H);
    for (int i = 0; i < H; i++) norm[i] = (float)(0.5 + random_bits() * 0x1p-32);
    uint8_t *scores = take<uint8_t>((size_t)slices * OUT_PARTS * SCORE_BYTES);
    launch("plain_fuse", decode_fuse, OUT_PARTS * SCORE_TILES, slices, DECODE_FUSE_THREADS, 0,
           router, norm, out, scores); /* in its own time: decode.c waits for it */
    size_t second = (size_t)row_tiles_of_out * TILE_WIDE_BYTES;
    double off = difference(router, norm, out, scores);
    double other = difference(router, norm, out + second, scores + OUT_PARTS * SCORE_BYTES);
    bool good = off <= 0.6 && other <= 0.6; /* half a code, and the sum's own rounding */
    printf("router times output projection at %s: off by %.3f and %.3f of a code (at most 0.6)%s\n",
           SHAPE_NAME, off, other, good ? "" : "  FAILED");
    release();
    return !good;
}
