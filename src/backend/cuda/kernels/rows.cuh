/* Where the rows of a product lie, and which rows a block of a grouped product takes. */
#ifndef LILY_CUDA_ROWS_CUH
#define LILY_CUDA_ROWS_CUH

#include "common.cuh"

/* Rows of one expert that a block multiplies: places [first, first + rows) of the sorted pairs. */
struct expert_block {
    int expert, first, rows;
};

/* Block b of a grouped product of that tile height (cuda_groups); no rows: there is no such block.
 */
__device__ __forceinline__ expert_block block_of(const cuda_groups &g, int b, int height) {
    expert_block out = {0, b * height, 0};
    if (!g.begin) {
        out.rows = min(height, g.n_rows - out.first);
    } else if (b < *g.n_blocks) {
        int entry = g.blocks[b];
        out.expert = entry >> 16;
        out.first = g.begin[out.expert] + (entry & 0xffff) * height;
        out.rows = min(height, g.begin[out.expert + 1] - out.first);
    }
    return out;
}

/* Where row m of a tile lies. NULL: there is none, zeros are used. */
struct dense_rows {
    const bf16 *a;
    int cols, first, end;
    __device__ const bf16 *row(int m) const {
        return first + m < end ? a + (int64_t)(first + m) * cols : nullptr;
    }
};
struct gathered_rows {
    const bf16 *a;
    int cols;
    const int32_t *pairs;
    int first, n;
    __device__ const bf16 *row(int m) const {
        if (m >= n) return nullptr;
        int r = pairs ? pairs[first + m] / TOP_K : first + m;
        return a + (int64_t)r * cols;
    }
};

#endif
