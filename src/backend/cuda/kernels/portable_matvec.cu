/* Mathematics: out = W x; silu(gate x) (up x); sum of weight * down hidden, for one row a slot.
 * Layout: x, hidden [slot][choice][I] and out float32; W 4 or 8 bits, planar or tiles.
 * Threads: 256 a block, a warp two outputs, a lane eight columns in every 256; x in shared memory.
 * Fused: gate, up and SiLU; second halves, weighted sum, residual. Agrees with ref to 1e-4.
 * Bytes: 0.5 of 4.64 TB/s before 1,024 columns were loaded at once (docs/cuda.md); not timed since.
 *
 * Decode of one row: a quantised matrix times it in float32. A warp computes two outputs at a time;
 * lane l takes eight columns in every 256. With q the codes of a group of columns,
 *   sum (s q + b) x = s sum q x + b sum x,
 * and sum q x is taken from 128 + q, whose float32 is made of a code's bits without a conversion.
 */
#include "common.cuh"

enum { MV_THREADS = 256, MV_WARPS = MV_THREADS / 32 };

/* Eight columns' share of an output: sum is that of x, dot that of (offset + code) x. */
__device__ __forceinline__ float group_share(float dot, float sum, float offset, uint32_t factors,
                                             float acc) {
    dot = fmaf(-offset, sum, dot);
    float bias = __uint_as_float(factors & 0xffff0000u), scale = __uint_as_float(factors << 16);
    return fmaf(scale, dot, fmaf(bias, sum, acc));
}

/* acc[r] += this lane's part of row r . x, x [cols] in shared memory; 4-bit codes, those of 1,024
 * columns on their way at once. All matrices have one layout. */
template <int ROWS>
__device__ __forceinline__ void narrow_products(const cuda_mat *const (&mat)[ROWS],
                                                const int64_t (&row)[ROWS], const float *x,
                                                float (&acc)[ROWS]) {
    enum { AT_ONCE = 4 };
    int lane = threadIdx.x % 32, cols = mat[0]->cols;
    /* Its places in every 256 columns; all matrices lie alike. */
    const cuda_mat &m = *mat[0];
    int code = code_at(m, lane / 8) + code_sixteen(m, lane % 8 / 2) + lane % 2 * code_eight(m);
    int factor = factor_at(m, lane / 8);
    mat_row from[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        from[r] = row_of(*mat[r], row[r]);
        from[r].codes += code, from[r].scales += factor, from[r].biases += factor;
    }
    for (int base = lane * 8; base < cols; base += AT_ONCE * 256) {
        uint32_t word[AT_ONCE][ROWS], factors[AT_ONCE][ROWS];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                int first = base + u * 256;
                word[u][r] = factors[u][r] = 0;
                if (first >= cols) continue;
                int group = first / 256 * 4, at = factor_at(m, group);
                word[u][r] = __ldg((const uint32_t *)(from[r].codes + code_at(m, group)));
                factors[u][r] = __ldg(from[r].scales + at) | (uint32_t)__ldg(from[r].biases + at)
                                                                 << 16;
            }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            int first = base + u * 256;
            if (first >= cols) break;
            const float4 *from = (const float4 *)(x + first);
            float4 lo = from[0], hi = from[1];
            float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
            float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float dot = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) dot = fmaf(code_128(word[u][r], i), v[i], dot);
                acc[r] = group_share(dot, sum, 128.0f, factors[u][r], acc[r]);
            }
        }
    }
}

/* The same for any widths of codes. */
template <int ROWS>
__device__ __forceinline__ void wide_products(const cuda_mat *const (&mat)[ROWS],
                                              const int64_t (&row)[ROWS], const float *x,
                                              float (&acc)[ROWS]) {
    int lane = threadIdx.x % 32, cols = mat[0]->cols;
    for (int first = lane * 8; first < cols; first += 256) {
        const float4 *from = (const float4 *)(x + first);
        float4 lo = from[0], hi = from[1];
        float v[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
        float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const cuda_mat &m = *mat[r];
            mat_row from = row_of(m, row[r]);
            int at = factor_at(m, first / 64);
            uint32_t factors = __ldg(from.scales + at) | (uint32_t)__ldg(from.biases + at) << 16;
            from.codes += code_at(m, first / 64) + code_sixteen(m, first % 64 / 16) +
                          first % 16 / 8 * code_eight(m);
            float dot = 0;
            if (m.bits == 4) {
                uint32_t word = __ldg((const uint32_t *)from.codes);
#pragma unroll
                for (int i = 0; i < 8; i++) dot = fmaf((float)(word >> (4 * i) & 15), v[i], dot);
            } else {
                uint2 word = __ldg((const uint2 *)from.codes);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float code = (float)((i < 4 ? word.x : word.y) >> (8 * (i % 4)) & 255);
                    dot = fmaf(code, v[i], dot);
                }
            }
            acc[r] = group_share(dot, sum, 0.0f, factors, acc[r]);
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void lane_products(const cuda_mat *const (&mat)[ROWS],
                                              const int64_t (&row)[ROWS], const float *x,
                                              float (&acc)[ROWS]) {
    bool narrow = true;
    for (int r = 0; r < ROWS; r++) {
        narrow = narrow && mat[r]->bits == 4 && mat[r]->layout == mat[0]->layout;
    }
    if (narrow)
        narrow_products<ROWS>(mat, row, x, acc);
    else
        wide_products<ROWS>(mat, row, x, acc);
}

/* A row x[cols] into shared memory. */
__device__ __forceinline__ void take_row(const float *x, int cols, float *shared) {
    for (int i = threadIdx.x; i < cols / 4; i += MV_THREADS) {
        ((float4 *)shared)[i] = ((const float4 *)x)[i];
    }
    __syncthreads();
}

/* out[b][row] = w[row] . x[b]: x [][w.cols], out [][ldo]. Grid: any x, rows b in y. */
KERNEL __launch_bounds__(MV_THREADS, TILED ? 4 : 5)
    matvec_1(cuda_mat w, const float *x, float *out, int ldo) {
    DYNAMIC_SHARED(float, input);
    int64_t b = blockIdx.y, warp = threadIdx.x / 32;
    expect_layout(w);
    take_row(x + b * w.cols, w.cols, input);
    for (int64_t r = (blockIdx.x * (int64_t)MV_WARPS + warp) * 2; r < w.rows;
         r += (int64_t)gridDim.x * MV_WARPS * 2) {
        const cuda_mat *mats[2] = {&w, &w};
        int64_t row[2] = {r, r + 1 < w.rows ? r + 1 : r};
        float acc[2] = {};
        lane_products<2>(mats, row, input, acc);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = warp_sum(acc[i]);
            if (threadIdx.x % 32 == 0 && r + i < w.rows) out[b * ldo + r + i] = sum;
        }
    }
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
    take_row(x + (int64_t)slot * H, H, input);
    for (int i = blockIdx.x * MV_WARPS + warp; i < width; i += gridDim.x * MV_WARPS) {
        const cuda_mat *mats[2] = {shared ? &shared_gate : &gate, shared ? &shared_up : &up};
        int64_t row[2] = {first + i, first + i};
        float acc[2] = {};
        lane_products<2>(mats, row, input, acc);
        float g = warp_sum(acc[0]), u = warp_sum(acc[1]);
        if (threadIdx.x % 32 == 0) {
            hidden[((int64_t)slot * (TOP_K + 1) + choice) * WIDTH + i] = silu(g) * u;
        }
    }
}

/* out[slot][h] = sum over choices of weight * down hidden, in order of choice; shared[slot][h] =
 * the shared expert's, times its gate; x[slot][h] += both. Grid: h in x, slots in y. */
KERNEL __launch_bounds__(MV_THREADS)
    slot_experts_down(cuda_mat down, cuda_mat shared_down, const float *routing,
                      const float *scores, const float *hidden, float *x, float *out,
                      float *shared) {
    DYNAMIC_SHARED(float, input);
    enum { WIDTH = INNER > SHARED ? INNER : SHARED };
    int slot = blockIdx.y, warp = threadIdx.x / 32;
    const float *route = routing + slot * 2 * TOP_K;
    take_row(hidden + (int64_t)slot * (TOP_K + 1) * WIDTH, (TOP_K + 1) * WIDTH, input);
    float gate = sigmoid(scores[(int64_t)slot * (EXPERTS + 1) + EXPERTS]);
    for (int h = (blockIdx.x * MV_WARPS + warp) * 2; h < H; h += gridDim.x * MV_WARPS * 2) {
        float sum[2] = {}, extra[2];
        const cuda_mat *mats[2] = {&down, &down};
        for (int j = 0; j < TOP_K; j++) {
            int64_t first = (int64_t)(int)route[j] * H;
            int64_t row[2] = {first + h, first + h + 1};
            float acc[2] = {};
            lane_products<2>(mats, row, input + j * WIDTH, acc);
            for (int i = 0; i < 2; i++) sum[i] = fmaf(route[TOP_K + j], warp_sum(acc[i]), sum[i]);
        }
        mats[0] = mats[1] = &shared_down;
        int64_t row[2] = {h, h + 1};
        float acc[2] = {};
        lane_products<2>(mats, row, input + TOP_K * WIDTH, acc);
        for (int i = 0; i < 2; i++) extra[i] = gate * warp_sum(acc[i]);
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
