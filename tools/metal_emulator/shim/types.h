// Scalar, vector and matrix types, type traits, construction and conversion.
#pragma once

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t;
typedef unsigned long uint64_t, ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#define FLT_MAX     3.402823466e+38F
#define FLT_MIN     1.17549435e-38F
#define MAXFLOAT    FLT_MAX
#define HALF_MAX    ((half)65504.0f)
#define MAXHALF     HALF_MAX
#define INFINITY    __builtin_inff()
#define NAN         __builtin_nanf("")
#define M_PI_F      3.14159265358979323846f
#define M_LOG2E_F   1.44269504088896340736f
#define M_LN2_F     0.69314718055994530942f
#define M_SQRT1_2_F 0.70710678118654752440f
#define INT_MAX     2147483647
#define INT_MIN     (-INT_MAX - 1)
#define UINT_MAX    4294967295u
#define USHRT_MAX   65535

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define MSL_VECTORS(T)                                                                             \
    using T##2 = vec<T, 2>;                                                                        \
    using T##3 = vec<T, 3>;                                                                        \
    using T##4 = vec<T, 4>;
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
using long2 = vec<long, 2>; // no wider: the checker sees accesses of up to 16 bytes
using ulong2 = vec<ulong, 2>;
#undef MSL_VECTORS

// ---- traits

template <class T, T V> struct integral_constant {
    static constexpr T value = V;
    constexpr operator T() const { return V; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T>
inline constexpr bool is_floating_point_v =
    is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> inline constexpr bool is_integral_v = __is_integral(T);
template <class T>
inline constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T> inline constexpr bool is_unsigned_v = __is_unsigned(T);

namespace detail {
template <class T> struct Shape { // element type and count of a scalar or vector
    using element = T;
    static constexpr int count = 1;
};
template <class T, int N> struct Shape<vec<T, N>> {
    using element = T;
    static constexpr int count = N;
};
template <class T> using element_t = typename Shape<T>::element;
template <class T> inline constexpr int count_v = Shape<T>::count;
template <class T> struct Identity { using type = T; };
template <class T> using identity_t = typename Identity<T>::type; // a parameter not deduced from
} // namespace detail

#ifdef MSL_CHECK_ADDRESS_SPACES
template <class T, int N> using packed_vec = vec<T, N>; // a class does not load from device memory
#else
template <class T, int N> struct packed_vec { // no padding, aligned as its element
    T v[N];
    packed_vec() = default;
    packed_vec(vec<T, N> a) {
        for (int i = 0; i < N; i++) v[i] = a[i];
    }
    operator vec<T, N>() const {
        vec<T, N> r;
        for (int i = 0; i < N; i++) r[i] = v[i];
        return r;
    }
    T &operator[](int i) { return v[i]; }
    const T &operator[](int i) const { return v[i]; }
};
namespace detail {
template <class T, int N> struct Shape<packed_vec<T, N>> {
    using element = T;
    static constexpr int count = N;
};
} // namespace detail
#endif
#define MSL_PACKED(T)                                                                              \
    using packed_##T##2 = packed_vec<T, 2>;                                                        \
    using packed_##T##3 = packed_vec<T, 3>;                                                        \
    using packed_##T##4 = packed_vec<T, 4>;
MSL_PACKED(uchar)
MSL_PACKED(char)
MSL_PACKED(ushort)
MSL_PACKED(short)
MSL_PACKED(uint)
MSL_PACKED(int)
MSL_PACKED(half)
MSL_PACKED(float)
#undef MSL_PACKED

// ---- construction: the front end writes TYPE(...) as make<TYPE>(...)

namespace detail {
template <class T, class A> constexpr T scalar(A a) {
    // clang converts between half and bfloat only by way of float
    constexpr bool via_float = is_arithmetic_v<T> && is_arithmetic_v<A> && !is_same_v<T, A> &&
                               (is_same_v<T, bfloat> || is_same_v<A, bfloat>);
    if constexpr (via_float)
        return static_cast<T>(static_cast<float>(a));
    else
        return static_cast<T>(a);
}

template <class T, class A> constexpr void append(T &to, int &at, A a) {
    if constexpr (count_v<A> == 1)
        to[at++] = scalar<element_t<T>>(a);
    else
        for (int i = 0; i < count_v<A>; i++) to[at++] = scalar<element_t<T>>(a[i]);
}

template <class T, class... A> constexpr T make(A... a) {
    if constexpr (sizeof...(A) == 0)
        return T{};
    else if constexpr (count_v<T> == 1) {
        if constexpr (sizeof...(A) == 1)
            return scalar<T>(a...);
        else
            return T(a...);
    } else if constexpr (sizeof...(A) == 1 && ((count_v<A> == 1) && ...)) {
        T r{};
        for (int i = 0; i < count_v<T>;) append(r, i, a...);
        return r;
    } else {
        static_assert((count_v<A> + ...) == count_v<T>,
                      "a vector takes as many values as elements");
        T r{};
        int at = 0;
        (append(r, at, a), ...);
        return r;
    }
}

template <class T, class A> constexpr T convert_static(A a) {
    if constexpr (count_v < T >> 1 || is_arithmetic_v<T>)
        return make<T>(a);
    else
        return static_cast<T>(a);
}

// The front end writes (TYPE)e as Cast<TYPE>{}->*e, which binds nearly as tightly as the cast.
template <class T> struct Cast {
    template <class A> constexpr T operator->*(A a) const { return convert_static<T>(a); }
};
template <class T> struct Cast<T *> {
    template <class A> constexpr T *operator->*(A *a) const { return (T *)a; }
};
} // namespace detail

// ---- matrices of columns

template <class T, int C, int R> struct matrix {
    vec<T, R> columns[C];
    matrix() = default;
    template <class... V> explicit matrix(vec<T, R> first, V... rest) : columns{first, rest...} {
        static_assert(sizeof...(V) + 1 == C, "a matrix takes one vector for each column");
    }
    template <class U> explicit matrix(const matrix<U, C, R> &other) {
        for (int i = 0; i < C; i++) columns[i] = detail::make<vec<T, R>>(other[i]);
    }
    vec<T, R> &operator[](int i) { return columns[i]; }
    const vec<T, R> &operator[](int i) const { return columns[i]; }
};
#define MSL_MATRICES(T)                                                                            \
    using T##2x2 = matrix<T, 2, 2>;                                                                \
    using T##2x4 = matrix<T, 2, 4>;                                                                \
    using T##3x3 = matrix<T, 3, 3>;                                                                \
    using T##4x4 = matrix<T, 4, 4>;
MSL_MATRICES(float)
MSL_MATRICES(half)
#undef MSL_MATRICES
template <class T, int C, int R> vec<T, R> operator*(const matrix<T, C, R> &m, vec<T, C> v) {
    vec<T, R> sum = m[0] * v[0];
    for (int i = 1; i < C; i++) sum += m[i] * v[i];
    return sum;
}

template <class T> struct numeric_limits {
    static constexpr T max() {
        if constexpr (is_same_v<T, float>)
            return FLT_MAX;
        else if constexpr (is_same_v<T, half>)
            return (T)65504.0f;
        else if constexpr (is_same_v<T, bfloat>)
            return (T)3.38953139e38f;
        else if constexpr (is_unsigned_v<T>)
            return (T) ~(T)0;
        else
            return (T)(((ulong)1 << (8 * sizeof(T) - 1)) - 1);
    }
    static constexpr T lowest() {
        if constexpr (is_floating_point_v<T>)
            return -max();
        else if constexpr (is_unsigned_v<T>)
            return 0;
        else
            return (T)(-max() - 1);
    }
    static constexpr T infinity() { return (T)__builtin_inff(); }
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }
};

} // namespace metal

template <class To, class From> inline To as_type(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
    return __builtin_bit_cast(To, from);
}
