/* Mathematics: W x for n slots of every matrix; top 8, silu(gate x) (up x), weighted sum, norm.
 * Layout: weights as tiles; x bf16 [n][H]; scores float32 [n][E + 1]; hidden bf16 [pair][I].
 * Threads: 16 warps a block, each streams its own tiles; slots are columns of m16n8k16, by eights.
 * Fused: norm and router; choice and first halves; sum and next norm. Agrees with ref/moe.c.
 * Bytes: 8 slots, up 68 MB, down 34: 47 and 38 % of 4,642 GB/s (bench/cuda-batch-h200.json).
 *
 * A decode step of several slots where weights lie as tiles: see batch_tiles.cuh and
 * docs/cuda-batch.md. Launches are of BATCH_THREADS threads, one block a multiprocessor. A kernel
 * may begin while the ones before it still run: weights that are known are asked for at once,
 * everything else is read and written behind wait_for_previous. */
#include "batch_experts.cuh"
#include "batch_tiles.cuh"

/* Share i of n of `units`, as [begin, end). */
struct span {
    int begin, end;
    __device__ __forceinline__ span(int units, int i, int n)
        : begin(units * i / n), end(units * (i + 1) / n) {}
};

/* ---- matrices for all slots ------------------------------------------------------------------ */

/* Shared memory: inputs of 8 NT slots [NT][SLICES], tiles on their way, sums of eight slots. */
template <int NT> struct product_shape {
    enum {
        DEPTH = NT == 1   ? 4
                : NT == 2 ? 3
                          : 2, /* tiles of a warp */
        RING = BATCH_WARPS * DEPTH * TILE_WIDE_BYTES,
        INPUTS = NT * SLICES * (int)sizeof(staged_slice)
    };
};

/* The sums of a round's `tiles` row tiles, whose first row is row0, to out; of split ones the parts
 * are added by way of `kept`. All threads. */
template <int NT>
__device__ __forceinline__ void store_tiles(const tile_sums<NT> &acc, float *kept, int n,
                                            float *out, int ldo, int r0, int rows, int tiles,
                                            int row0, int split) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < NT; t++) {
        int r1 = r0 + t * BATCH_ROWS;
        if (split == 1) {
            int row = row0 + warp * 32 + lane / 4 * 4;
            const float(&u)[4] = acc.of[0][t], (&v)[4] = acc.of[1][t];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int r = r1 + lane % 4 * 2 + c;
                if (warp >= tiles || r >= rows || row >= n) continue;
                *(float4 *)(out + (int64_t)r * ldo + row) =
                    make_float4(u[c], u[2 + c], v[c], v[2 + c]);
            }
            continue;
        }
        keep_sums(kept + warp * KEPT, acc.of[0][t], acc.of[1][t]);
        __syncthreads();
        for (int i = threadIdx.x; i < tiles * 128; i += BATCH_THREADS) {
            int row = i % 16 * 2, slot = i / 16 % 8, of = i / 128, r = r1 + slot;
            const float *from = kept + of * split * KEPT + slot * KEPT_PITCH + row;
            float2 sum = make_float2(0, 0);
            for (int s = 0; s < split; s++) {
                float2 part = *(const float2 *)(from + s * KEPT);
                sum.x += part.x, sum.y += part.y;
            }
            row += row0 + of * 32;
            if (r < rows && row < n) *(float2 *)(out + (int64_t)r * ldo + row) = sum;
        }
        __syncthreads();
    }
}

/* Inputs of 8 NT rows from r0 on, as a pass of multiply_tiles wants them. All threads. */
template <int NT>
__device__ __forceinline__ void stage_inputs(staged_slice *staged, const bf16 *a,
                                             const float *exact, int r0, int rows, bool low,
                                             int warp, int lane) {
    int staging = (min(rows - r0, 8 * NT) + 7) / 8 * SLICES; /* of eights that have rows */
    if (exact) {
#pragma unroll 1
        for (int i = warp; i < staging; i += BATCH_WARPS) {
            int r = r0 + i / SLICES * BATCH_ROWS + lane / 4;
            stage_exact(staged[i], r < rows ? exact + (int64_t)r * H : nullptr, i % SLICES, low);
        }
    } else {
        uint4 v[NT][4];
#pragma unroll
        for (int t = 0; t < NT; t++) {
            int i = t * BATCH_WARPS + warp, r = r0 + i / SLICES * BATCH_ROWS + lane / 4;
            load_slice(v[t], i < staging && r < rows ? a + (int64_t)r * H : nullptr, i % SLICES);
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
            int i = t * BATCH_WARPS + warp;
            if (i < staging) stage_slice(staged[i], v[t]);
        }
    }
}

/* out[r][n] = sum_k a[r][k] w[n][k] for 8 NT rows from r0 on and row tiles [first, end) of a matrix
 * of so many rows, out rows ldo floats apart. A job is a row tile and a part of its slices, one of
 * `split`; warps take them in turn, and of a split row tile the parts are added in the order of
 * slices. exact (where given): float32 inputs in the place of a, each as the sum of two bf16 (all
 * jobs at once then). */
template <int NT>
__device__ __forceinline__ void
multiply_tiles(const bf16 *a, const float *exact, const uint8_t *codes, int n, float *out, int ldo,
               int r0, int rows, int first, int end, int split, char *shared) {
    typedef product_shape<NT> shape;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, passes = exact ? 2 : 1;
    int jobs = (end - first) * split, slices = SLICES / split;
    warp_ring<TILE_WIDE_BYTES, shape::DEPTH> ring(shared);
    staged_slice *staged = (staged_slice *)(shared + shape::RING);
    float *kept = (float *)(shared + shape::RING + shape::INPUTS);
    int ahead = warp, slice_ahead = 0, again = passes; /* what is fetched next */
    const uint8_t *tile = wide_tile_at(codes, first + ahead / split, ahead % split * slices);
    auto fetch = [&](char *to) {
        if (ahead < jobs) {
            copy_wide(to, tile);
            tile += TILE_WIDE_BYTES;
            if (++slice_ahead == slices) {
                slice_ahead = 0, ahead += BATCH_WARPS;
                if (ahead >= jobs && --again > 0) ahead = warp;
                tile = wide_tile_at(codes, first + ahead / split, ahead % split * slices);
            }
        }
        copy_commit();
    };
#pragma unroll
    for (int d = 0; d < shape::DEPTH; d++) fetch(ring.piece(d));
    wait_for_previous();
    wide_place place;
    tile_sums<NT> acc = {};
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
        if (pass) __syncthreads(); /* the inputs before are of no more use */
        stage_inputs<NT>(staged, a, exact, r0, rows, pass == 1, warp, lane);
        __syncthreads();
#pragma unroll 1
        for (int round = 0; round < jobs; round += BATCH_WARPS) {
            int job = round + warp;
            if (pass == 0) acc = {};
            if (job < jobs) {
                const staged_slice *x = staged + job % split * slices;
#pragma unroll 1
                for (int i = 0; i < slices; i++) {
                    ring.arrive();
                    multiply_wide<NT>(acc, ring.piece(), place, x + i, SLICES);
                    __syncwarp();
                    fetch(ring.piece());
                    ring.next();
                }
            }
            if (pass + 1 < passes) continue;
            int tiles = min(BATCH_WARPS / split, end - first - round / split);
            int row0 = (first + round / split) * 32; /* of this round */
            store_tiles<NT>(acc, kept, n, out, ldo, r0, rows, tiles, row0, split);
        }
    }
}

/* proj = all projections that share the input; then, in near float32 accuracy, a small matrix of
 * its own (DeltaNet's gates; no rows: none): small_out[r][small.rows]. Blocks [0, dense_blocks), a
 * multiple of the groups of 8 NT rows, do the first, each row tile in `split` parts; one for each
 * row tile of small and 8 or 16 rows the second. */
template <int NT>
__device__ __forceinline__ void project(const bf16 *a, const float *exact, const cuda_mat &w,
                                        float *out, int ldo, const cuda_mat &small,
                                        float *small_out, int rows, int dense_blocks, int split,
                                        char *shared) {
    bool dense = (int)blockIdx.x < dense_blocks;
    int each = dense ? 8 * NT : NT == 1 ? 8 : 16, groups = (rows + each - 1) / each;
    int block = dense ? blockIdx.x : blockIdx.x - dense_blocks;
    int r0 = block % groups * each, i = block / groups;
    span share((w.rows + 31) / 32, dense ? i : 0, dense ? dense_blocks / groups : 1);
    let_next_begin();
    multiply_tiles<NT>(a, dense ? nullptr : exact, dense ? w.codes : small.codes,
                       dense ? w.rows : small.rows, dense ? out : small_out,
                       dense ? ldo : small.rows, r0, min(rows, r0 + each), dense ? share.begin : i,
                       dense ? share.end : i + 1, dense ? split : (int)SLICES, shared);
}

/* out[r] = w a[r] where w has H rows and tiles of the same inputs lie together: a block takes 16
 * rows of weights, half a row of tiles. */
template <int NT>
__device__ __forceinline__ void deep(const bf16 *a, const cuda_mat &w, float *out, int rows,
                                     char *shared) {
    enum {
        PASSES = ((Q_DIM > V_DIM ? Q_DIM : V_DIM) / BATCH_CHUNK + BATCH_WARPS - 1) / BATCH_WARPS
    };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int groups = (rows + 8 * NT - 1) / (8 * NT), r0 = blockIdx.x % groups * 8 * NT;
    int part = blockIdx.x / groups, slices = w.cols / BATCH_CHUNK;
    batch_sums *kept = (batch_sums *)shared;
    let_next_begin();
    uint2 codes[PASSES][2][2] = {}; /* row, group */
    uint4 factors[PASSES] = {};     /* of both rows of group 0, then of group 1 */
    const uint8_t *tiles = w.codes + part / 2 * TILE_WIDE_BYTES;
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int slice = warp + p * BATCH_WARPS, four = part % 2 * 4 + g / 2;
        if (slice >= slices) continue;
        const uint8_t *tile = tiles + (int64_t)slice * w.code_pair;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                codes[p][i][j] = __ldg(
                    (const uint2 *)(tile + (g % 2 * 2 + i) * 512 + four * 64 + j * 32 + q * 8));
            }
        }
        factors[p] = __ldg((const uint4 *)(tile + TILE_CODES + four * 32 + g % 2 * 16));
    }
    wait_for_previous();
    float acc[NT][4] = {};
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        int slice = warp + p * BATCH_WARPS;
        if (slice >= slices) continue;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t pairs[NT][2][4];
            float sums[NT][2];
#pragma unroll
            for (int t = 0; t < NT; t++) {
                int r = r0 + t * BATCH_ROWS + g;
                const bf16 *row = a + (int64_t)(r < rows ? r : r0) * w.cols + slice * BATCH_CHUNK;
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    pair_up(*(const uint4 *)(row + batch_column(2 * j + k)), pairs[t][k]);
                }
                sum_group(pairs[t], sums[t]);
            }
            const uint32_t c[2][2] = {{codes[p][0][j].x, codes[p][0][j].y},
                                      {codes[p][1][j].x, codes[p][1][j].y}};
            const uint32_t f[2] = {j ? factors[p].z : factors[p].x,
                                   j ? factors[p].w : factors[p].y};
            multiply_group<NT>(acc, c, f, pairs, sums);
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) batch_keep(kept[warp * NT + t], acc[t], 0);
    __syncthreads();
    int slot = threadIdx.x / 16 % BATCH_ROWS, t = warp / 4, row = lane % 16;
    int r = r0 + t * BATCH_ROWS + slot, n = part * 16 + row;
    if (t >= NT || r >= rows) return;
    float sum = 0;
#pragma unroll
    for (int s = 0; s < BATCH_WARPS; s++) {
        if (s < slices) sum += kept[s * NT + t][slot][row];
    }
    out[(int64_t)r * H + n] = sum;
}
static_assert(H % 32 == 0, "whole tiles");
static_assert(BATCH_WARPS * (int)sizeof(batch_sums) <= CUDA_TILES_SUMS, "what the host asks for");

#define TILED_PRODUCTS(rows, tiles)                                                                \
    static_assert((int)product_shape<tiles>::RING + (int)product_shape<tiles>::INPUTS +            \
                          BATCH_WARPS * KEPT * (int)sizeof(float) <=                               \
                      CUDA_TILES_##rows,                                                           \
                  "what the host asks for");                                                       \
    KERNEL __launch_bounds__(BATCH_THREADS, 1) tiles_project_##rows(                               \
        const bf16 *a, const float *exact, cuda_mat w, float *out, int ldo, cuda_mat small,        \
        float *small_out, int n, int dense_blocks, int split) {                                    \
        DYNAMIC_SHARED(char, shared);                                                              \
        project<tiles>(a, exact, w, out, ldo, small, small_out, n, dense_blocks, split, shared);   \
    }                                                                                              \
    KERNEL __launch_bounds__(BATCH_THREADS, 1)                                                     \
        tiles_out_##rows(const bf16 *a, cuda_mat w, float *out, int n) {                           \
        DYNAMIC_SHARED(char, shared);                                                              \
        deep<tiles>(a, w, out, n, shared);                                                         \
    }
TILED_PRODUCTS(8, 1)
TILED_PRODUCTS(16, 2)
TILED_PRODUCTS(32, 4)

/* ---- router ---------------------------------------------------------------------------------- */

/* Four codes of a byte each of two words, as bf16 pairs (code i of a, code i of b): exact. */
__device__ __forceinline__ void unpack_bytes(uint32_t a, uint32_t b, uint32_t (&out)[4]) {
    const uint32_t magic = 0x4b000000u; /* 2^23 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x = __uint_as_float(__byte_perm(a, magic, (unsigned)(0x7650 + i))) - 8388608.0f;
        float y = __uint_as_float(__byte_perm(b, magic, (unsigned)(0x7650 + i))) - 8388608.0f;
        out[i] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
    }
}

enum { ROUTER_THREADS = 1024, GROUPS = H / 64 };
static_assert(32 * (int)GROUPS <= (int)ROUTER_THREADS, "a warp a group of 64 inputs");

/* The lane's codes, of two rows and 16 inputs of the group, and the rows' factors. */
__device__ __forceinline__ void load_router(uint4 (&codes)[2], uint2 &factors,
                                            const cuda_mat &router, int block, int group, int g,
                                            int q) {
    const uint8_t *tile = router.codes + ((int64_t)block * SLICES + group / 2) * TILE_BYTE_BYTES;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        codes[i] = __ldg(
            (const uint4 *)(tile + (2 * i + q % 2) * 512 + (4 * g + group % 2 * 2 + q / 2) * 16));
    }
    factors = __ldg((const uint2 *)(tile + TILE_CODES + g * 16 + group % 2 * 8));
}

/* 16 inputs as pairs that codes are unpacked to, each the sum of two bf16. */
__device__ __forceinline__ void split_inputs(const float (&v)[2][8], uint32_t (&high)[2][4],
                                             uint32_t (&low)[2][4]) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
#pragma unroll
        for (int i = 0; i < 4; i++) bf16_halves(v[w][i], v[w][i + 4], high[w][i], low[w][i]);
    }
}

/* 1 / rms of a slot's row from its groups' sums of squares. */
__device__ __forceinline__ float norm_factor(const float (&squares)[GROUPS][BATCH_ROWS], int slot) {
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < GROUPS; s++) sum += squares[s][slot];
    return 1.0f / sqrtf(sum / H + SHAPE_NORM_EPS);
}

/* The norm of the lane's 16 values, which the weight has been applied to already. */
__device__ __forceinline__ void store_normed(bf16 *to, const float (&v)[2][8], float factor) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const float(&y)[8] = v[w];
        *(uint4 *)(to + 8 * w) = make_uint4(
            bf16_pair(y[0] * factor, y[1] * factor), bf16_pair(y[2] * factor, y[3] * factor),
            bf16_pair(y[4] * factor, y[5] * factor), bf16_pair(y[6] * factor, y[7] * factor));
    }
}

/* The residual stream h = x + add of eight rows from r0 on, its norm to normed_bf, and the router's
 * scores of that norm in near float32 accuracy: products of h times the norm's weight, as the sum
 * of two bf16 each, with exact codes; the norm's factor is applied to what they give. A warp takes
 * a group of 64 inputs. Grid: blocks of 16 scores (at least SLICES) in x, groups of eight rows in
 * y. */
KERNEL __launch_bounds__(ROUTER_THREADS, 1)
    tiles_router(const float *x, const float *add, const float *weight, cuda_mat router,
                 float *scores, bf16 *normed_bf, int rows) {
    __shared__ batch_sums kept[GROUPS];
    __shared__ float squares[GROUPS][BATCH_ROWS];
    int lane = threadIdx.x % 32, group = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    int block = blockIdx.x, r0 = (int)blockIdx.y * BATCH_ROWS, r = r0 + g;
    bool takes = group < GROUPS;
    uint4 codes[2] = {}; /* of the lane's two rows */
    uint2 factors = make_uint2(0, 0);
    float v[2][8] = {};
    let_next_begin();
    if (takes) {
        load_router(codes, factors, router, block, group, g, q);
    }
    wait_for_previous();
    int column = group * 64 + q * 16; /* 16 inputs */
    if (takes) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 h = {}, b = {}, n = *(const float4 *)(weight + column + 4 * i);
            if (r < rows) {
                h = *(const float4 *)(x + (int64_t)r * H + column + 4 * i);
                b = *(const float4 *)(add + (int64_t)r * H + column + 4 * i);
            }
            float4 y = make_float4(h.x + b.x, h.y + b.y, h.z + b.z, h.w + b.w);
            float *to = &v[i / 2][i % 2 * 4];
            sum += fmaf(y.x, y.x, y.y * y.y) + fmaf(y.z, y.z, y.w * y.w);
            to[0] = y.x * n.x, to[1] = y.y * n.y, to[2] = y.z * n.z, to[3] = y.w * n.w;
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (q == 0) squares[group][g] = sum;
        uint32_t high[2][4], low[2][4];
        float in[2], rest[2], product[4] = {}, acc[4];
        split_inputs(v, high, low);
        sum_group(high, in);
        sum_group(low, rest);
#pragma unroll
        for (int w = 0; w < 2; w++) {
            uint32_t p[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                unpack_bytes(w ? codes[i].z : codes[i].x, w ? codes[i].w : codes[i].y, p[i]);
            }
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const uint32_t a[4] = {p[0][2 * s], p[1][2 * s], p[0][2 * s + 1], p[1][2 * s + 1]};
                multiply(product, a, low[w][2 * s], low[w][2 * s + 1]);
                multiply(product, a, high[w][2 * s], high[w][2 * s + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t pair = i / 2 ? factors.y : factors.x;
            float scale = __uint_as_float(pair << 16);
            float bias = __uint_as_float(pair & 0xffff0000u);
            acc[i] = fmaf(scale, product[i], bias * (in[i % 2] + rest[i % 2]));
        }
        batch_keep(kept[group], acc, 0);
    }
    __syncthreads();
    int row = threadIdx.x % 16, slot = threadIdx.x / 16, n = block * 16 + row;
    if (slot < BATCH_ROWS && n < router.rows && r0 + slot < rows) {
        float sum = 0;
#pragma unroll 8
        for (int s = 0; s < GROUPS; s++) sum += kept[s][slot][row];
        scores[(int64_t)(r0 + slot) * router.rows + n] = sum * norm_factor(squares, slot);
    }
    if (!takes || group / 2 != block || r >= rows) return; /* the norm's slice is its block's */
    float factor = norm_factor(squares, g);
    store_normed(normed_bf + (int64_t)r * H + column, v, factor);
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Experts whose inputs a block has at hand at once. */
enum { WINDOW = 3 };

/* Units [begin, end) of a block, UNITS an expert: its warps take turns, and all meet where the next
 * experts' inputs are staged. stage(e) brings those of entry e to place e % WINDOW, with all
 * threads; work(unit) multiplies. */
template <int UNITS, class Stage, class Work>
__device__ __forceinline__ void walk_units(int begin, int end, const Stage &stage,
                                           const Work &work) {
    int unit = begin + (int)threadIdx.x / 32;
#pragma unroll 1
    for (int e = begin / UNITS; e * UNITS < end; e += WINDOW) {
        if (e * UNITS > begin) __syncthreads(); /* the inputs before are of no more use */
#pragma unroll 1
        for (int i = e; i < e + WINDOW && i * UNITS < end; i++) stage(i);
        __syncthreads();
#pragma unroll 1
        for (; unit < min(end, (e + WINDOW) * UNITS); unit += BATCH_WARPS) work(unit);
    }
}

enum { UP_DEPTH = 3, UP_RING = BATCH_WARPS * UP_DEPTH * TILE_WIDE_BYTES };
static_assert(UP_RING + WINDOW * SLICES * (int)sizeof(staged_slice) <= CUDA_TILES_UP,
              "what the host asks for");

/* hidden[pair] = silu(gate x) * (up x), bf16, for every pair of slot and expert: slot * TOP_K +
 * choice, and the shared expert's behind them. Chooses the experts first, in every block alike;
 * block 0 leaves the table of them and the chosen ones' weights. A warp takes a row tile with all
 * its slices, and meets no other warp. Any number of blocks. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    tiles_up(const bf16 *a, const float *scores, int rows, cuda_mat gate, cuda_mat shared_gate,
             expert_list *left, float *weights, bf16 *hidden) {
    DYNAMIC_SHARED(char, shared);
    __shared__ expert_list table;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int UNITS = 2 * INNER / 32; /* of an expert */
    static_assert((int)INNER == (int)SHARED, "the same units of all experts");
    staged_slice *staged = (staged_slice *)(shared + UP_RING); /* [WINDOW][SLICES] */
    let_next_begin();
    wait_for_previous();
    list_experts(table, scores, rows, shared, blockIdx.x == 0 ? weights : nullptr);
    if (blockIdx.x == 0) leave_list(table, left);
    span share(table.n * UNITS, blockIdx.x, gridDim.x);
    warp_ring<TILE_WIDE_BYTES, UP_DEPTH> ring(shared);
    int ahead = share.begin + warp, slice_ahead = 0; /* what is fetched next */
    const uint8_t *tile = nullptr;
    auto unit_ahead = [&] {
        if (ahead >= share.end) return;
        int expert = table.entry[ahead / UNITS] & 0xffff, of = ahead % UNITS;
        bool own = expert == EXPERTS;
        tile =
            wide_tile_at(own ? shared_gate.codes : gate.codes, (own ? 0 : expert * UNITS) + of, 0);
    };
    auto fetch = [&](char *to) {
        if (ahead < share.end) {
            copy_wide(to, tile);
            tile += TILE_WIDE_BYTES;
            if (++slice_ahead == SLICES) {
                slice_ahead = 0, ahead += BATCH_WARPS;
                unit_ahead();
            }
        }
        copy_commit();
    };
    unit_ahead();
#pragma unroll
    for (int d = 0; d < UP_DEPTH; d++) fetch(ring.piece(d));
    wide_place place;
    auto stage = [&](int e) {
        listed_rows from = {a, H, table.pairs[e], (int)(table.entry[e] >> 16), rows * TOP_K, TOP_K};
        if (warp >= SLICES) return;
        uint4 v[4];
        load_slice(v, from.row(lane / 4), warp);
        stage_slice(staged[e % WINDOW * SLICES + warp], v);
    };
    auto work = [&](int unit) {
        int e = unit / UNITS, n = (int)(table.entry[e] >> 16);
        const staged_slice *from = staged + e % WINDOW * SLICES;
        tile_sums<1> acc = {};
#pragma unroll 1
        for (int slice = 0; slice < SLICES; slice++) {
            ring.arrive();
            multiply_wide<1>(acc, ring.piece(), place, from + slice, 0);
            __syncwarp();
            fetch(ring.piece());
            ring.next();
        }
        /* The lane's four rows: gate and up of two inner units. */
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int m = lane % 4 * 2 + c, i = unit % UNITS * 16 + lane / 4 * 2;
            float first = silu(acc.of[0][0][c]) * acc.of[0][0][2 + c];
            float second = silu(acc.of[1][0][c]) * acc.of[1][0][2 + c];
            if (m >= n) continue;
            *(uint32_t *)(hidden + (int64_t)table.pairs[e][m] * INNER + i) =
                bf16_pair(first, second);
        }
    };
    walk_units<UNITS>(share.begin, share.end, stage, work);
}

/* A piece of the second half: 32 rows by one group of 64 inputs, the scales once. */
enum {
    DOWN_PIECE = 2 * 512 + 128,
    DOWN_GROUPS = INNER / 64,
    DOWN_DEPTH = 6, /* pieces on their way a warp */
    DOWN_RING = BATCH_WARPS * DOWN_DEPTH * DOWN_PIECE
};
static_assert(DOWN_RING + WINDOW * DOWN_GROUPS * (int)sizeof(staged_group) <= CUDA_TILES_DOWN,
              "what the host asks for");

/* A warp stages a group of the hidden rows of entry e. */
__device__ __forceinline__ void stage_hidden(staged_group *staged, const bf16 *hidden,
                                             const expert_list &table, int e, int group, int lane) {
    int m = lane / 4, n = (int)(table.entry[e] >> 16);
    const bf16 *row = hidden + (int64_t)table.pairs[e][m < n ? m : 0] * INNER + group * 64;
    uint32_t pairs[2][4];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (m < n) v = *(const uint4 *)(row + w * 32 + lane % 4 * 8);
        pair_up(v, pairs[w]);
    }
    stage_group(staged[e % WINDOW * DOWN_GROUPS + group], 0, pairs);
}

/* acc += 32 rows by a group of 64 inputs: `at` has their codes and factors. */
__device__ __forceinline__ void multiply_down(float (&acc)[2][1][4], const char *at,
                                              const staged_group *from, int lane) {
    uint32_t pairs[1][2][4];
    float sums[1][2];
    take_group<1>(pairs, sums, from, 0, 0);
    /* Of a set's four rows the tile has first 0, then 2, 1, 3. */
    uint4 c = *(const uint4 *)(at + lane * 16), d = *(const uint4 *)(at + 512 + lane * 16);
    uint4 f = *(const uint4 *)(at + 1024 + lane / 4 * 16);
    const uint32_t upper[2][2] = {{c.x, d.x}, {c.z, d.z}}, first[2] = {f.x, f.y};
    const uint32_t lower[2][2] = {{c.y, d.y}, {c.w, d.w}}, second[2] = {f.z, f.w};
    multiply_group<1>(acc[0], upper, first, pairs, sums);
    multiply_group<1>(acc[1], lower, second, pairs, sums);
}

/* out[pair] = the expert's second half of hidden[pair]; of the shared expert to shared_out[slot].
 * A warp takes 32 rows of weights and all inputs, and meets no other warp. Any number of blocks. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    tiles_down(const bf16 *hidden, const expert_list *left, int rows, cuda_mat down,
               cuda_mat shared_down, float *out, float *shared_out) {
    DYNAMIC_SHARED(char, shared);
    __shared__ expert_list table;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int UNITS = H / 32; /* of an expert */
    constexpr int SLICE = H / TILE_DOWN_ROWS * TILE_DOWN_BYTES;
    constexpr int64_t EXPERT = (int64_t)(INNER / TILE_DOWN_COLS) * SLICE;
    staged_group *staged = (staged_group *)(shared + DOWN_RING); /* [WINDOW][DOWN_GROUPS] */
    let_next_begin();
    wait_for_previous();
    read_list(table, left);
    span share(table.n * UNITS, blockIdx.x, gridDim.x);
    warp_ring<DOWN_PIECE, DOWN_DEPTH> ring(shared);
    int ahead = share.begin + warp, group_ahead = 0, factors = 0; /* what is fetched next */
    const uint8_t *piece = nullptr;
    auto unit_ahead = [&] {
        if (ahead >= share.end) return;
        int expert = table.entry[ahead / UNITS] & 0xffff, of = ahead % UNITS;
        const uint8_t *from = expert == EXPERTS ? shared_down.codes : down.codes + expert * EXPERT;
        piece = from + of / 4 * TILE_DOWN_BYTES + of % 4 * 512 + lane * 16;
        factors = TILE_CODES - of % 4 * (512 - 128);
    };
    auto fetch = [&](char *place) {
        if (ahead < share.end) {
            shared_at to = shared_address(place) + (uint32_t)(lane * 16);
            copy16(to, piece, true);
            copy16(to + 512, piece + SLICE, true);
            if (lane < 8) copy16(to + 1024, piece + factors, true);
            piece += 2 * SLICE;
            if (++group_ahead == DOWN_GROUPS) {
                group_ahead = 0, ahead += BATCH_WARPS;
                unit_ahead();
            }
        }
        copy_commit();
    };
    unit_ahead();
#pragma unroll
    for (int d = 0; d < DOWN_DEPTH; d++) fetch(ring.piece(d));
    auto stage = [&](int e) {
        if (warp >= DOWN_GROUPS) return;
        stage_hidden(staged, hidden, table, e, warp, lane);
    };
    auto work = [&](int unit) {
        int e = unit / UNITS, n = (int)(table.entry[e] >> 16);
        const staged_group *from = staged + e % WINDOW * DOWN_GROUPS;
        float acc[2][1][4] = {};
#pragma unroll 1
        for (int group = 0; group < DOWN_GROUPS; group++) {
            ring.arrive();
            const char *at = ring.piece();
            multiply_down(acc, at, from + group, lane);
            __syncwarp();
            fetch(ring.piece());
            ring.next();
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int m = lane % 4 * 2 + c, row = unit % UNITS * 32 + lane / 4 * 4;
            if (m >= n) continue;
            int pair = table.pairs[e][m], own = pair - rows * TOP_K;
            float *to = own < 0 ? out + (int64_t)pair * H : shared_out + (int64_t)own * H;
            *(float4 *)(to + row) =
                make_float4(acc[0][0][c], acc[0][0][2 + c], acc[1][0][c], acc[1][0][2 + c]);
        }
    };
    walk_units<UNITS>(share.begin, share.end, stage, work);
}

/* ---- between layers -------------------------------------------------------------------------- */

/* x[r] += add[r] + the experts' weighted sum (in order of choice) + sigmoid(gate) * own[r]; then
 * the next norm of the whole row as float32 and bf16. Grid: rows. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    tiles_combine(const float *out, const float *weights, const float *scores, const float *own,
                  const float *add, float *x, const float *weight, float *normed, bf16 *normed_bf) {
    int64_t r = blockIdx.x;
    float4 v[CHANNELS];
    float sum = 0;
    let_next_begin();
    wait_for_previous();
    float gate = sigmoid(scores[r * (EXPERTS + 1) + EXPERTS]);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        int c = (i * BATCH_THREADS + threadIdx.x) * 4;
        v[i] = make_float4(0, 0, 0, 0);
        if (c >= H) continue;
        float4 *at = (float4 *)(x + r * H + c);
        float4 h = *at, m = *(const float4 *)(add + r * H + c),
               s = *(const float4 *)(own + r * H + c);
        float4 z[TOP_K], y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < TOP_K; j++) z[j] = *(const float4 *)(out + (r * TOP_K + j) * H + c);
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            float share = weights[r * TOP_K + j];
            add_scaled(y, z[j], share);
        }
        v[i].x = h.x + m.x + fmaf(gate, s.x, y.x), v[i].y = h.y + m.y + fmaf(gate, s.y, y.y);
        v[i].z = h.z + m.z + fmaf(gate, s.z, y.z), v[i].w = h.w + m.w + fmaf(gate, s.w, y.w);
        *at = v[i];
        sum += fmaf(v[i].x, v[i].x, v[i].y * v[i].y) + fmaf(v[i].z, v[i].z, v[i].w * v[i].w);
    }
    float scale = 1.0f / sqrtf(block_sum(sum) / H + SHAPE_NORM_EPS);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        int c = (i * BATCH_THREADS + threadIdx.x) * 4;
        if (c < H) keep_normed(v[i], scale, weight, r, c, normed, normed_bf);
    }
}
