/* Products of decode steps of several slots from tiles (tile.h; docs/cuda-batch.md): every warp
 * streams its own tiles through its own pieces of shared memory, so that no warp waits for another
 * one's weights, and multiplies 32 rows of weights by its inputs of every slot. Weights are the
 * left operand, slots the columns of the right one: a slot's sums depend on nothing but the slot.
 */
#ifndef LILY_CUDA_BATCH_TILES_CUH
#define LILY_CUDA_BATCH_TILES_CUH

#include "batch.cuh"

enum {
    SLICES = H / TILE_WIDE_COLS,       /* of the hidden width */
    KEPT_PITCH = 36,                   /* floats of a slot's 32 rows */
    KEPT = BATCH_ROWS * KEPT_PITCH + 4 /* floats of a warp's sums of eight slots */
};
static_assert(BATCH_WARPS % SLICES == 0, "a power of two of slices");

/* ---- the stream ------------------------------------------------------------------------------ */

/* The places of a warp's pieces on their way, used in turn; DEPTH of PIECE bytes each. */
template <int PIECE, int DEPTH> struct warp_ring {
    char *pieces;
    int at; /* byte of the oldest piece */
    __device__ __forceinline__ explicit warp_ring(char *shared)
        : pieces(shared + threadIdx.x / 32 * (PIECE * DEPTH)), at(0) {}
    __device__ __forceinline__ char *piece() const { return pieces + at; }
    __device__ __forceinline__ char *piece(int i) const { return pieces + i * PIECE; }
    /* Waits for the oldest one. */
    __device__ __forceinline__ void arrive() const {
        copy_wait<DEPTH - 1>();
        __syncwarp();
    }
    __device__ __forceinline__ void next() {
        at += PIECE;
        if (at == PIECE * DEPTH) at = 0;
    }
};

/* Where a lane finds its part of a wide tile in shared memory. Its 16-byte pieces are stored with
 * the halves of a row changed round in every other pair of fours of rows, so that eight-byte loads
 * of one group meet no bank twice. */
struct wide_place {
    int codes, factors; /* of group 0; the codes of group 1 at codes ^ 32 */
    __device__ __forceinline__ wide_place() {
        int lane = threadIdx.x % 32, four = lane / 4;
        codes = four * 64 + four / 2 % 2 * 32 + lane % 4 * 8;
        factors = TILE_CODES + four * 32;
    }
};

/* A warp copies a wide tile in the background; mine: the tile's byte 16 lane. */
__device__ __forceinline__ void copy_wide(char *piece, const uint8_t *mine) {
    int lane = threadIdx.x % 32;
    shared_at to = shared_address(piece) + (uint32_t)((lane ^ (lane / 8 % 2 * 2)) * 16);
    const uint8_t *from = mine;
#pragma unroll
    for (int i = 0; i < 4; i++) copy16(to + (uint32_t)(i * 512), from + i * 512, true);
    if (lane < 16) {
        copy16(shared_address(piece) + (uint32_t)(TILE_CODES + lane * 16), from + TILE_CODES, true);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* The lane's first byte of a tile of a wide matrix, row tiles one after the other. */
__device__ __forceinline__ const uint8_t *wide_tile_at(const uint8_t *tiles, int row_tile,
                                                       int slice) {
    return tiles + ((int64_t)row_tile * SLICES + slice) * TILE_WIDE_BYTES + threadIdx.x % 32 * 16;
}

/* acc[t] += 16 rows by one group of 64 inputs. codes: of the lane's two rows, two words of eight;
 * factors: of both rows, scale in the low half, bias in the high one. pairs: of the group's inputs
 * (batch_inputs), sums: of the lane's two slots. Codes enter as 128 + code (batch_multiply). */
template <int NT>
__device__ __forceinline__ void
multiply_group(float (&acc)[NT][4], const uint32_t (&codes)[2][2], const uint32_t (&factors)[2],
               const uint32_t (&pairs)[NT][2][4], const float (&sums)[NT][2]) {
    float sum[NT][4] = {};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        uint32_t a[4];
#pragma unroll
        for (int v = 0; v < 4; v++) {
            a[v] = select_or(codes[v % 2][s / 2] >> (8 * (s % 2) + v / 2 * 4), 0x000f000fu,
                             0x43004300u);
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
            multiply(sum[t], a, pairs[t][s / 2][2 * (s % 2)], pairs[t][s / 2][2 * (s % 2) + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float scale = __uint_as_float(factors[i] << 16);
        float rest = fmaf(-128.0f, scale, __uint_as_float(factors[i] & 0xffff0000u));
#pragma unroll
        for (int t = 0; t < NT; t++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &to = acc[t][2 * i + c];
                to = fmaf(scale, sum[t][2 * i + c], fmaf(rest, sums[t][c], to));
            }
        }
    }
}

/* Eight neighbouring inputs (bf16) as the pairs that codes are unpacked to. */
__device__ __forceinline__ void pair_up(uint4 v, uint32_t (&pairs)[4]) {
    pairs[0] = __byte_perm(v.x, v.z, 0x5410), pairs[1] = __byte_perm(v.x, v.z, 0x7632);
    pairs[2] = __byte_perm(v.y, v.w, 0x5410), pairs[3] = __byte_perm(v.y, v.w, 0x7632);
}

/* The sums of a group's inputs for the lane's two slots: a product with ones. */
__device__ __forceinline__ void sum_group(const uint32_t (&pairs)[2][4], float (&sums)[2]) {
    const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    float acc[4] = {};
#pragma unroll
    for (int s = 0; s < 4; s++)
        multiply(acc, ones, pairs[s / 2][2 * (s % 2)], pairs[s / 2][2 * (s % 2) + 1]);
    sums[0] = acc[0], sums[1] = acc[1];
}

/* Sums of 32 rows of weights: of rows 4 (lane / 4) + 2 half + i and slots 2 (lane % 4) + c of eight
 * at [half][eight][2 i + c]. */
template <int NT> struct tile_sums { float of[2][NT][4]; };

/* ---- inputs in shared memory ------------------------------------------------------------------
 */

/* Inputs of eight slots as lanes take them: of each eight inputs of a lane's slot (lane / 4) their
 * pairs, and of each group of 64 the sums of the lane's two slots, 2 (lane % 4) and the next. */
template <int GROUPS> struct staged_inputs {
    uint4 pairs[2 * GROUPS][32];
    float2 sums[GROUPS][4];
};
typedef staged_inputs<2> staged_slice; /* 128 inputs, in the order of a wide tile */
typedef staged_inputs<1> staged_group; /* 64 inputs, in the order of two tiles of `down` */

/* A warp stages a group: pairs of the lane's two eights of inputs. */
template <int GROUPS>
__device__ __forceinline__ void stage_group(staged_inputs<GROUPS> &to, int group,
                                            const uint32_t (&pairs)[2][4]) {
    int lane = threadIdx.x % 32;
    float sums[2];
    sum_group(pairs, sums);
#pragma unroll
    for (int w = 0; w < 2; w++) {
        to.pairs[2 * group + w][lane] =
            make_uint4(pairs[w][0], pairs[w][1], pairs[w][2], pairs[w][3]);
    }
    if (lane < 4) to.sums[group][lane] = make_float2(sums[0], sums[1]);
}

/* A warp loads its lanes' parts of a slice of eight rows of bf16, row: of the lane's slot, NULL for
 * none; and stages them. */
__device__ __forceinline__ void load_slice(uint4 (&v)[4], const bf16 *row, int slice) {
#pragma unroll
    for (int w = 0; w < 4; w++) {
        v[w] = make_uint4(0, 0, 0, 0);
        if (row) v[w] = *(const uint4 *)(row + slice * BATCH_CHUNK + batch_column(w));
    }
}
__device__ __forceinline__ void stage_slice(staged_slice &to, const uint4 (&v)[4]) {
#pragma unroll
    for (int group = 0; group < 2; group++) {
        uint32_t pairs[2][4];
        pair_up(v[2 * group], pairs[0]), pair_up(v[2 * group + 1], pairs[1]);
        stage_group(to, group, pairs);
    }
}

/* A slice of float32, each value as the sum of two bf16: the high or the low one. */
__device__ __forceinline__ void stage_exact(staged_slice &to, const float *row, int slice,
                                            bool low) {
#pragma unroll
    for (int group = 0; group < 2; group++) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int w = 0; w < 2; w++) {
            float4 u = make_float4(0, 0, 0, 0), v = u;
            if (row) {
                const float4 *from =
                    (const float4 *)(row + slice * BATCH_CHUNK + batch_column(2 * group + w));
                u = from[0], v = from[1];
            }
            const float x[4] = {u.x, u.y, u.z, u.w}, y[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t high, rest;
                bf16_halves(x[i], y[i], high, rest);
                pairs[w][i] = low ? rest : high;
            }
        }
        stage_group(to, group, pairs);
    }
}

template <int NT, int GROUPS>
__device__ __forceinline__ void take_group(uint32_t (&pairs)[NT][2][4], float (&sums)[NT][2],
                                           const staged_inputs<GROUPS> *from, int further,
                                           int group) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
        for (int w = 0; w < 2; w++) {
            uint4 v = from[t * further].pairs[2 * group + w][lane];
            pairs[t][w][0] = v.x, pairs[t][w][1] = v.y;
            pairs[t][w][2] = v.z, pairs[t][w][3] = v.w;
        }
        float2 sum = from[t * further].sums[group][lane % 4];
        sums[t][0] = sum.x, sums[t][1] = sum.y;
    }
}

/* acc += the sums of a wide tile in shared memory; x: its slice of the inputs of eight slots,
 * those of the next eight `further` places on. */
template <int NT>
__device__ __forceinline__ void multiply_wide(tile_sums<NT> &acc, const char *tile,
                                              const wide_place &place, const staged_slice *x,
                                              int further) {
#pragma unroll(NT == 1 ? 2 : 1)
    for (int group = 0; group < 2; group++) {
        uint32_t pairs[NT][2][4];
        float sums[NT][2];
        take_group<NT>(pairs, sums, x, further, group);
        const char *at = tile + (place.codes ^ group * 32);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint2 a = *(const uint2 *)(at + half * 1024);
            uint2 b = *(const uint2 *)(at + half * 1024 + 512);
            uint2 f = *(const uint2 *)(tile + place.factors + half * 16 + group * 8);
            const uint32_t codes[2][2] = {{a.x, a.y}, {b.x, b.y}}, factors[2] = {f.x, f.y};
            multiply_group<NT>(acc.of[half], codes, factors, pairs, sums);
        }
    }
}

/* ---- sums over warps --------------------------------------------------------------------------
 */

/* A warp's sums of eight slots to kept[KEPT]. */
__device__ __forceinline__ void keep_sums(float *kept, const float (&a)[4], const float (&b)[4]) {
    int lane = threadIdx.x % 32;
    float *to = kept + lane % 4 * 2 * KEPT_PITCH + lane / 4 * 4;
    *(float4 *)to = make_float4(a[0], a[2], b[0], b[2]);
    *(float4 *)(to + KEPT_PITCH) = make_float4(a[1], a[3], b[1], b[3]);
}

#endif
