/* Mathematics: a token through all layers and the head: h += mixer(norm h); h += experts(norm h).
 * Layout: weights as tiles (tile.h); state float32 [heads][128][128]; KV bf16 [kv][context][256].
 * Threads: a block a multiprocessor, 16 consumer warps and a producer; a warp keeps 128 inputs.
 * Fused: all stages of a token. Agrees with ref: 3e-5 a product, mean KL of the logits below 1e-3.
 * Bytes: 1.76 GB at depth 0, 44 % of a plain read's 4,642 GB/s (bench/cuda-decode-h200.json).
 *
 * A decode step as one persistent kernel: all layers and the head for one token of one sequence,
 * one block on every multiprocessor. docs/cuda-decode.md explains the split and what limits it. */
#include "decode_producer.cuh"
#include "decode_product.cuh"

extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1)
    decode_step(const __grid_constant__ decode_args a) {
    using namespace decode;
    extern __shared__ __align__(128) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    int tid = threadIdx.x;
    if (tid == 0) {
        s.slot = a.slot;
    } else if (tid >= 64 && tid < 64 + (int)(sizeof(decode_layer) / 4)) {
        reinterpret_cast<uint32_t *>(&s.layers[0][0])[tid - 64] =
            reinterpret_cast<const uint32_t *>(a.layers)[tid - 64];
    } else if (tid >= 128 && tid < 128 + SHAPE_ROTARY_DIM / 2) {
        float angle = (float)a.slot.pos * __ldg(a.inv_freq + tid - 128);
        s.cosine[tid - 128] = cosf(angle);
        s.sine[tid - 128] = sinf(angle);
    } else if (tid >= 256 && tid < 256 + HEAD * 2 / 4) {
        reinterpret_cast<uint32_t *>(s.zeros)[tid - 256] = 0;
    } else if (tid >= 416 && tid < 419) {
        plan_block(s, tid - 416, a.slot.pos);
    } else if (tid == 448) {
        ring_init(s.full, s.empty, SLOTS, WARPS);
    }
    __syncthreads();
    /* The producer's warp comes in a group of four, whose registers go to the consumers. */
    if (tid >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (tid < THREADS + 32) produce(a, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        Worker w = {s, a, tid, tid & 31, tid >> 5, a.barrier, 0, {0, SLOTS, 0}, 0};
        consume(w);
    }
}
