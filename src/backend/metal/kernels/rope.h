/* The angle of RoPE as a direction, the same for prompts and for single tokens. MSL only, after
 * metal_stdlib. */
#ifndef LILY_METAL_ROPE_H
#define LILY_METAL_ROPE_H

/* (cos, sin) of an angle of up to 2^22 quarter turns: position times frequency is up to 262,143
 * radians. pi / 2 comes off in three parts, so that no more than the library's own small angles is
 * asked of it. The first difference is exact: both terms are multiples of 2^-23 (the angle, from 1
 * on) and it is below 2. */
inline float2 rope_direction(float angle) {
    const float turns = rint(angle * 0.636619772367581343f);
    float rest = fma(turns, -1.57079637050628662f, angle);
    rest = fma(turns, 4.37113882867379289e-8f, rest);
    rest = fma(turns, 1.71512449944910e-15f, rest);
    const float c = precise::cos(rest);
    const float s = precise::sin(rest);
    const uint quarter = (uint)turns & 3;
    if (quarter == 0) return float2(c, s);
    if (quarter == 1) return float2(-s, c);
    if (quarter == 2) return float2(-c, -s);
    return float2(s, -c);
}

#endif
