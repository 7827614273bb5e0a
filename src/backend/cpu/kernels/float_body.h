/* The float kernels, written once over a vector of VN floats and included by each instruction set's
 * file after it has defined:
 *     VN                 floats per vector; 16 is a multiple of it
 *     vf, vf_u, vi       vector of VN floats, the same unaligned, of VN int32
 *     V_SET(x) V_FMA(a, b, c) V_MAX(a, b) V_BF16(p) V_U8(p)
 *     ATTEND_HEADS       heads whose value sums fit the registers (8 or 4)
 * V_FMA is a * b + c; the portable one rounds twice. V_BF16 and V_U8 widen VN bfloat16 or bytes.
 * Each output's operations come in a fixed order that no batch or tile size changes. */
#include <math.h>
#include <string.h>

#define V_LOAD(p)     (*(const vf_u *)(const void *)(p))
#define V_STORE(p, v) (*(vf_u *)(void *)(p) = (v))

static inline float v_sum(vf v) {
    float lane[VN];
    V_STORE(lane, v);
    for (int w = VN / 2; w > 0; w /= 2) {
        for (int i = 0; i < w; i++) lane[i] += lane[i + w];
    }
    return lane[0];
}

static inline float v_top(vf v) {
    float lane[VN];
    V_STORE(lane, v);
    float top = lane[0];
    for (int i = 1; i < VN; i++) top = lane[i] > top ? lane[i] : top;
    return top;
}

/* exp(x), relative error below 2e-7; 0 below -87 (and for -inf), inf above 88.7. */
static inline vf v_exp(vf x) {
    vf clamped = V_MAX(x, V_SET(-88.0f));
    vf limit = V_SET(89.0f);
    clamped = -V_MAX(-clamped, -limit);
    vf shifted = V_FMA(clamped, V_SET(1.44269504f), V_SET(12582912.0f)); /* 1.5 * 2^23: rounds */
    vf n = shifted - V_SET(12582912.0f);
    vf r = V_FMA(n, V_SET(-0.693359375f), clamped);
    r = V_FMA(n, V_SET(2.12194440e-4f), r);
    vf p = V_SET(1.9875691500e-4f); /* minimax on [-ln2/2, ln2/2] */
    p = V_FMA(p, r, V_SET(1.3981999507e-3f));
    p = V_FMA(p, r, V_SET(8.3334519073e-3f));
    p = V_FMA(p, r, V_SET(4.1665795894e-2f));
    p = V_FMA(p, r, V_SET(1.6666665459e-1f));
    p = V_FMA(p, r, V_SET(5.0000001201e-1f));
    p = V_FMA(p, r * r, r) + V_SET(1.0f);
    /* 2^n in two factors, so that n = 128 (inf) and n = -127 (tiny) need no special case. */
    vi whole = (vi)shifted - (vi)V_SET(12582912.0f);
    vi half = whole >> 1;
    vf two_half = (vf)((half + 127) << 23);
    vf two_rest = (vf)((whole - half + 127) << 23);
    vi keep = x >= V_SET(-87.0f);
    return (vf)((vi)(p * two_half * two_rest) & keep);
}

static inline vf v_sigmoid(vf x) {
    return V_SET(1.0f) / (V_SET(1.0f) + v_exp(-x));
}

static float dot(const float *a, const float *b, int32_t n) {
    vf s0 = V_SET(0.0f), s1 = s0, s2 = s0, s3 = s0;
    for (int32_t i = 0; i < n; i += 4 * VN) {
        s0 = V_FMA(V_LOAD(a + i), V_LOAD(b + i), s0);
        s1 = V_FMA(V_LOAD(a + i + VN), V_LOAD(b + i + VN), s1);
        s2 = V_FMA(V_LOAD(a + i + 2 * VN), V_LOAD(b + i + 2 * VN), s2);
        s3 = V_FMA(V_LOAD(a + i + 3 * VN), V_LOAD(b + i + 3 * VN), s3);
    }
    return v_sum((s0 + s1) + (s2 + s3));
}

static void rms_norm(const float *x, const float *weight, int32_t n, float eps, float *out) {
    float inverse = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int32_t i = 0; i < n; i += VN) {
        V_STORE(out + i, V_LOAD(x + i) * V_SET(inverse) * V_LOAD(weight + i));
    }
}

static void l2_norm(float *x, int32_t n, float eps, float scale) {
    float factor = scale / sqrtf(dot(x, x, n) + eps);
    for (int32_t i = 0; i < n; i += VN) V_STORE(x + i, V_LOAD(x + i) * V_SET(factor));
}

static void gated_norm(const float *x, const float *weight, const float *z, int32_t n, float eps,
                       float *out) {
    float inverse = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int32_t i = 0; i < n; i += VN) {
        vf gate = V_LOAD(z + i);
        V_STORE(out + i,
                V_LOAD(x + i) * V_SET(inverse) * V_LOAD(weight + i) * gate * v_sigmoid(gate));
    }
}

static void conv_silu(const float *const u[CONV_TAPS], const float *taps, size_t ld, int32_t n,
                      float *out) {
    for (int32_t i = 0; i < n; i += VN) {
        vf s = V_LOAD(u[0] + i) * V_LOAD(taps + i);
        for (int j = 1; j < CONV_TAPS; j++) {
            s = V_FMA(V_LOAD(u[j] + i), V_LOAD(taps + (size_t)j * ld + (size_t)i), s);
        }
        V_STORE(out + i, s * v_sigmoid(s));
    }
}

static void silu_mul(const float *gate, const float *up, int32_t n, float *out) {
    for (int32_t i = 0; i < n; i += VN) {
        vf g = V_LOAD(gate + i);
        V_STORE(out + i, g * v_sigmoid(g) * V_LOAD(up + i));
    }
}

static void sigmoid_mul(const float *x, const float *gate, int32_t n, float *out) {
    for (int32_t i = 0; i < n; i += VN) {
        V_STORE(out + i, V_LOAD(x + i) * v_sigmoid(V_LOAD(gate + i)));
    }
}

static void axpy(float a, const float *x, int32_t n, float *y) {
    for (int32_t i = 0; i < n; i += VN) {
        V_STORE(y + i, V_FMA(V_SET(a), V_LOAD(x + i), V_LOAD(y + i)));
    }
}

static bool all_finite(const float *x, int32_t n) {
    vf zero = V_SET(0.0f), bad = zero;
    for (int32_t i = 0; i < n; i += VN) bad += V_LOAD(x + i) * zero; /* inf and NaN give NaN */
    return v_sum(bad) == 0.0f;
}

/* Row r of m as float32, the values mat_row gives but for a fused rounding. */
static inline void widen_row(const struct mat *m, int32_t r, float *w) {
    const uint8_t *codes = m->data + (size_t)r * mat_row_bytes(m);
    int32_t groups = m->cols / GROUP;
    for (int32_t g = 0; g < groups; g++) {
        size_t at = (size_t)r * (size_t)groups + (size_t)g;
        vf scale = V_SET(bf16_to_f32(m->scales[at])), bias = V_SET(bf16_to_f32(m->biases[at]));
        uint8_t nibbles[GROUP];
        const uint8_t *c = codes + (size_t)g * GROUP;
        if (m->bits == 4) {
            const uint8_t *packed = codes + (size_t)g * (GROUP / 2);
            for (int i = 0; i < GROUP / 2; i++) {
                nibbles[2 * i] = packed[i] & 15;
                nibbles[2 * i + 1] = packed[i] >> 4;
            }
            c = nibbles;
        }
        for (int i = 0; i < GROUP; i += VN) {
            V_STORE(w + g * GROUP + i, V_FMA(V_U8(c + i), scale, bias));
        }
    }
}

/* Rows of weights that share each load of the input, and inputs that stay in the second-level cache
 * while all rows of weights pass. */
enum { FLOAT_ROWS = ATTEND_HEADS / 2, FLOAT_TOKENS = 64 };

/* out[r] = dot(w[r], x, n) for FLOAT_ROWS rows, each with dot's own order of additions. */
static inline void dots(float (*w)[MAX_COLS], const float *x, int32_t n, float *out) {
    vf s[FLOAT_ROWS][4];
    for (int r = 0; r < FLOAT_ROWS; r++) {
        for (int j = 0; j < 4; j++) s[r][j] = V_SET(0.0f);
    }
    for (int32_t i = 0; i < n; i += 4 * VN) {
        for (int j = 0; j < 4; j++) {
            vf in = V_LOAD(x + i + j * VN);
            for (int r = 0; r < FLOAT_ROWS; r++) {
                s[r][j] = V_FMA(V_LOAD(w[r] + i + j * VN), in, s[r][j]);
            }
        }
    }
    for (int r = 0; r < FLOAT_ROWS; r++) out[r] = v_sum((s[r][0] + s[r][1]) + (s[r][2] + s[r][3]));
}

static void matmul_float(const struct mat *m, int32_t r0, int32_t r1, const float *x, size_t ldx,
                         int32_t n, float *out, size_t ldo) {
    float w[FLOAT_ROWS][MAX_COLS];
    for (int32_t t0 = 0; t0 < n; t0 += FLOAT_TOKENS) {
        int32_t t1 = n - t0 < FLOAT_TOKENS ? n : t0 + FLOAT_TOKENS;
        for (int32_t r = r0; r < r1; r += FLOAT_ROWS) {
            int32_t rows = r1 - r < FLOAT_ROWS ? r1 - r : FLOAT_ROWS;
            for (int32_t i = 0; i < rows; i++) widen_row(m, r + i, w[i]);
            for (int32_t t = t0; t < t1; t++) {
                const float *in = x + (size_t)t * ldx;
                float *o = out + (size_t)t * ldo + (size_t)(r - r0);
                if (rows == FLOAT_ROWS)
                    dots(w, in, m->cols, o);
                else
                    for (int32_t i = 0; i < rows; i++) o[i] = dot(w[i], in, m->cols);
            }
        }
    }
}

/* Columns [c, c + 4 VN) of the half head stay in registers as sums while the rows stream by. With
 * the old state S: r = S^T k, p = S^T q, d = beta (v - decay r), out = decay p + (k.q) d, and the
 * new state is decay S + k d^T: one read for the sums, one read and write for the update. */
static void delta(float *state, const float *q, const float *k, const float *v, float kq,
                  float beta, float decay, float *out) {
    for (int c = 0; c < STATE_HALF; c += 4 * VN) {
        vf r[4], p[4], d[4];
        for (int j = 0; j < 4; j++) r[j] = p[j] = V_SET(0.0f);
        for (int i = 0; i < STATE; i++) {
            vf ki = V_SET(k[i]), qi = V_SET(q[i]);
            for (int j = 0; j < 4; j++) {
                vf s = V_LOAD(state + i * STATE_HALF + c + j * VN);
                r[j] = V_FMA(s, ki, r[j]);
                p[j] = V_FMA(s, qi, p[j]);
            }
        }
        vf e = V_SET(decay);
        for (int j = 0; j < 4; j++) {
            d[j] = V_SET(beta) * (V_LOAD(v + c + j * VN) - e * r[j]);
            V_STORE(out + c + j * VN, V_FMA(V_SET(kq), d[j], e * p[j]));
        }
        for (int i = 0; i < STATE; i++) {
            vf ki = V_SET(k[i]);
            for (int j = 0; j < 4; j++) {
                float *s = state + i * STATE_HALF + c + j * VN;
                V_STORE(s, V_FMA(ki, d[j], e * V_LOAD(s)));
            }
        }
    }
}

/* scores[h][p] = q[h] . key[p] for KEY_BLOCK positions: positions in lanes, dimensions ascending.
 */
static inline void score_block(const float *q, const uint16_t *keys, float *scores) {
    for (int c = 0; c < KEY_BLOCK; c += VN) {
        vf s[KV_GROUP];
        for (int h = 0; h < KV_GROUP; h++) s[h] = V_SET(0.0f);
        for (int d = 0; d < HEAD; d++) {
            vf key = V_BF16(keys + d * KEY_BLOCK + c);
            for (int h = 0; h < KV_GROUP; h++) s[h] = V_FMA(V_SET(q[h * HEAD + d]), key, s[h]);
        }
        for (int h = 0; h < KV_GROUP; h++) V_STORE(scores + h * SPAN + c, s[h]);
    }
}

/* scores -> exp(score - max) in place for n positions; lanes beyond n become 0. */
static inline void softmax_span(float *scores, int32_t n, float *max, float *sum) {
    int32_t padded = (n + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK;
    for (int32_t i = n; i < padded; i++) scores[i] = -INFINITY;
    vf top = V_LOAD(scores);
    for (int32_t i = VN; i < padded; i += VN) top = V_MAX(V_LOAD(scores + i), top);
    *max = v_top(top);
    vf shift = V_SET(*max), total = V_SET(0.0f);
    for (int32_t i = 0; i < padded; i += VN) {
        vf e = v_exp(V_LOAD(scores + i) - shift);
        V_STORE(scores + i, e);
        total += e;
    }
    *sum = v_sum(total);
}

/* out[h][d] = sum over positions ascending of p[h][position] * value[position][d]. */
static inline void weigh_values(const float *p, const uint16_t *values, int32_t n,
                                struct attend *out) {
    for (int lane = 0; lane < HEAD / VALUE_LANE; lane++) {
        for (int c = 0; c < VALUE_LANE; c += 2 * VN) {
            for (int h0 = 0; h0 < KV_GROUP; h0 += ATTEND_HEADS) {
                vf s0[ATTEND_HEADS], s1[ATTEND_HEADS];
                for (int h = 0; h < ATTEND_HEADS; h++) s0[h] = s1[h] = V_SET(0.0f);
                for (int32_t b = 0; b < n; b += VALUE_BLOCK) {
                    const uint16_t *v =
                        values + (size_t)b * HEAD + (size_t)lane * VALUE_BLOCK * VALUE_LANE + c;
                    int32_t m = n - b < VALUE_BLOCK ? n - b : VALUE_BLOCK;
                    for (int32_t i = 0; i < m; i++, v += VALUE_LANE) {
                        vf v0 = V_BF16(v), v1 = V_BF16(v + VN);
                        for (int h = 0; h < ATTEND_HEADS; h++) {
                            vf w = V_SET(p[(h0 + h) * SPAN + b + i]);
                            s0[h] = V_FMA(w, v0, s0[h]);
                            s1[h] = V_FMA(w, v1, s1[h]);
                        }
                    }
                }
                for (int h = 0; h < ATTEND_HEADS; h++) {
                    float *o = out->out[h0 + h] + lane * VALUE_LANE + c;
                    V_STORE(o, s0[h]);
                    V_STORE(o + VN, s1[h]);
                }
            }
        }
    }
}

static void attend(const float *q, const uint16_t *keys, const uint16_t *values, int32_t n,
                   float *scores, struct attend *out) {
    for (int32_t b = 0; b < n; b += KEY_BLOCK) {
        score_block(q, keys + (size_t)b * HEAD, scores + b);
    }
    for (int h = 0; h < KV_GROUP; h++) {
        softmax_span(scores + h * SPAN, n, &out->max[h], &out->sum[h]);
    }
    weigh_values(scores, values, n, out);
}

/* The order of this list is that of struct kernels. */
#define FLOAT_KERNELS                                                                              \
    .matmul_float = matmul_float, .rms_norm = rms_norm, .l2_norm = l2_norm,                        \
    .gated_norm = gated_norm, .conv_silu = conv_silu, .silu_mul = silu_mul,                        \
    .sigmoid_mul = sigmoid_mul, .axpy = axpy, .delta = delta, .dot = dot, .attend = attend,        \
    .all_finite = all_finite
