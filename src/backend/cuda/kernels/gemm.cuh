/* The tile of portable_gemm.cu: where its rows and columns come from, the product itself. */
#ifndef LILY_CUDA_GEMM_CUH
#define LILY_CUDA_GEMM_CUH

#include "rows.cuh"

enum { THREADS = 256, TILE_N = 128, TILE_K = 64 };

/* Which row of which matrix gives column n of a tile; false: none. like: one of
 * them; all have its layout, if not its width of codes. */
struct plain_columns {
    const cuda_mat &w;
    int first;
    __device__ bool column(int n, const cuda_mat *&mat, int &row) const {
        mat = &w;
        row = first + n;
        return row < w.rows;
    }
    __device__ const cuda_mat &like() const { return w; }
};
struct paired_columns {
    const cuda_mat &gate, &up;
    int first, left;
    __device__ bool column(int n, const cuda_mat *&mat, int &row) const {
        int i = n / 16 * 8 + n % 8;
        mat = n / 8 % 2 ? &up : &gate;
        row = first + i;
        return i < left;
    }
    __device__ const cuda_mat &like() const { return gate; }
};

/* Byte of piece p (16 bytes) of row r in a tile of rows of 64 bf16. */
__device__ __forceinline__ uint32_t swizzled(int r, int p) {
    return (uint32_t)(r * 128 + ((p ^ (r & 7)) * 16));
}

/* SPLIT: the matrix may lie as tiles of `down`. */
template <int TILE_M, bool SPLIT = false> struct Tile {
    static constexpr int WARPS_M = 2, WARPS_N = THREADS / 32 / WARPS_M;
    static constexpr int MS = TILE_M / WARPS_M / 16;    /* 16-row pieces of a warp */
    static constexpr int NS = TILE_N / WARPS_N / 8;     /* 8-column pieces of a warp, even */
    static constexpr int AHEAD = TILE_M >= 128 ? 3 : 4; /* rounds on their way */
    static constexpr int A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2;

    float acc[MS][NS][4];

    /* Codes of this thread's half row of a round: 32 columns of column n = thread / 2. */
    struct codes {
        uint4 words;
        uint32_t factors; /* scale, bias */
    };
    struct code_source {
        const uint8_t *at;
        const uint16_t *scale, *bias;
        bool wide, valid; /* codes of 8 bits; there is such a column */
    };

    template <class Columns> static __device__ code_source find(const Columns &columns) {
        const cuda_mat *mat;
        int row, n = threadIdx.x / 2, half = threadIdx.x % 2;
        code_source s = {};
        s.valid = columns.column(n, mat, row);
        if (!s.valid) return s;
        s.wide = mat->bits == 8;
        mat_row from = row_of(*mat, row);
        s.at = from.codes + code_sixteen(*mat, 2 * half);
        s.scale = from.scales;
        s.bias = from.biases;
        return s;
    }

    /* What is not there counts as zeros times zero. */
    static __device__ codes load(const code_source &s, const cuda_mat &like, int round) {
        codes c = {};
        if (!s.valid) return c;
        const uint8_t *at = s.at + (lies_as(like, CUDA_PLANAR) ? round * 32 : code_at(like, round));
        if (SPLIT && lies_as(like, CUDA_DOWN)) {
            const uint32_t *words = (const uint32_t *)at;
            c.words =
                make_uint4(__ldg(words), __ldg(words + 4), __ldg(words + 8), __ldg(words + 12));
        } else if (!s.wide) {
            c.words = __ldg((const uint4 *)at);
        }
        int factor = factor_at(like, round);
        c.factors = __ldg(s.scale + factor) | (uint32_t)__ldg(s.bias + factor) << 16;
        return c;
    }

    /* Eight codes of 8 bits. */
    static __device__ uint4 widen(uint2 words, float scale, float bias) {
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t w = i < 2 ? words.x : words.y;
            float a = fmaf(scale, (float)(w >> (16 * (i & 1)) & 255), bias);
            float b = fmaf(scale, (float)(w >> (16 * (i & 1) + 8) & 255), bias);
            out[i] = bf16_pair(a, b);
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }

    static __device__ void store(char *b, const codes &c, const code_source &s, int round) {
        int n = threadIdx.x / 2, half = threadIdx.x % 2;
        uint32_t scale = (c.factors & 0xffffu) * 0x10001u, bias = (c.factors >> 16) * 0x10001u;
        const uint32_t words[4] = {c.words.x, c.words.y, c.words.z, c.words.w};
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint4 v;
            if (s.wide && s.valid) { /* rare: not loaded ahead */
                v = widen(__ldg((const uint2 *)(s.at + round * 64 + p * 8)),
                          bf16_float((bf16)scale), bf16_float((bf16)bias));
            } else {
                v = dequantise8(words[p], scale, bias);
            }
            *(uint4 *)(b + swizzled(n, half * 4 + p)) = v;
        }
    }

    /* This thread's 16-byte pieces of the activations of a round. */
    static constexpr int PIECES = (TILE_M * 8 + THREADS - 1) / THREADS;
    template <class Rows>
    static __device__ void find_rows(const Rows &rows, const bf16 *(&row)[PIECES]) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            int m = (threadIdx.x + i * THREADS) / 8;
            row[i] = m < TILE_M ? rows.row(m) : nullptr;
        }
    }
    static __device__ void copy_rows(shared_at a, const bf16 *const (&row)[PIECES], const bf16 *any,
                                     int round) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            int m = (threadIdx.x + i * THREADS) / 8, p = threadIdx.x % 8;
            if (m >= TILE_M) continue;
            const bf16 *from = row[i] ? row[i] + round * TILE_K + p * 8 : any;
            copy16(a + swizzled(m, p), from, row[i] != nullptr);
        }
    }

    __device__ void multiply_round(shared_at a, shared_at b) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int m0 = warp / WARPS_N * (TILE_M / WARPS_M), n0 = warp % WARPS_N * (TILE_N / WARPS_N);
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            uint32_t am[MS][4];
#pragma unroll
            for (int i = 0; i < MS; i++) {
                load_matrices(am[i], a + swizzled(m0 + i * 16 + lane % 16, 2 * k + lane / 16));
            }
#pragma unroll
            for (int j = 0; j < NS; j += 2) {
                uint32_t bn[4]; /* two 8-column pieces: k low, k high of each */
                load_matrices(
                    bn, b + swizzled(n0 + j * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < MS; i++) {
                    multiply(acc[i][j], am[i], bn[0], bn[1]);
                    multiply(acc[i][j + 1], am[i], bn[2], bn[3]);
                }
            }
        }
    }

    /* acc = the tile's sums over `rounds` groups of 64 columns. shared: AHEAD tiles of activations,
     * two of weights; a buffer is written again only after the barrier that follows its last
     * reading. One group of copies is committed a round, also where there is nothing to copy. */
    template <class Rows, class Columns>
    __device__ void run(char *shared, const Rows &rows, const Columns &columns, int rounds) {
#pragma unroll
        for (int i = 0; i < MS; i++)
#pragma unroll
            for (int j = 0; j < NS; j++)
#pragma unroll
                for (int v = 0; v < 4; v++) acc[i][j][v] = 0;
        const bf16 *row[PIECES];
        find_rows(rows, row);
        code_source source = find(columns);
        const cuda_mat &like = columns.like();
        codes next[AHEAD];
#pragma unroll
        for (int d = 0; d < AHEAD; d++) {
            if (d < rounds) next[d] = load(source, like, d);
        }
#pragma unroll
        for (int d = 0; d < AHEAD - 1; d++) {
            if (d < rounds) copy_rows(shared_address(shared + d * A_BYTES), row, rows.a, d);
            copy_commit();
        }
        for (int first = 0; first < rounds; first += AHEAD) {
#pragma unroll
            for (int d = 0; d < AHEAD; d++) {
                int round = first + d, ahead = round + AHEAD - 1;
                if (round >= rounds) break;
                char *weights = shared + AHEAD * A_BYTES + round % 2 * B_BYTES;
                store(weights, next[d], source, round);
                copy_wait<AHEAD - 2>();
                __syncthreads();
                if (ahead < rounds) {
                    copy_rows(shared_address(shared + (d + AHEAD - 1) % AHEAD * A_BYTES), row,
                              rows.a, ahead);
                }
                copy_commit();
                if (round + AHEAD < rounds) next[d] = load(source, like, round + AHEAD);
                multiply_round(shared_address(shared + d * A_BYTES), shared_address(weights));
            }
        }
    }

    /* Calls f(row of the tile, column of the tile, value, value of the next column). */
    template <class F> __device__ void each(F f) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int m0 = warp / WARPS_N * (TILE_M / WARPS_M), n0 = warp % WARPS_N * (TILE_N / WARPS_N);
#pragma unroll
        for (int i = 0; i < MS; i++)
#pragma unroll
            for (int j = 0; j < NS; j++) {
                int m = m0 + i * 16 + lane / 4, n = n0 + j * 8 + lane % 4 * 2;
                f(m, n, acc[i][j][0], acc[i][j][1]);
                f(m + 8, n, acc[i][j][2], acc[i][j][3]);
            }
    }

    /* The same for tiles of paired_columns: both products of output n and of the next. */
    template <class F> __device__ void each_pair(F f) const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int m0 = warp / WARPS_N * (TILE_M / WARPS_M), n0 = warp % WARPS_N * (TILE_N / WARPS_N);
#pragma unroll
        for (int i = 0; i < MS; i++)
#pragma unroll
            for (int j = 0; j < NS; j += 2) {
                int m = m0 + i * 16 + lane / 4, n = (n0 + j * 8) / 2 + lane % 4 * 2;
                const float *g = acc[i][j], *u = acc[i][j + 1];
                f(m, n, g[0], g[1], u[0], u[1]);
                f(m + 8, n, g[2], g[3], u[2], u[3]);
            }
    }
};

#endif
