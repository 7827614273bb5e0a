#include "ckpt/synth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"

/* SplitMix64 (Steele, Lea, Flood 2014): one addition and a mix per number, any seed will do. */
static uint64_t next(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Independent streams for each tensor, item, part and block. */
static uint64_t stream(uint64_t seed, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t state = seed;
    const uint64_t keys[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) state = next(&state) ^ keys[i];
    return next(&state);
}

static float uniform(uint64_t *state) {
    return (float)(next(state) >> 40) * 0x1p-24f;
}

/* Box-Muller. */
static float normal(uint64_t *state) {
    float u = uniform(state), v = uniform(state);
    return sqrtf(-2 * logf(1 - u)) * cosf(6.2831853f * v);
}

/* Standard deviations of the codes around their middle: a group of 64 normal values spans about 4.8
 * of its own, quantised over the whole range of codes. */
#define SPREAD4 (15.0f / 4.8f)
#define SPREAD8 (255.0f / 4.8f)

static uint8_t normal_code(uint64_t *state, float top, float spread) {
    float x = top / 2 + spread * normal(state);
    return (uint8_t)(x < 0 ? 0 : x > top ? top : x + 0.5f);
}

int synth_init(struct synth *s, const struct shape *shape, uint64_t seed, lily_err *err) {
    *s = (struct synth){.shape = shape, .seed = seed};
    s->codes4 = malloc(SYNTH_TABLE);
    s->codes8 = malloc(SYNTH_TABLE);
    if (!s->codes4 || !s->codes8) {
        synth_free(s);
        return ERR_NOMEM(err, "synthetic weights");
    }
    uint64_t state = stream(seed, 0, 0, 0, 0);
    for (size_t i = 0; i < SYNTH_TABLE; i++) {
        uint8_t low = normal_code(&state, 15, SPREAD4), high = normal_code(&state, 15, SPREAD4);
        s->codes4[i] = (uint8_t)(low | high << 4);
        s->codes8[i] = normal_code(&state, 255, SPREAD8);
    }
    return 0;
}

void synth_free(struct synth *s) {
    free(s->codes4);
    free(s->codes8);
    *s = (struct synth){0};
}

enum { PART_CODES, PART_SCALES, PART_VALUES };

static uint64_t tensor_stream(const struct synth *s, const struct tensor_role *r, int32_t layer,
                              int32_t item, int part, size_t block) {
    uint64_t role = (uint64_t)(r - tensor_roles) << 32 | (uint32_t)(layer + 1);
    return stream(s->seed, role + 1, (uint64_t)item, (uint64_t)part, block);
}

/* Each block is a run of the table from a random byte on, mirrored (code -> top - code) at random:
 * as fast as copying, and no two rows alike. */
void synth_codes(const struct synth *s, const struct tensor_role *r, int32_t layer, int32_t item,
                 size_t from, size_t n, uint8_t *out) {
    const uint8_t *table = r->bits == 8 ? s->codes8 : s->codes4;
    for (size_t at = 0; at < n; at += SYNTH_BLOCK) {
        size_t m = n - at < SYNTH_BLOCK ? n - at : SYNTH_BLOCK;
        uint64_t state = tensor_stream(s, r, layer, item, PART_CODES, (from + at) / SYNTH_BLOCK);
        uint64_t random = next(&state);
        const uint8_t *run = table + random % (SYNTH_TABLE - SYNTH_BLOCK);
        uint8_t mirror = (random >> 63) ? 0xff : 0;
        for (size_t i = 0; i < m; i++) out[at + i] = run[i] ^ mirror;
    }
}

/* Weights of unit gain, except where the model wants otherwise: embedding rows of fixed size, and
 * router rows three times larger, so that a few experts stand out. */
static float weight_spread(const struct synth *s, const struct tensor_role *r) {
    float unit = 1.0f / sqrtf((float)tensor_cols(r, s->shape));
    if (r->class == CLASS_EMBED) return 0.5f;
    return r->class == CLASS_ROUTER ? 3 * unit : unit;
}

/* scale * (code - middle): scales of both signs that vary by a fifth, biases at the matching end.
 */
void synth_scales(const struct synth *s, const struct tensor_role *r, int32_t layer, int32_t item,
                  size_t from, size_t n, uint16_t *scales, uint16_t *biases) {
    float middle = r->bits == 8 ? 127.5f : 7.5f;
    float unit = weight_spread(s, r) / (r->bits == 8 ? SPREAD8 : SPREAD4);
    for (size_t at = 0; at < n; at += SYNTH_BLOCK) {
        size_t m = n - at < SYNTH_BLOCK ? n - at : SYNTH_BLOCK;
        uint64_t state = tensor_stream(s, r, layer, item, PART_SCALES, (from + at) / SYNTH_BLOCK);
        for (size_t i = 0; i < m; i++) {
            uint64_t random = next(&state);
            float jitter = (float)(random & 0xffff) * (0.4f / 65536) - 0.2f;
            float scale = unit * (1 + jitter) * (random >> 63 ? -1.0f : 1.0f);
            uint16_t stored = f32_to_bf16(scale);
            if (scales) scales[at + i] = stored;
            if (biases) biases[at + i] = f32_to_bf16(-middle * bf16_to_f32(stored));
        }
    }
}

/* Decay times from a few tokens to hundreds, norms near 1, short convolutions. */
static float small_value(const struct tensor_role *r, uint64_t *state) {
    if (r->kind == KIND_CONV) return 0.4f * normal(state);
    if (strcmp(r->name, "linear_attn.A_log") == 0) return logf(uniform(state) * 15 + 0.5f);
    if (strcmp(r->name, "linear_attn.dt_bias") == 0) return 0.5f * normal(state) - 2;
    return 1 + 0.2f * normal(state);
}

void synth_small(const struct synth *s, const struct tensor_role *r, int32_t layer, size_t n,
                 uint16_t *out) {
    uint64_t state = tensor_stream(s, r, layer, 0, PART_VALUES, 0);
    for (size_t i = 0; i < n; i++) out[i] = f32_to_bf16(small_value(r, &state));
}
