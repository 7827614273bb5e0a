/* Who does what: this block's share of every stage, and the order of its stream of chunks. Producer
 * and consumers derive the same numbers from the same functions. */
#ifndef LILY_CUDA_DECODE_PLAN_CUH
#define LILY_CUDA_DECODE_PLAN_CUH

#include "decode_core.cuh"

namespace decode {

__device__ __forceinline__ Share share_of(int row_tiles) {
    int b = blockIdx.x, n = gridDim.x;
    int first = row_tiles * b / n; /* at most 8,192 x 256 */
    return {first, row_tiles * (b + 1) / n - first};
}

__device__ __forceinline__ bool is_attention(int layer) {
    return (layer + 1) % SHAPE_ATTENTION_EVERY == 0;
}

/* Which layer of its kind. */
__device__ __forceinline__ int kind_index(int layer) {
    int before = layer / SHAPE_ATTENTION_EVERY;
    return is_attention(layer) ? before : layer - before;
}

/* Output projection: block 4 s + q has rows of quarter q of slice s, and the quarter's scores. */
__device__ __forceinline__ bool has_out(bool attention) {
    return (int)blockIdx.x < OUT_PARTS * (attention ? ATTN_SLICES : GDN_SLICES);
}

/* The router times the residual stream before the mixer: tiles [ROUTER_JOB b, ROUTER_JOB (b + 1)),
 * which are slices of the same rows. */
__device__ __forceinline__ bool has_router() {
    return (int)blockIdx.x < ROUTER_JOBS;
}

/* Each of the two adds to a score, by slices: of out's inputs, of the residual stream. */
__device__ __forceinline__ unsigned score_contributions(bool attention) {
    return (attention ? ATTN_SLICES : GDN_SLICES) + SLICES;
}
static_assert(ATTN_SLICES + SLICES <= COUNTED && GDN_SLICES + SLICES <= COUNTED, "can be counted");

constexpr int ATTN_STEP = 64;

__device__ __forceinline__ Context context_of(int n) {
    Context c;
    c.n = n;
    c.span = (int)gridDim.x / KV_HEADS;
    c.rows = (n + c.span - 1) / c.span;
    c.rows = (c.rows + KV_TOKENS - 1) / KV_TOKENS * KV_TOKENS;
    if (c.rows < ATTN_STEP) c.rows = ATTN_STEP;
    c.groups = (n + c.rows - 1) / c.rows;
    c.kv = (int)blockIdx.x / c.span;
    c.group = (int)blockIdx.x % c.span;
    c.first = c.group * c.rows;
    c.mine = c.kv < KV_HEADS && c.group < c.groups ? min(c.rows, n - c.first) : 0;
    return c;
}

/* The shared expert's second half goes to the blocks that no routed expert needs. */
__device__ __forceinline__ Share find_shared_slices() {
    int blocks = min((int)gridDim.x - ROUTED_JOBS, SHARED_SLICES);
    int j = (int)blockIdx.x - ROUTED_JOBS;
    if (j < 0 || j >= blocks) return {0, 0};
    int first = SHARED_SLICES * j / blocks;
    return {first, SHARED_SLICES * (j + 1) / blocks - first};
}

/* Three threads, i = 0, 1, 2, before all others read it. */
__device__ __forceinline__ void plan_block(Shared &s, int i, int pos) {
    Share share = share_of(row_tiles(i == 0 ? GDN_ROWS : i == 1 ? ATTN_ROWS : SHAPE_VOCAB));
    s.project[i] = share;
    s.project_chunks[i] = chunks(share.n * SLICES, SLOT_TILES);
    if (i == 0) s.shared_slices = find_shared_slices();
    if (i == 1) s.context = context_of(pos + 1);
}

/* Slots. A layer's projection takes slots 0, 1, 2 ... in turn, and so do the router's tiles and a
 * context; all else has slots of its own, so that nothing waits for a chunk that is left later:
 * the state the last four, scores and output projection those before, which the projection leaves;
 * the shared expert's first half the last of the first four. The experts, whose addresses are known
 * before that is multiplied, take turns in all others, and the next projection begins at 0. */
constexpr int EARLY = 4;
constexpr int SHARED_SLOT = EARLY - SHARED_CHUNKS, OUT_SLOT = EARLY;
constexpr int STATE_SLOT = SLOTS - STATE_SLOTS;
/* Chunks of the next projection that come before the experts, while the scores are waited for. */
__device__ __forceinline__ int early_chunks() {
    return (int)blockIdx.x <= SHARED_TILES ? SHARED_SLOT : EARLY;
}
constexpr int EXPERT_SLOTS = SLOTS - EARLY;
static_assert(EXPERT_IN_CHUNKS + DOWN_CHUNKS <= EXPERT_SLOTS, "a routed expert fits");
static_assert(SHARED_SLOT >= 0 && OUT_SLOT + 1 + OUT_CHUNKS <= STATE_SLOT, "all apart");

} /* namespace decode */

#endif
