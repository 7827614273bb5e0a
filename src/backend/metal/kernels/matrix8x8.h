/* The 8 x 8 operands of simdgroup_matrix, filled by hand: a lane holds two neighbouring columns of
 * one row, where thread_elements() has them on every Apple GPU. MSL only. */
#ifndef LILY_METAL_MATRIX8X8_H
#define LILY_METAL_MATRIX8X8_H

#include "common.h"

struct lane_place {
    uint row;
    uint column; /* of the first of its two elements, even */
};
inline lane_place lane_place_of(uint lane) {
    const uint quad = lane / 4;
    lane_place p;
    p.row = (quad & 4) + lane / 2 % 4;
    p.column = (quad & 2) * 2 + lane % 2 * 2;
    return p;
}

inline void matrix_set(thread simdgroup_float8x8 &m, float left, float right) {
    m.thread_elements()[0] = left;
    m.thread_elements()[1] = right;
}
inline float2 matrix_get(thread simdgroup_float8x8 &m) {
    return float2(m.thread_elements()[0], m.thread_elements()[1]);
}
/* From a word of two bf16. */
inline simdgroup_float8x8 matrix_of_bf16(uint word) {
    simdgroup_float8x8 m;
    matrix_set(m, bf16_low(word), bf16_high(word));
    return m;
}
inline simdgroup_float8x8 matrix_zero() {
    return make_filled_simdgroup_matrix<float, 8>(0.0f);
}

#endif
