/* Building blocks of the persistent decode kernel: shapes, what a block shares, the grid, the
 * integer products on tensor cores, the exact residual sum. */
#ifndef LILY_CUDA_DECODE_CORE_CUH
#define LILY_CUDA_DECODE_CORE_CUH

#include "decode_ring.cuh"
#include "decode_shape.cuh"

namespace decode {

/* ---- the ring ---------------------------------------------------------------------------------
 */

constexpr int SLOT_TILES = 8, SLOT = SLOT_TILES * TILE_WIDE_BYTES, SLOTS = 11;
constexpr int DOWN_PER_SLOT = SLOT / TILE_DOWN_BYTES;
constexpr int BYTE_PER_SLOT = SLOT / TILE_BYTE_BYTES;
constexpr int STATE_SLOTS = 4, STATE_CHUNK = 128 * 128 * 4 / STATE_SLOTS;
constexpr int KV_TOKENS = 16, KV_CHUNK = KV_TOKENS * HEAD * 2; /* keys; as much for values */
__host__ __device__ constexpr int chunks(int tiles, int per) {
    return (tiles + per - 1) / per;
}
constexpr int EXPERT_IN_CHUNKS = chunks(2 * SLICES, SLOT_TILES);
constexpr int DOWN_CHUNKS = chunks(DOWN_TILES, DOWN_PER_SLOT);
constexpr int SHARED_CHUNKS = chunks(SLICES, SLOT_TILES);
constexpr int OUT_CHUNKS = chunks(OUT_TILES, SLOT_TILES); /* behind one with its scores */
static_assert(SCORE_BYTES <= SLOT, "one chunk");

struct Share { /* [first, first + n) of something */
    int first, n;
};

/* Attention over n rows: blocks [kv * span, (kv + 1) * span) share kv head kv, `rows` each. */
struct Context {
    int n, span, rows, groups;  /* groups: of the span, how many have rows */
    int kv, group, first, mine; /* of this block: rows [first, first + mine) */
};

constexpr int WORK = 21504;       /* bytes shared by whatever a stage needs */
constexpr int WARP_SCRATCH = 272; /* bytes of each warp */
struct Shared {
    alignas(128) unsigned char ring[SLOTS * SLOT];
    alignas(128) unsigned char work[WORK];
    alignas(16) unsigned char scratch[WARPS * WARP_SCRATCH];
    alignas(16) unsigned char zeros[HEAD * 2];
    unsigned long long full[SLOTS], empty[SLOTS];
    float squares[WARPS];
    float cosine[SHAPE_ROTARY_DIM / 2], sine[SHAPE_ROTARY_DIM / 2];
    int chosen;            /* this block's expert */
    float top[TOP_K];      /* scores of the chosen ones, before the norm's factor */
    float scores[EXPERTS]; /* the producer's */
    cuda_slot slot;
    decode_layer layers[2]
                       [2]; /* consumers' and producer's copy of the layer's table, and the next */
    /* this block's shares, worked out once (decode_plan.cuh) */
    Share project[3]; /* row tiles of DeltaNet's and attention's projections and of the head */
    Share shared_slices;
    int project_chunks[3];
    Context context;
};

static_assert(sizeof(Shared) <= DECODE_SHARED, "fits");

__device__ __forceinline__ void sync_consumers() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

/* ---- the grid ---------------------------------------------------------------------------------
 */

/* A barrier of the grid costs 1,200 to 2,600 cycles until a block's writes have reached memory, and
 * as much again until the others know and read them. So there is one only where partial attention
 * is handed over. All else tells by itself that it has arrived: words by their tags, sums by their
 * count. No one overwrites what others still read: all blocks add to the experts' sum after they
 * have read the mixers' and what their mixer needs, all add to the mixers' after they have read the
 * experts', and who writes has seen the sum before complete. Scores have a sum of each layer. */

/* All consumers have come here (sync_consumers) before thread 0 tells the grid. */
__device__ __forceinline__ void grid_arrive(unsigned *counter) {
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    }
}

__device__ __forceinline__ void grid_wait(const unsigned *counter, unsigned target) {
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (unsigned spin = 0;; spin++) {
            unsigned value;
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                         : "=r"(value)
                         : "l"(counter)
                         : "memory");
            if ((int)(value - target) >= 0) break;
            if (spin == SPIN_LIMIT) __trap();
        }
    }
    sync_consumers();
}

__device__ __forceinline__ void give_word(decode_word *to, float value, uint32_t tag) {
    unsigned long long word = (unsigned long long)tag << 32 | __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

/* Whether the word has arrived. */
__device__ __forceinline__ bool look_word(const decode_word *from, uint32_t tag, float &value) {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    value = __uint_as_float((uint32_t)word);
    return (uint32_t)(word >> 32) == tag;
}

/* N words, `pitch` apart, once all of them have arrived. Whole warps. */
template <int N>
__device__ __forceinline__ void take_words(const decode_word *from, int pitch, uint32_t tag,
                                           float (&value)[N]) {
#pragma unroll 1
    for (unsigned spin = 0;; spin++) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < N; i++) all &= look_word(from + i * pitch, tag, value[i]);
        if (all) break;
        if (spin == SPIN_LIMIT) __trap();
    }
    __syncwarp();
}
__device__ __forceinline__ float take_word(const decode_word *from, uint32_t tag) {
    float value[1];
    take_words(from, 0, tag, value);
    return value[0];
}

/* ---- numbers ----------------------------------------------------------------------------------
 */

__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ __forceinline__ float silu(float x) {
    return __fdividef(x, 1.0f + __expf(-x));
}

template <int FIRST = 16> __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = FIRST; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
    return x;
}
template <int FIRST = 16> __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = FIRST; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}

/* The residual stream is a sum of many blocks' contributions. As integers of 2^-26 they add up to
 * the same bits in any order; below them a sum has eight bits in which its contributions are
 * counted. One contribution is below 2^21 in magnitude and a sum, before a stage adds to it, below
 * 2^26, or the step is marked bad: a stage adds at most 33 to a sum, and 2^26 and 33 times 2^21
 * stay below 2^29 = 2^63 / 2^26 / 2^8. */
constexpr float ONE = (float)(1 << DECODE_FIXED_BITS);
constexpr float LARGEST = 2097152.0f, LARGEST_SUM = 67108864.0f;
constexpr unsigned COUNTED = (1u << DECODE_COUNT_BITS) - 1;

/* Of a sum with so many contributions. */
__device__ __forceinline__ float from_fixed(long long sum, unsigned contributions) {
    return __ll2float_rn((sum - (long long)contributions) >> DECODE_COUNT_BITS) * (1 / ONE);
}

/* Whether a sum has so many contributions. */
__device__ __forceinline__ bool look_sum(const long long *from, unsigned contributions,
                                         float &value) {
    long long sum;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(sum) : "l"(from) : "memory");
    value = from_fixed(sum, contributions);
    return (((unsigned)sum ^ contributions) & COUNTED) == 0;
}

/* Within a slice of 128 values, values 4 l and 4 l + 1 of all l come first, then the other two: a
 * lane that reads four of them reads 16 bytes beside its neighbour's each time. */
__host__ __device__ __forceinline__ int residual_at(int row) {
    int e = row % 128;
    return row / 128 * 128 + (e >> 1 & 1) * 64 + e / 4 * 2 + (e & 1);
}
constexpr int SUM = H;                   /* integers of a sum of the residual stream */
constexpr int PART_ROWS = H / OUT_PARTS; /* of the output projection in one block */
constexpr int STEP_SUMS = 2 * SUM + SHAPE_LAYERS * EXPERTS; /* of a step */
__device__ __forceinline__ long long *step_sums(const decode_args &a, uint32_t step) {
    return a.x.sums + (step & 1) * STEP_SUMS;
}

__device__ __forceinline__ void sum_add(long long *sum, float x, unsigned *bad) {
    if (!(fabsf(x) < LARGEST)) {
        *bad = 1;
        x = 0;
    }
    long long v = __float2ll_rn(x * ONE) * (COUNTED + 1) + 1;
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sum), "l"(v) : "memory");
}

/* ---- products ---------------------------------------------------------------------------------
 */

/* Codes are unsigned bytes, activations 16-bit integers as two signed bytes: 256 high + low. A
 * column of the right operand is one of them for one group, so that all sums of a 64-group are
 * exact integers and appear in separate columns. */
__device__ __forceinline__ void mma(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_signed(int (&c)[4], const uint4 &a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/* A slice of 128 activations as this lane's part of the right operand. Lane 4 n + t holds byte
 * plane n & 1 of inputs 32 t .. 32 t + 31, as far as column n is of their group. */
struct Slice {
    uint32_t first[8];  /* rows 0 and 1 of each four (columns 0 to 3): even inputs, odd inputs */
    uint32_t second[8]; /* rows 2 and 3 (columns 4 to 7) */
    float scale;        /* of group t & 1, divided by 16 */
    float sum;          /* of the inputs of group t & 1 */
};

constexpr float QMAX = 32630.0f; /* 127 * 256 + 127, less what a quick division may be off */

/* Splits an integer within +-QMAX into its two signed bytes. */
__device__ __forceinline__ void split(int q, int &high, int &low) {
    high = (q + 128) >> 8;
    low = q - (high << 8);
}

__device__ __forceinline__ uint32_t pack4(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm((uint32_t)a, (uint32_t)b, 0x0040),
                       __byte_perm((uint32_t)c, (uint32_t)d, 0x0040), 0x5410);
}

/* A slice on its way to the operand: two planes of 32 words (4 inputs each), the groups' scales and
 * sums. */
struct Quantised {
    uint32_t plane[2][32];
    float scale[2], sum[2];
};

/* x: inputs 4 lane .. 4 lane + 3 of the slice. One scale for the slice: finer ones gain little. */
__device__ __forceinline__ void quantise(const float (&x)[4], Quantised &out) {
    int lane = threadIdx.x & 31;
    float top = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top)));
    float inverse = top > 0 ? __fdividef(QMAX, top) : 0.0f;
    int high[4], low[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int q = __float2int_rn(x[i] * inverse);
        split(q, high[i], low[i]);
        sum += q;
    }
    out.plane[0][lane] = pack4(high[0], high[1], high[2], high[3]);
    out.plane[1][lane] = pack4(low[0], low[1], low[2], low[3]);
    /* Of the rounded inputs, so that the bias takes back what it should of the codes' mean. */
    int first = __reduce_add_sync(~0u, lane < 16 ? sum : 0);
    int second = __reduce_add_sync(~0u, lane < 16 ? 0 : sum);
    if (lane < 2) {
        float step = top * (1.0f / QMAX);
        out.scale[lane] = step * 0.0625f;
        out.sum[lane] = (float)(lane ? second : first) * step;
    }
}

__device__ __forceinline__ void take_slice(const Quantised &from, Slice &out) {
    int lane = threadIdx.x & 31, n = lane >> 2, t = lane & 3;
    const uint4 *plane = reinterpret_cast<const uint4 *>(from.plane[n & 1] + 8 * t);
    uint4 p = plane[0], r = plane[1];
    bool mine = ((n >> 1) & 1) == (t >> 1);
    uint32_t v[8] = {__byte_perm(p.x, p.y, 0x6420), __byte_perm(p.z, p.w, 0x6420),
                     __byte_perm(r.x, r.y, 0x6420), __byte_perm(r.z, r.w, 0x6420),
                     __byte_perm(p.x, p.y, 0x7531), __byte_perm(p.z, p.w, 0x7531),
                     __byte_perm(r.x, r.y, 0x7531), __byte_perm(r.z, r.w, 0x7531)};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        out.first[i] = mine && n < 4 ? v[i] : 0;
        out.second[i] = mine && n >= 4 ? v[i] : 0;
    }
    out.scale = from.scale[t & 1];
    out.sum = from.sum[t & 1];
}

/* Wide tiles times a slice: the lane's row of 32 of each. */
template <int N>
__device__ __forceinline__ void wide_tiles(const unsigned char *const (&tile)[N], const Slice &x,
                                           float (&y)[N]) {
    const int lane = threadIdx.x & 31;
    int even[N][4] = {}, odd[N][4] = {}; /* odd inputs' codes are 16-fold */
    constexpr uint32_t M = 0x0f0f0f0fu, O = 0xf0f0f0f0u;
#pragma unroll
    for (int set = 0; set < 2; set++) {
        const uint32_t(&b)[8] = set ? x.second : x.first;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint4 *codes = reinterpret_cast<const uint4 *>(tile[i]) + lane;
            uint4 p = codes[64 * set], q = codes[64 * set + 32];
            mma(even[i], p.x & M, q.x & M, p.y & M, q.y & M, b[0], b[1]);
            mma(odd[i], p.x & O, q.x & O, p.y & O, q.y & O, b[4], b[5]);
            mma(even[i], p.z & M, q.z & M, p.w & M, q.w & M, b[2], b[3]);
            mma(odd[i], p.z & O, q.z & O, p.w & O, q.w & O, b[6], b[7]);
        }
    }
    const bool upper = lane & 1;
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint2 pair = reinterpret_cast<const uint2 *>(tile[i] + TILE_CODES)[lane];
        int sum0 = (even[i][0] * 16 + odd[i][0]) * 256 + (even[i][1] * 16 + odd[i][1]);
        int sum1 = (even[i][2] * 16 + odd[i][2]) * 256 + (even[i][3] * 16 + odd[i][3]);
        float y0 = fmaf(bf16_low(pair.x) * x.scale, (float)sum0, bf16_high(pair.x) * x.sum);
        float y1 = fmaf(bf16_low(pair.y) * x.scale, (float)sum1, bf16_high(pair.y) * x.sum);
        float other = __shfl_xor_sync(~0u, upper ? y0 : y1, 1);
        y[i] = (upper ? y1 : y0) + other;
    }
}
__device__ __forceinline__ float wide_tile(const unsigned char *tile, const Slice &x) {
    const unsigned char *const tiles[1] = {tile};
    float y[1];
    wide_tiles(tiles, x, y);
    return y[0];
}

/* One byte tile: rows 2 (lane / 4) + lane % 2, in lanes whose t is 0 or 1. */
__device__ __forceinline__ float byte_tile(const unsigned char *tile, const Slice &x) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint4 *codes = reinterpret_cast<const uint4 *>(tile) + lane;
    int c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 p = codes[32 * half], q = codes[64 + 32 * half];
        uint32_t e0 = x.first[2 * half], e1 = x.first[2 * half + 1];
        uint32_t o0 = x.first[4 + 2 * half], o1 = x.first[5 + 2 * half];
        mma(c, p.x, q.x, p.y, q.y, __byte_perm(e0, o0, 0x5140), __byte_perm(e0, o0, 0x7362));
        mma(c, p.z, q.z, p.w, q.w, __byte_perm(e1, o1, 0x5140), __byte_perm(e1, o1, 0x7362));
    }
    uint2 pair = reinterpret_cast<const uint2 *>(tile + TILE_CODES)[2 * g + (t & 1)];
    float scale = x.scale * 16.0f;
    float y0 =
        fmaf(bf16_low(pair.x) * scale, (float)(c[0] * 256 + c[1]), bf16_high(pair.x) * x.sum);
    float y1 =
        fmaf(bf16_low(pair.y) * scale, (float)(c[2] * 256 + c[3]), bf16_high(pair.y) * x.sum);
    bool upper = lane & 1;
    float other = __shfl_xor_sync(~0u, upper ? y0 : y1, 1);
    return (upper ? y1 : y0) + other;
}

/* One score tile: rows as of a byte tile. A code is 256 signed upper + unsigned lower byte. */
__device__ __forceinline__ float score_tile(const unsigned char *tile, const Slice &x) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint4 *upper = reinterpret_cast<const uint4 *>(tile) + lane;
    const uint4 *lower = reinterpret_cast<const uint4 *>(tile + TILE_SCORE_PLANE) + lane;
    int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 p = upper[32 * i], q = lower[32 * i];
        mma_signed(c, p, x.first[2 * i], x.first[2 * i + 1]);
        mma(d, q.x, q.y, q.z, q.w, x.first[2 * i], x.first[2 * i + 1]);
    }
    float2 scale = reinterpret_cast<const float2 *>(tile + 2 * TILE_SCORE_PLANE)[2 * g + (t & 1)];
    float y0 = fmaf((float)c[0], 65536.0f, (float)((c[1] + d[0]) * 256 + d[1])) * scale.x;
    float y1 = fmaf((float)c[2], 65536.0f, (float)((c[3] + d[2]) * 256 + d[3])) * scale.y;
    const bool odd = lane & 1;
    float other = __shfl_xor_sync(~0u, odd ? y0 : y1, 1);
    return ((odd ? y1 : y0) + other) * (x.scale * 16.0f);
}

/* 32 activations for down tiles, one a lane. */
struct Narrow {
    uint32_t even0, even1, odd0, odd1;
    float scale, sum;
};

__device__ __forceinline__ void make_narrow(float x, unsigned char *scratch, Narrow &out) {
    int lane = threadIdx.x & 31, n = lane >> 2, t = lane & 3;
    float top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(x))));
    int high, low, q = __float2int_rn(x * (top > 0 ? __fdividef(QMAX, top) : 0.0f));
    int sum = __reduce_add_sync(~0u, q);
    split(q, high, low);
    __syncwarp();
    scratch[lane] = (unsigned char)high;
    scratch[32 + lane] = (unsigned char)low;
    __syncwarp();
    uint2 p = reinterpret_cast<const uint2 *>(scratch + 32 * (n & 1))[t];
    uint32_t even = __byte_perm(p.x, p.y, 0x6420), odd = __byte_perm(p.x, p.y, 0x7531);
    int column = n >> 1;
    out.even0 = column == 0 ? even : 0;
    out.even1 = column == 1 ? even : 0;
    out.odd0 = column == 2 ? odd : 0;
    out.odd1 = column == 3 ? odd : 0;
    out.scale = top * (1.0f / QMAX / 16.0f);
    out.sum = (float)sum * (out.scale * 16.0f);
}

/* Set 0..3 of a down tile (32 rows): the lane's row. */
__device__ __forceinline__ float down_set(const unsigned char *tile, int set, const Narrow &x) {
    int lane = threadIdx.x & 31;
    uint4 p = reinterpret_cast<const uint4 *>(tile)[32 * set + lane];
    constexpr uint32_t M = 0x0f0f0f0fu, N = 0xf0f0f0f0u;
    int c[4] = {0, 0, 0, 0};
    mma(c, p.x & M, p.y & M, p.z & M, p.w & M, x.even0, x.even1);
    mma(c, p.x & N, p.y & N, p.z & N, p.w & N, x.odd0, x.odd1);
    int sum0 = c[0] * 256 + c[1], sum1 = c[2] * 256 + c[3];
    bool odd = lane & 2; /* this lane's sums are of odd inputs, 16-fold */
    int other = __shfl_xor_sync(~0u, odd ? sum0 : sum1, 2);
    int sum = odd ? other * 16 + sum1 : sum0 * 16 + other;
    uint32_t pair = reinterpret_cast<const uint32_t *>(tile + TILE_CODES)[32 * set + lane];
    return fmaf(bf16_low(pair) * x.scale, (float)sum, bf16_high(pair) * x.sum);
}

} /* namespace decode */

#endif
