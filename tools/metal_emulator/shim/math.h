// Elementwise math. Half is computed in float and rounded once; Metal has none of it for bfloat.
#pragma once

namespace metal {

namespace detail {
// Metal overloads its functions for each type, so a call with two types has no best candidate. One
// scalar for all elements of a vector is fine.
template <class T, class U> constexpr void require_alike() {
    static_assert(is_same_v<T, U> || (count_v<T> > 1 && is_same_v<U, element_t<T>>),
                  "ambiguous in Metal: arguments of different types");
    static_assert(!is_same_v<element_t<T>, bfloat>, "Metal has no math for bfloat: use float");
}
// The type of a function that Metal has for float and half only: integers become what the other
// arguments are.
template <class T> struct Floating {
    template <class U> static constexpr auto with() {
        if constexpr (is_integral_v<T>)
            return Floating<U>{};
        else if constexpr (is_integral_v<U>)
            return Floating<T>{};
        else
            return require_alike<T, U>(), Floating<T>{};
    }
    using type = T;
};
template <class T, class U, class V = T>
using floating_t =
    typename decltype(decltype(Floating<T>::template with<U>())::template with<V>())::type;
} // namespace detail

#define MSL_UNARY(name, expression)                                                                \
    template <class T> inline T name(T a) {                                                        \
        if constexpr (detail::count_v < T >> 1) {                                                  \
            for (int i = 0; i < detail::count_v<T>; i++) a[i] = name((detail::element_t<T>)a[i]);  \
            return a;                                                                              \
        } else {                                                                                   \
            static_assert(is_same_v<T, float> || is_same_v<T, half>,                               \
                          #name " takes float or half");                                           \
            float x = (float)a;                                                                    \
            return (T)(expression);                                                                \
        }                                                                                          \
    }
#define MSL_UNARY_SET                                                                              \
    MSL_UNARY(exp, __builtin_expf(x))                                                              \
    MSL_UNARY(exp2, __builtin_exp2f(x))                                                            \
    MSL_UNARY(log, __builtin_logf(x))                                                              \
    MSL_UNARY(log2, __builtin_log2f(x))                                                            \
    MSL_UNARY(sqrt, __builtin_sqrtf(x))                                                            \
    MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                                                    \
    MSL_UNARY(sin, __builtin_sinf(x))                                                              \
    MSL_UNARY(cos, __builtin_cosf(x))                                                              \
    MSL_UNARY(tanh, __builtin_tanhf(x))                                                            \
    MSL_UNARY(floor, __builtin_floorf(x))                                                          \
    MSL_UNARY(ceil, __builtin_ceilf(x))                                                            \
    MSL_UNARY(rint, __builtin_rintf(x))                                                            \
    MSL_UNARY(round, __builtin_roundf(x))                                                          \
    MSL_UNARY(trunc, __builtin_truncf(x))                                                          \
    MSL_UNARY(fabs, __builtin_fabsf(x))
MSL_UNARY_SET
namespace precise {
MSL_UNARY_SET
}
namespace fast {
MSL_UNARY_SET
}
#undef MSL_UNARY_SET
#undef MSL_UNARY

#define MSL_BINARY(name, expression)                                                               \
    template <class T, class U> inline T name(T x, U other) {                                      \
        detail::require_alike<T, U>();                                                             \
        T y = (T)other;                                                                            \
        if constexpr (detail::count_v < T >> 1) {                                                  \
            using E = detail::element_t<T>;                                                        \
            for (int i = 0; i < detail::count_v<T>; i++) x[i] = name((E)x[i], (E)y[i]);            \
            return x;                                                                              \
        } else {                                                                                   \
            return (T)(expression);                                                                \
        }                                                                                          \
    }
// A NaN loses against a number.
MSL_BINARY(min, x != x ? y : y < x ? y : x)
MSL_BINARY(max, x != x ? y : x < y ? y : x)
#define MSL_FLOATING(name, expression)                                                             \
    namespace detail {                                                                             \
    MSL_BINARY(name, expression)                                                                   \
    }                                                                                              \
    template <class A, class B, class T = detail::floating_t<A, B>> inline T name(A x, B y) {      \
        static_assert(!is_integral_v<T>, "ambiguous in Metal: no argument of floating point");     \
        return detail::name((T)x, (T)y);                                                           \
    }
MSL_FLOATING(fmin, x != x ? y : y < x ? y : x)
MSL_FLOATING(fmax, x != x ? y : x < y ? y : x)
MSL_FLOATING(pow, __builtin_powf((float)x, (float)y))
MSL_FLOATING(fmod, __builtin_fmodf((float)x, (float)y))
MSL_FLOATING(copysign, __builtin_copysignf((float)x, (float)y))
MSL_FLOATING(step, y < x ? (T)0 : (T)1)
#undef MSL_FLOATING
#undef MSL_BINARY

template <class T> inline T abs(T a) {
    if constexpr (detail::count_v < T >> 1) {
        for (int i = 0; i < detail::count_v<T>; i++) a[i] = a[i] < 0 ? -a[i] : a[i];
        return a;
    } else {
        return a < 0 ? (T)-a : a;
    }
}
template <class T, class U, class V> inline T clamp(T x, U low, V high) {
    return min(max(x, low), high);
}
template <class T> inline T sign(T x) {
    return x > (T)0 ? (T)1 : x < (T)0 ? (T)-1 : x == x ? x : (T)0; // keeps the sign of zero
}
template <class T> inline T saturate(T x) {
    return clamp(x, (T)0, (T)1);
}
template <class A, class B, class C, class T = detail::floating_t<A, B, C>>
inline T fma(A first, B second, C third) {
    static_assert(!is_integral_v<T>, "ambiguous in Metal: no argument of floating point");
    T a = (T)first, b = (T)second, c = (T)third;
    if constexpr (detail::count_v < T >> 1) {
        using E = detail::element_t<T>;
        for (int i = 0; i < detail::count_v<T>; i++) a[i] = fma((E)a[i], (E)b[i], (E)c[i]);
        return a;
    } else {
        return (T)__builtin_fmaf((float)a, (float)b, (float)c);
    }
}
template <class A, class B, class C, class T = detail::floating_t<A, B, C>>
inline T mix(A first, B second, C third) {
    T a = (T)first, b = (T)second, t = (T)third;
    return a + (b - a) * t;
}
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
    T sum = a[0] * b[0];
    for (int i = 1; i < N; i++) sum += a[i] * b[i];
    return sum;
}
template <class T> inline T select(T a, T b, bool c) {
    return c ? b : a;
}
template <class T, int N, class I> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<I, N> c) {
    for (int i = 0; i < N; i++) a[i] = c[i] ? b[i] : a[i];
    return a;
}
template <class T, int N> inline bool any(vec<T, N> v) {
    bool result = false;
    for (int i = 0; i < N; i++) result = result || v[i] != 0;
    return result;
}
template <class T, int N> inline bool all(vec<T, N> v) {
    bool result = true;
    for (int i = 0; i < N; i++) result = result && v[i] != 0;
    return result;
}
template <class T> inline bool isnan(T x) {
    return x != x;
}
template <class T> inline bool isinf(T x) {
    return __builtin_isinf((float)x);
}
template <class T> inline bool isfinite(T x) {
    return __builtin_isfinite((float)x);
}
template <class T> inline T ldexp(T a, int e) {
    return (T)__builtin_ldexpf((float)a, e);
}

template <class T> inline T popcount(T x) {
    return (T)__builtin_popcountll((ulong)x & (~(ulong)0 >> (64 - 8 * sizeof(T))));
}
template <class T> inline T ctz(T x) {
    return x ? (T)__builtin_ctzll((ulong)x) : (T)(8 * sizeof(T));
}
template <class T> inline T clz(T x) {
    int extra = 64 - 8 * (int)sizeof(T);
    ulong bits = (ulong)x & (~(ulong)0 >> extra);
    return bits ? (T)(__builtin_clzll(bits) - extra) : (T)(8 * sizeof(T));
}
template <class T> inline T extract_bits(T x, uint offset, uint bits) {
    static_assert(is_unsigned_v<T>, "extract_bits: signed fields are not modelled");
    return bits == 0 ? (T)0 : (T)((x >> offset) & ((T) ~(T)0 >> (8 * sizeof(T) - bits)));
}

} // namespace metal
