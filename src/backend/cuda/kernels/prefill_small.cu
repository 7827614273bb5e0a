/* Products of a prompt chunk whose results decide something (which experts, how much to forget),
 * near float32 accuracy: activations are the sum of two bf16, 16 significant bits, and weights are
 * exact, because what the tensor cores multiply are their codes, small whole numbers. Scales and
 * biases are applied to the sums of a group of 64 inputs, in float32:
 *   out = sum over groups of scale * (codes . x) + bias * (sum of x)
 * Activations lie in the order of decisive_place (prefill_common.cuh), so that the sixteen codes of
 * a row that a thread loads at once are those it multiplies. */
#include "prefill_common.cuh"

/* Eight 4-bit codes as bytes. */
__device__ __forceinline__ void widen(uint32_t word, uint32_t &first, uint32_t &second) {
    uint32_t even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
    first = __byte_perm(even, odd, 0x5140);
    second = __byte_perm(even, odd, 0x7362);
}

/* Four lanes share two rows of weights: 64 (4 bits: 32) bytes of each in a group, copied by them
 * and read back sixteen codes a lane and row. Every second four have their rows in turns, so that
 * what is read at once lies in more banks. */
enum { CODES_OF_FOUR = 128 };

struct decisive_rows {
    const uint8_t *codes[2]; /* of the group 0 of either row */
    shared_at at;            /* the four lanes' place in a stage */
};

__device__ __forceinline__ shared_at codes_of_row(const decisive_rows &r, int i) {
    return r.at + (uint32_t)((i ^ ((int)threadIdx.x / 4 & 1)) * 64);
}

__device__ __forceinline__ void fetch_codes(const decisive_rows &r, const cuda_mat &w, int group,
                                            uint32_t stage) {
    int q = threadIdx.x % 4, at = code_at(w, group);
    if (w.bits == 4) { /* a row's sixteens are neighbours: two of them are 16 bytes */
        int i = q / 2, half = q % 2;
        copy16(codes_of_row(r, i) + stage + (uint32_t)(half * 16),
               (i ? r.codes[1] : r.codes[0]) + at + code_sixteen(w, half * 2), true);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            copy16(codes_of_row(r, i) + stage + (uint32_t)(q * 16),
                   r.codes[i] + at + code_sixteen(w, q), true);
        }
    }
}

/* A lane's sixteen codes of row i, a byte each. */
__device__ __forceinline__ void read_codes(uint32_t (&words)[4], const decisive_rows &r, int bits,
                                           int i, uint32_t stage) {
    shared_at at = codes_of_row(r, i) + stage;
    uint32_t q = threadIdx.x % 4;
    if (bits == 4) {
        uint2 two = load_shared8(at + q * 8);
        widen(two.x, words[0], words[1]);
        widen(two.y, words[2], words[3]);
    } else {
        uint2 low = load_shared8(at + q * 16), high = load_shared8(at + q * 16 + 8);
        words[0] = low.x, words[1] = low.y, words[2] = high.x, words[3] = high.y;
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

/* out[part][row][f]: the sums over the part's groups; who reads them adds the parts in order. 64
 * outputs a warpgroup, all of them in one block. Grid: blocks of N rows in x, parts in y. */
template <int N, int STAGES>
__device__ void decisive(const bf16 *high, const bf16 *low, const float *sums, const cuda_mat &w,
                         float *out, int rows) {
    enum { X_STAGE = 2 * N * 128 };
    SHARED_PIECES(shared);
    int tid = threadIdx.x, lane = tid % 32, q = lane % 4, n0 = blockIdx.x * N;
    int groups = w.cols / 64, each = (groups + (int)gridDim.y - 1) / (int)gridDim.y;
    int begin = blockIdx.y * each, count = min(each, groups - begin);
    int f = tid / 32 * 16 + lane / 4 * 2;
    uint32_t code_stage = blockDim.x / 4 * CODES_OF_FOUR;
    shared_at ring = shared_address(shared), code_ring = ring + STAGES * X_STAGE;
    float *own_sums = (float *)(shared + STAGES * (X_STAGE + (int)code_stage)); /* [count][N] */
    /* [2][count] of the four lanes; the next four's begin in another bank */
    float2 *factors = (float2 *)(own_sums + each * N) + tid / 4 * (2 * each + 1);
    decisive_rows own;
    own.at = code_ring + (uint32_t)(tid / 4 * CODES_OF_FOUR);
    float middle = w.bits == 4 ? 8.0f : 128.0f, magic = 8388608.0f + middle;
#pragma unroll
    for (int i = 0; i < 2; i++) { /* missing rows repeat the last */
        mat_row from = row_of(w, min(f + i, w.rows - 1));
        own.codes[i] = from.codes;
        for (int g = q; g < count; g += 4) {
            int at = factor_at(w, begin + g);
            float scale = bf16_float(__ldg(from.scales + at));
            float bias = bf16_float(__ldg(from.biases + at));
            factors[i * each + g] = make_float2(scale, fmaf(middle, scale, bias));
        }
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < count) fetch_codes(own, w, begin + i, i * code_stage);
    }
    begin_after_previous();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) { /* codes of all of them arrive with the first */
        if (i < count)
            fetch_decisive<N>(ring + i * X_STAGE, high, low, w.cols, begin + i, n0, rows);
        copy_commit();
    }
    for (int i = tid; i < count * N; i += blockDim.x) {
        int n = i / count, g = i % count;
        own_sums[g * N + n] = sums[(int64_t)min(n0 + n, rows - 1) * groups + begin + g];
    }
    float acc[N / 2], part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0;
    int stage = 0;
    for (int g = 0; g < count; g++) {
        copy_wait<STAGES - 2>();
        publish_shared();
        __syncthreads(); /* the group is here, the one before has been multiplied */
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t words[4];
            read_codes(words, own, w.bits, i, (uint32_t)stage * code_stage);
#pragma unroll
            for (int s = 0; s < 4; s++) {
                a[s][i] = numbers(words[s], 0, magic);
                a[s][2 + i] = numbers(words[s], 2, magic);
            }
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++) part[i] = 0;
        operand x = operand_rows(ring + (uint32_t)(stage * X_STAGE));
        operand rest = operand_rows(ring + (uint32_t)(stage * X_STAGE + N * 128));
        products_begin();
#pragma unroll
        for (int s = 0; s < 4; s++) {
            product(part, a[s], operand_at(rest, s * 32));
            product(part, a[s], operand_at(x, s * 32));
        }
        products_commit();
        int later = stage == 0 ? STAGES - 1 : stage - 1;
        if (g + STAGES - 1 < count) {
            fetch_codes(own, w, begin + g + STAGES - 1, (uint32_t)later * code_stage);
            fetch_decisive<N>(ring + (uint32_t)(later * X_STAGE), high, low, w.cols,
                              begin + g + STAGES - 1, n0, rows);
        }
        copy_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        float2 k[2] = {factors[g], factors[each + g]}; /* scale and bias */
        products_wait<0>();
        hold(part);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float2 sum = *(const float2 *)(own_sums + g * N + j * 8 + q * 2);
            const float of[2] = {sum.x, sum.y};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &to = acc[4 * j + i];
                to = fmaf(k[i / 2].x, part[4 * j + i], fmaf(k[i / 2].y, of[i % 2], to));
            }
        }
    }
    out += (int64_t)blockIdx.y * rows * w.rows;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = n0 + 8 * j + q * 2 + i % 2;
            if (row < rows && f + i / 2 < w.rows) {
                out[(int64_t)row * w.rows + f + i / 2] = acc[4 * j + i];
            }
        }
}

#define DECISIVE(n, stages)                                                                        \
    KERNEL __launch_bounds__(640, 1) prompt_decisive_##n(                                          \
        const bf16 *high, const bf16 *low, const float *sums, cuda_mat w, float *out, int rows) {  \
        decisive<n, stages>(high, low, sums, w, out, rows);                                        \
    }
PREFILL_DECISIVE_TILES(DECISIVE)
