/* Who does what: this block's share of every stage, and the order of its stream of chunks. Producer
 * and consumers derive the same numbers from the same functions. */
#ifndef LILY_CUDA_DECODE_PLAN_CUH
#define LILY_CUDA_DECODE_PLAN_CUH

#include "decode_core.cuh"

namespace decode {

__device__ __forceinline__ Share share_of(int row_tiles) {
    int b = blockIdx.x, n = gridDim.x;
    int first = (int)((long long)row_tiles * b / n);
    return {first, (int)((long long)row_tiles * (b + 1) / n) - first};
}

__device__ __forceinline__ bool is_attention(int layer) {
    return (layer + 1) % SHAPE_ATTENTION_EVERY == 0;
}

/* Row tiles of the product that begins layer `layer`; after the last layer comes the head. */
__device__ __forceinline__ Share project_share(const Shared &s, int layer, int n_layers) {
    return s.project[layer == n_layers ? 2 : is_attention(layer)];
}

__device__ __forceinline__ int project_chunks(const Shared &s, int layer, int n_layers) {
    return chunks(project_share(s, layer, n_layers).n * SLICES, SLOT_TILES);
}

/* Output projection: block 4 s + q has rows of quarter q of slice s. */
__device__ __forceinline__ bool has_out(int layer) {
    int slices = is_attention(layer) ? QDIM / 128 : VHEADS;
    return (int)blockIdx.x < OUT_PARTS * slices;
}

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

__device__ __forceinline__ int context_chunks(const Context &c) {
    return (c.mine + KV_TOKENS - 1) / KV_TOKENS;
}

__device__ __forceinline__ int mixer_chunks(const Shared &s, int layer) {
    if (is_attention(layer)) return context_chunks(s.context) + (has_out(layer) ? OUT_CHUNKS : 0);
    return has_out(layer) ? STATE_SLOTS + OUT_CHUNKS : 0;
}

/* Router and the shared expert's first half: one row tile in each of the first blocks. */
__device__ __forceinline__ int route_chunks() {
    int b = blockIdx.x;
    if (b < SHARED_TILES) return chunks(SLICES, SLOT_TILES);
    return b < SHARED_TILES + ROUTER_TILES ? chunks(SLICES, BYTE_PER_SLOT) : 0;
}

/* The shared expert's second half goes to the blocks that no routed expert needs. */
__device__ __forceinline__ Share find_shared_slices() {
    int blocks = min((int)gridDim.x - ROUTED_JOBS, SHARED_SLICES);
    int j = (int)blockIdx.x - ROUTED_JOBS;
    if (j < 0 || j >= blocks) return {0, 0};
    int first = SHARED_SLICES * j / blocks;
    return {first, SHARED_SLICES * (j + 1) / blocks - first};
}

__device__ __forceinline__ int find_expert_chunks(const Shared &s) {
    if ((int)blockIdx.x < ROUTED_JOBS) return EXPERT_IN_CHUNKS + DOWN_CHUNKS;
    return s.shared_slices.n * DOWN_CHUNKS;
}

/* One thread, before all others read it. */
__device__ __forceinline__ void plan_block(Shared &s, int pos) {
    s.project[0] = share_of(row_tiles(GDN_ROWS));
    s.project[1] = share_of(row_tiles(ATTN_ROWS));
    s.project[2] = share_of(row_tiles(SHAPE_VOCAB));
    s.shared_slices = find_shared_slices();
    s.expert_chunks = find_expert_chunks(s);
    s.context = context_of(pos + 1);
}

/* The stream's order is the order of use with one exception: the first chunks of the next layer's
 * projection are fetched before the experts', whose addresses are not known until the router has
 * spoken. */
#ifndef DECODE_AHEAD
#define DECODE_AHEAD 4
#endif
constexpr int AHEAD = DECODE_AHEAD;

/* Both must fit into the ring: the experts' chunks are used up before the early ones. */
__device__ __forceinline__ int early_chunks(const Shared &s, int layer, int n_layers) {
    int room = max(0, SLOTS - (layer ? s.expert_chunks : 0));
    return min(project_chunks(s, layer, n_layers), min(AHEAD, room));
}

struct Stream {
    unsigned early, project, mixer, route, expert; /* first chunk of each part of this layer */
    int n_early, n_project, n_route;
    unsigned next_early; /* of the next layer */
};

/* Fills in the layer whose early chunks begin at `early` and whose other chunks at `rest`; returns
 * where the next layer's rest begins. */
__device__ __forceinline__ unsigned plan_layer(const Shared &s, Stream &st, int layer, int n_layers,
                                               unsigned early, unsigned rest) {
    st.early = early;
    st.project = rest;
    st.n_project = project_chunks(s, layer, n_layers);
    st.n_early = early_chunks(s, layer, n_layers);
    st.mixer = st.project + (unsigned)(st.n_project - st.n_early);
    st.next_early = st.mixer;
    if (layer == n_layers) return st.mixer;
    st.route = st.mixer + (unsigned)mixer_chunks(s, layer);
    st.n_route = route_chunks();
    st.next_early = st.route + (unsigned)st.n_route;
    st.expert = st.next_early + (unsigned)early_chunks(s, layer + 1, n_layers);
    return st.expert + (unsigned)s.expert_chunks;
}

__device__ __forceinline__ unsigned project_chunk(const Stream &s, int i) {
    return i < s.n_early ? s.early + (unsigned)i : s.project + (unsigned)(i - s.n_early);
}

__device__ __forceinline__ int stages_of(int layer) { return is_attention(layer) ? 5 : 4; }

} /* namespace decode */

#endif
