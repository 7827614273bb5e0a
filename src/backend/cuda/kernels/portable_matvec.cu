/* Decode: a quantised matrix times one to BATCH rows in float32. A warp computes two outputs at a
 * time; lane l takes eight columns in every 256. With q the codes of a group of columns,
 *   sum (s q + b) x = s sum q x + b sum x,
 * and sum q x is taken from 128 + q, whose float32 is made of a code's bits without a conversion.
 * An output's sum has one order, whatever the batch. */
#include "common.cuh"

enum { MV_THREADS = 256, MV_WARPS = MV_THREADS / 32 };

/* acc[b] += this lane's part of row . x[b], x [BATCH][cols] in shared memory. */
template <int BATCH, int ROWS>
__device__ __forceinline__ void lane_products(const cuda_mat *const (&mat)[ROWS],
                                              const int64_t (&row)[ROWS], const float *x,
                                              float (&acc)[ROWS][BATCH]) {
    int lane = threadIdx.x % 32, cols = mat[0]->cols;
#pragma unroll 8
    for (int first = lane * 8; first < cols; first += 256) {
        float scale[ROWS], bias[ROWS], q[ROWS][8], offset[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const cuda_mat &m = *mat[r];
            int64_t group = row[r] * (cols / 64) + first / 64;
            scale[r] = bf16_float(__ldg(m.scales + group));
            bias[r] = bf16_float(__ldg(m.biases + group));
            if (m.bits == 4) {
                uint32_t word = __ldg((const uint32_t *)(m.codes + (row[r] * cols + first) / 2));
                offset[r] = 128.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) q[r][i] = code_128(word, i);
            } else {
                uint2 word = __ldg((const uint2 *)(m.codes + row[r] * cols + first));
                offset[r] = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    q[r][i] = (float)((i < 4 ? word.x : word.y) >> (8 * (i % 4)) & 255);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const float4 *from = (const float4 *)(x + b * cols + first);
            float4 lo = from[0], hi = from[1];
            float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
            float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) dot = fmaf(q[r][i], v[i], dot);
                dot = fmaf(-offset[r], sum, dot);
                acc[r][b] = fmaf(scale[r], dot, fmaf(bias[r], sum, acc[r][b]));
            }
        }
    }
}

/* Rows [first, first + BATCH) of x[n][cols] into shared memory; rows from n on are zeros. */
template <int BATCH>
__device__ __forceinline__ void take_rows(const float *x, int cols, int first, int n,
                                          float *shared) {
    for (int i = threadIdx.x; i < BATCH * cols / 4; i += MV_THREADS) {
        int b = i / (cols / 4);
        float4 v = make_float4(0, 0, 0, 0);
        if (first + b < n) v = ((const float4 *)(x + (int64_t)first * cols))[i];
        ((float4 *)shared)[i] = v;
    }
    __syncthreads();
}

/* out[b][row] = w[row] . x[b]: x [n][w.cols], out [n][ldo]; input is shared memory for BATCH rows.
 * Grid: any x, batches in y. */
template <int BATCH>
__device__ void product(const cuda_mat &w, const float *x, float *out, int ldo, int n,
                        float *input) {
    int first = blockIdx.y * BATCH, warp = threadIdx.x / 32;
    take_rows<BATCH>(x, w.cols, first, n, input);
    for (int64_t r = ((int64_t)blockIdx.x * MV_WARPS + warp) * 2; r < w.rows;
         r += (int64_t)gridDim.x * MV_WARPS * 2) {
        const cuda_mat *mats[2] = {&w, &w};
        int64_t row[2] = {r, r + 1 < w.rows ? r + 1 : r};
        float acc[2][BATCH] = {};
        lane_products<BATCH, 2>(mats, row, input, acc);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                float sum = warp_sum(acc[i][b]);
                if (threadIdx.x % 32 == 0 && first + b < n && r + i < w.rows) {
                    out[(int64_t)(first + b) * ldo + r + i] = sum;
                }
            }
    }
}

KERNEL __launch_bounds__(MV_THREADS)
    matvec_1(cuda_mat w, const float *x, float *out, int ldo, int n) {
    DYNAMIC_SHARED(float, input);
    product<1>(w, x, out, ldo, n, input);
}
/* ---- experts --------------------------------------------------------------------------------- */

/* hidden[slot][choice][i] = silu(gate x) * (up x), x the slot's row, for its chosen experts
 * (choice < TOP_K) and the shared one (choice TOP_K). Grid: i in x, choices in y, slots in z. */
KERNEL __launch_bounds__(MV_THREADS)
    slot_experts_up(cuda_mat gate, cuda_mat up, cuda_mat shared_gate, cuda_mat shared_up,
                    const float *routing, const float *x, float *hidden) {
    DYNAMIC_SHARED(float, input);
    enum { WIDTH = INNER > SHARED ? INNER : SHARED };
    int slot = blockIdx.z, choice = blockIdx.y, warp = threadIdx.x / 32;
    bool shared = choice == TOP_K;
    int width = shared ? SHARED : INNER;
    int64_t first = shared ? 0 : (int64_t)(int)routing[slot * 2 * TOP_K + choice] * INNER;
    take_rows<1>(x + (int64_t)slot * H, H, 0, 1, input);
    for (int i = blockIdx.x * MV_WARPS + warp; i < width; i += gridDim.x * MV_WARPS) {
        const cuda_mat *mats[2] = {shared ? &shared_gate : &gate, shared ? &shared_up : &up};
        int64_t row[2] = {first + i, first + i};
        float acc[2][1] = {};
        lane_products<1, 2>(mats, row, input, acc);
        float g = warp_sum(acc[0][0]), u = warp_sum(acc[1][0]);
        if (threadIdx.x % 32 == 0) {
            hidden[((int64_t)slot * (TOP_K + 1) + choice) * WIDTH + i] = silu(g) * u;
        }
    }
}

/* out[slot][h] = sum over choices of weight * down hidden, in order of choice; shared[slot][h] = the
 * shared expert's, times its gate; x[slot][h] += both. Grid: h in x, slots in y. */
KERNEL __launch_bounds__(MV_THREADS)
    slot_experts_down(cuda_mat down, cuda_mat shared_down, const float *routing,
                      const float *scores, const float *hidden, float *x, float *out,
                      float *shared) {
    DYNAMIC_SHARED(float, input);
    enum { WIDTH = INNER > SHARED ? INNER : SHARED };
    int slot = blockIdx.y, warp = threadIdx.x / 32;
    const float *route = routing + slot * 2 * TOP_K;
    take_rows<1>(hidden + (int64_t)slot * (TOP_K + 1) * WIDTH, (TOP_K + 1) * WIDTH, 0, 1, input);
    float gate = sigmoid(scores[(int64_t)slot * (EXPERTS + 1) + EXPERTS]);
    for (int h = (blockIdx.x * MV_WARPS + warp) * 2; h < H; h += gridDim.x * MV_WARPS * 2) {
        float sum[2] = {}, extra[2];
        const cuda_mat *mats[2] = {&down, &down};
        for (int j = 0; j < TOP_K; j++) {
            int64_t first = (int64_t)(int)route[j] * H;
            int64_t row[2] = {first + h, first + h + 1};
            float acc[2][1] = {};
            lane_products<1, 2>(mats, row, input + j * WIDTH, acc);
            for (int i = 0; i < 2; i++) sum[i] = fmaf(route[TOP_K + j], warp_sum(acc[i][0]), sum[i]);
        }
        mats[0] = mats[1] = &shared_down;
        int64_t row[2] = {h, h + 1};
        float acc[2][1] = {};
        lane_products<1, 2>(mats, row, input + TOP_K * WIDTH, acc);
        for (int i = 0; i < 2; i++) extra[i] = gate * warp_sum(acc[i][0]);
        if (threadIdx.x % 32 < 2) {
            int i = threadIdx.x % 32;
            int64_t at = (int64_t)slot * H + h + i;
            float routed = i ? sum[1] : sum[0], always = i ? extra[1] : extra[0];
            out[at] = routed;
            shared[at] = always;
            x[at] += routed + always;
        }
    }
}
