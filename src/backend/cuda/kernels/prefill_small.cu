/* Mathematics: out [n][N] = X [n][K] W^T near float32 accuracy, X = high + low, codes exact.
 * Layout: high and low bf16 [n][K] in decisive order, sums float32; out float32 [parts][n][N].
 * Threads: all outputs in one block, 64 a warpgroup (wgmma); 16, 32 or 64 rows.
 * Fused: unpacking; scales and biases on sums of 64. Agrees with ref to 2.6e-6 of the output.
 * Bytes: 4,096 rows: router 21, beta and decay 25 % of the bound (bench/cuda-prompt-h200.json).
 *
 * Products of a prompt chunk whose results decide something (which experts, how much to forget),
 * near float32 accuracy: activations are the sum of two bf16, 16 significant bits, and weights are
 * exact, because what the tensor cores multiply are their codes, small whole numbers. Scales and
 * biases are applied to the sums of a group of 64 inputs, in float32:
 *   out = sum over groups of scale * (codes . x) + bias * (sum of x)
 * Activations lie in the order of decisive_input (prefill_common.cuh), so that the sixteen codes of
 * a row that a thread loads at once are those it multiplies. */
#include "prefill_common.cuh"

/* Sixteen codes of each of a thread's two rows in a group, a byte each, less the middle of their
 * range once they are numbers. */
struct decisive_codes {
    uint4 words[2];
    float scale[2], bias[2];
};

/* Eight 4-bit codes as bytes. */
__device__ __forceinline__ void widen(uint32_t word, uint32_t &first, uint32_t &second) {
    uint32_t even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
    first = __byte_perm(even, odd, 0x5140);
    second = __byte_perm(even, odd, 0x7362);
}

/* Where a thread's first row lies, and how much further its second, and biases from scales. */
struct decisive_rows {
    const uint8_t *codes;
    const uint16_t *scales;
    int next_codes, next_scales, biases;
};
__device__ __forceinline__ decisive_rows rows_from(const cuda_mat &w, int row, int sixteen) {
    mat_row at = row_of(w, row), next = row_of(w, row + 1 < w.rows ? row + 1 : row);
    return {at.codes + code_sixteen(w, sixteen), at.scales, (int)(next.codes - at.codes),
            (int)(next.scales - at.scales), (int)(at.biases - at.scales)};
}

__device__ __forceinline__ void load_decisive(decisive_codes &c, const cuda_mat &w,
                                              const decisive_rows &from, int group) {
    const uint8_t *codes = from.codes + code_at(w, group);
    const uint16_t *scales = from.scales + factor_at(w, group);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (w.bits == 4) {
            uint2 two = __ldg((const uint2 *)codes);
            widen(two.x, c.words[i].x, c.words[i].y);
            widen(two.y, c.words[i].z, c.words[i].w);
        } else {
            c.words[i] = __ldg((const uint4 *)codes);
        }
        c.scale[i] = bf16_float(__ldg(scales));
        c.bias[i] = bf16_float(__ldg(scales + from.biases));
        codes += from.next_codes;
        scales += from.next_scales;
    }
}

/* Bytes `first` and the next of a word as bf16; magic: 2^23 and the middle of the range. */
__device__ __forceinline__ uint32_t numbers(uint32_t word, int first, float magic) {
    const uint32_t exponent = 0x4b000000u; /* of 2^23: the byte is the last of the fraction */
    float a = __uint_as_float(__byte_perm(word, exponent, 0x7650 + first)) - magic;
    float b = __uint_as_float(__byte_perm(word, exponent, 0x7651 + first)) - magic;
    return bf16_pair(a, b);
}

/* Activations of a group, both halves of N rows; rows from `rows` on repeat the last. */
template <int N>
__device__ __forceinline__ void fetch_decisive(shared_at to, const bf16 *high, const bf16 *low,
                                               int cols, int group, int n0, int rows) {
    for (int i = threadIdx.x; i < 2 * N * 8; i += blockDim.x) {
        int second = i / (N * 8), n = i % (N * 8) / 8, part = i % 8;
        const bf16 *from = (second ? low : high) + (int64_t)min(n0 + n, rows - 1) * cols;
        copy16(to + (uint32_t)(second * N * 128) + part_at(n, part), from + group * 64 + part * 8,
               true);
    }
}

/* part = codes times both halves of a group's activations, queued. */
template <int N>
__device__ __forceinline__ void multiply_group(float (&part)[N / 2], const uint32_t (&a)[4][4],
                                               shared_at group) {
    operand x = operand_rows(group), rest = operand_rows(group + N * 128);
    products_begin();
#pragma unroll
    for (int s = 0; s < 4; s++) {
        product(part, a[s], operand_at(rest, s * 32));
        product(part, a[s], operand_at(x, s * 32));
    }
    products_commit();
}

/* A thread's sums to one part of out, rows from n0 and outputs from f on. */
template <int N>
__device__ __forceinline__ void store_sums(float *out, const float (&acc)[N / 2], int n0, int f,
                                           int q, int rows, int width) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = n0 + 8 * j + q * 2 + i % 2;
            if (row < rows && f + i / 2 < width) {
                out[(int64_t)row * width + f + i / 2] = acc[4 * j + i];
            }
        }
}

/* out[part][row][f]: the sums over the part's groups; who reads them adds the parts in order. 64
 * outputs a warpgroup, all of them in one block. Grid: blocks of N rows in x, parts in y. */
template <int N, int STAGES>
__device__ void decisive(const bf16 *high, const bf16 *low, const float *sums, const cuda_mat &w,
                         float *out, int rows) {
    enum { STAGE = 2 * N * 128 };
    SHARED_PIECES(shared);
    int tid = threadIdx.x, lane = tid % 32, q = lane % 4, n0 = blockIdx.x * N;
    int groups = w.cols / 64, each = (groups + (int)gridDim.y - 1) / (int)gridDim.y;
    int begin = blockIdx.y * each, count = min(each, groups - begin);
    int f = tid / 32 * 16 + lane / 4 * 2;
    float *own_sums = (float *)(shared + STAGES * STAGE); /* [count][N] */
    shared_at ring = shared_address(shared);
    decisive_rows from = rows_from(w, min(f, w.rows - 1), q); /* missing ones repeat the last */
    decisive_codes next;
    load_decisive(next, w, from, begin);
    begin_after_previous();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) fetch_decisive<N>(ring + i * STAGE, high, low, w.cols, begin + i, n0, rows);
        copy_commit();
    }
    for (int i = tid; i < count * N; i += blockDim.x) {
        int n = i / count, g = i % count;
        own_sums[g * N + n] = sums[(int64_t)min(n0 + n, rows - 1) * groups + begin + g];
    }
    float middle = w.bits == 4 ? 8.0f : 128.0f, magic = 8388608.0f + middle;
    float acc[N / 2], part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0;
    int stage = 0;
    for (int g = 0; g < count; g++) {
        uint32_t a[4][4];
        float scale[2] = {next.scale[0], next.scale[1]};
        float bias[2] = {fmaf(middle, scale[0], next.bias[0]),
                         fmaf(middle, scale[1], next.bias[1])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t words[4] = {next.words[i].x, next.words[i].y, next.words[i].z,
                                       next.words[i].w};
#pragma unroll
            for (int s = 0; s < 4; s++) {
                a[s][i] = numbers(words[s], 0, magic);
                a[s][2 + i] = numbers(words[s], 2, magic);
            }
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) part[i] = 0;
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads(); /* the group is here, the one before has been multiplied */
        multiply_group<N>(part, a, ring + (uint32_t)(stage * STAGE));
        int later = stage == 0 ? STAGES - 1 : stage - 1;
        if (g + STAGES - 1 < count) {
            fetch_decisive<N>(ring + (uint32_t)(later * STAGE), high, low, w.cols,
                              begin + g + STAGES - 1, n0, rows);
        }
        copy_commit();
        if (g + 1 < count) load_decisive(next, w, from, begin + g + 1);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        products_wait<0>();
        hold(part);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float2 sum = *(const float2 *)(own_sums + g * N + j * 8 + q * 2);
            const float of[2] = {sum.x, sum.y};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &to = acc[4 * j + i];
                to = fmaf(scale[i / 2], part[4 * j + i], fmaf(bias[i / 2], of[i % 2], to));
            }
        }
    }
    out += (int64_t)blockIdx.y * rows * w.rows;
    store_sums<N>(out, acc, n0, f, q, rows, w.rows);
}

#define DECISIVE(n, stages)                                                                        \
    KERNEL __launch_bounds__(640, 1) prompt_decisive_##n(                                          \
        const bf16 *high, const bf16 *low, const float *sums, cuda_mat w, float *out, int rows) {  \
        decisive<n, stages>(high, low, sums, w, out, rows);                                        \
    }
PREFILL_DECISIVE_TILES(DECISIVE)
