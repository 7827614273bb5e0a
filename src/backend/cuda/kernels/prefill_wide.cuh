/* The tile of prefill_gemm.cu for long prompts: 128 outputs x 256 rows, one block a multiprocessor
 * that goes from tile to tile. What an unpacked weight costs is paid for 256 rows instead of 128,
 * and nothing waits at a barrier of the whole block: four warps copy activations into a ring, two
 * warpgroups of 64 outputs each take their own weights as in prefill_gemm.cuh and multiply. The
 * second of them begins a little later, so that one stores its results while the other multiplies.
 * Sums run over the inputs in the same order as in all other tiles: the same bits. */
#ifndef LILY_CUDA_PREFILL_WIDE_CUH
#define LILY_CUDA_PREFILL_WIDE_CUH

#include "prefill_gemm.cuh"

/* A stage is 64 inputs of all rows, a unit 128 inputs of a warpgroup's weights. */
enum { WIDE_ROWS = 256, WIDE_OUTPUTS = 128, WIDE_STAGES = PREFILL_WIDE_STAGES, WIDE_UNITS = 4 };
enum { WIDE_LEAD = WIDE_UNITS - 1, WIDE_COPIERS = 128, WIDE_THREADS = 3 * 128 };
enum { WIDE_STAGE = WIDE_ROWS * 128, WIDE_UNIT = 128 * 32, WIDE_FACTORS = 128 * 16 };
enum { WIDE_WEIGHTS = WIDE_UNITS * WIDE_UNIT + 2 * WIDE_FACTORS };
enum { WIDE_SIGNALS_AT = WIDE_STAGES * WIDE_STAGE + 2 * WIDE_WEIGHTS };
static_assert(WIDE_SIGNALS_AT + WIDE_STAGES * 16 + SHARED_SLACK == PREFILL_WIDE_SHARED,
              "what the host asks for");

/* Tiles of a product in turn: all rows of the first outputs, then of the next. */
struct wide_tiles {
    int of_rows, all;
    __device__ __forceinline__ wide_tiles(int outputs, int rows) {
        of_rows = (rows + WIDE_ROWS - 1) / WIDE_ROWS;
        all = outputs / WIDE_OUTPUTS * of_rows;
    }
    __device__ __forceinline__ int row(int tile) const { return tile % of_rows * WIDE_ROWS; }
    __device__ __forceinline__ int output(int tile) const { return tile / of_rows * WIDE_OUTPUTS; }
};

/* The ring's place of a stage and how often it has come round. */
struct wide_stage {
    shared_at ring;
    uint32_t at, turn;
    __device__ __forceinline__ shared_at full() const { return ring + WIDE_SIGNALS_AT + at * 16; }
    __device__ __forceinline__ shared_at empty() const { return full() + 8; }
    __device__ __forceinline__ shared_at rows() const { return ring + at * WIDE_STAGE; }
    __device__ __forceinline__ void next() {
        if (++at == WIDE_STAGES) at = 0, turn ^= 1;
    }
};

/* Signals of all stages: copied by so many threads, read by eight warps. */
__device__ __forceinline__ void wide_begin(wide_stage stage) {
    if (threadIdx.x < WIDE_STAGES) {
        stage.at = threadIdx.x;
        signal_init(stage.full(), WIDE_COPIERS);
        signal_init(stage.empty(), 8);
    }
    __syncthreads();
}

/* Copies activations: rows from the tile's first on; in the place of missing ones the last. */
__device__ __forceinline__ void wide_copy(wide_stage stage, const bf16 *x, int cols, int rows,
                                          const wide_tiles &tiles) {
    enum { EACH = WIDE_ROWS * 8 / 128 };
    int tid = (int)threadIdx.x % 128, parts = cols / 8;
    uint32_t own = part_at(tid / 8, tid % 8);
    for (int tile = blockIdx.x; tile < tiles.all; tile += (int)gridDim.x) {
        uint32_t from[EACH]; /* in 16 bytes */
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int row = min(tiles.row(tile) + tid / 8 + i * 16, rows - 1);
            from[i] = (uint32_t)(row * parts + tid % 8);
        }
        for (int round = 0; round < cols / 64; round++) {
            const uint4 *at = (const uint4 *)(x + round * 64);
            signal_wait(stage.empty(), stage.turn ^ 1);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                copy16(stage.rows() + own + (uint32_t)(i * 2048), at + from[i], true);
            }
            signal_when_copied(stage.full());
            stage.next();
        }
    }
    copy_wait_all();
}

/* What a warpgroup holds: of the product, and of its weights on their way. */
struct WideProduct {
    float acc[WIDE_ROWS / 2];
    uint32_t weights[2][2][4]; /* half a round each */
    weight_tiles w;            /* what is copied next */
    shared_at own;             /* this warpgroup's weights */
    uint32_t slot_read, slot_write;
    int unit_write, tile_write, units; /* of that tile; units of a tile */

    /* Copies the next unit of codes, and factors with every fourth; tiles follow one another. */
    __device__ __forceinline__ void fetch(const cuda_mat &m, const wide_tiles &tiles, int warp) {
        int tid = (int)threadIdx.x % 128;
        if (unit_write == units) {
            tile_write += (int)gridDim.x, unit_write = 0;
            if (tile_write < tiles.all) point(m, tiles, warp);
        }
        if (tile_write < tiles.all) {
            w.copy_codes<512>(own + slot_write * WIDE_UNIT + (uint32_t)tid * 16, 128 * 16);
            if (unit_write % 4 == 0) {
                w.copy_factors(own + WIDE_UNITS * WIDE_UNIT +
                               (uint32_t)(unit_write / 4 % 2 * WIDE_FACTORS + tid * 16));
            }
            unit_write++;
            slot_write = slot_write + 1 == WIDE_UNITS ? 0 : slot_write + 1;
        }
        copy_commit();
    }
    __device__ __forceinline__ void point(const cuda_mat &m, const wide_tiles &tiles, int warp) {
        w = weights_of<false>(m, m.codes, tiles.output(tile_write) + warp * 16);
    }

    __device__ __forceinline__ row_constants constants_of(int unit) const {
        int tid = (int)threadIdx.x % 128, lane = tid % 32;
        return load_constants(own + WIDE_UNITS * WIDE_UNIT +
                              (uint32_t)(unit / 4 % 2 * WIDE_FACTORS + tid / 32 * 512 +
                                         unit % 4 * 128 + lane / 4 * 16 + lane % 4 / 2 * 8));
    }
    __device__ __forceinline__ row_codes codes_of(int later) const {
        shared_at at = own + slot_read * WIDE_UNIT + (threadIdx.x % 128) * 16 + (uint32_t)later * 8;
        return {load_shared8(at), load_shared8(at + 2048)};
    }

    /* A round: the first half of its weights is unpacked already. before: the stage of the round
     * before, which has been read once this one's first half is under way. */
    template <bool FETCH>
    __device__ __forceinline__ void round(wide_stage &stage, const row_codes &c,
                                          const row_constants &k, bool free, shared_at before,
                                          const cuda_mat &m, const wide_tiles &tiles, int warp) {
        signal_wait(stage.full(), stage.turn);
        publish_shared();
        multiply_half(acc, weights[0], stage.rows(), 0);
        if (FETCH) fetch(m, tiles, warp);
        products_wait<1>();
        if (free && threadIdx.x % 32 == 0) signal_arrive(before);
        unpack_half(weights[1], c.first.y, c.second.y, k);
        multiply_half(acc, weights[1], stage.rows(), 1);
        products_wait<1>();
    }
};

/* Multiplies all tiles of the block; store(acc, row, output) takes each. */
template <class Store>
__device__ __forceinline__ void wide_multiply(wide_stage stage, const cuda_mat &m,
                                              const wide_tiles &tiles, const Store &store) {
    WideProduct p;
    int second = (int)threadIdx.x / 128 - 1, warp = (int)threadIdx.x / 32 - 4;
    p.own = stage.ring + (uint32_t)(WIDE_STAGES * WIDE_STAGE + second * WIDE_WEIGHTS);
    p.slot_read = p.slot_write = 0, p.unit_write = 0;
    p.tile_write = blockIdx.x, p.units = m.cols / 128;
    p.point(m, tiles, warp);
#pragma unroll
    for (int i = 0; i < WIDE_LEAD; i++) p.fetch(m, tiles, warp);
    if (second) { /* a few rounds later, see above */
        wide_stage later = stage;
        for (int i = 0; i < WIDE_STAGES - 1; i++) later.next();
        signal_wait(later.full(), later.turn);
    }
    for (int tile = blockIdx.x; tile < tiles.all; tile += (int)gridDim.x) {
#pragma unroll
        for (int i = 0; i < WIDE_ROWS / 2; i++) p.acc[i] = 0;
        shared_at before = 0;
        for (int unit = 0; unit < p.units; unit++) {
            copy_wait<WIDE_LEAD - 1>();
            __syncwarp(); /* constants are copied by other lanes */
            row_constants k = p.constants_of(unit);
            row_codes c = p.codes_of(0);
            unpack_half(p.weights[0], c.first.x, c.second.x, k);
            p.round<true>(stage, c, k, unit > 0, before, m, tiles, warp);
            before = stage.empty();
            stage.next();
            c = p.codes_of(1);
            unpack_half(p.weights[0], c.first.x, c.second.x, k);
            p.round<false>(stage, c, k, true, before, m, tiles, warp);
            before = stage.empty();
            stage.next();
            p.slot_read = p.slot_read + 1 == WIDE_UNITS ? 0 : p.slot_read + 1;
        }
        products_wait<0>();
        hold(p.acc);
        if (threadIdx.x % 32 == 0) signal_arrive(before);
        store(p.acc, tiles.row(tile), tiles.output(tile) + warp * 16);
    }
}

#endif
