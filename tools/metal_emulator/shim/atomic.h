// Relaxed atomics on device and threadgroup memory.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

#ifdef MSL_CHECK_ADDRESS_SPACES
// clang's atomic builtins take no foreign address spaces; the signatures are all this pass needs.
#define MSL_ATOMIC_BODY(...) ;
#else
#define MSL_ATOMIC_BODY(...)                                                                       \
    { __VA_ARGS__ }
#endif

namespace detail {
template <class A> struct AtomicValue;
template <class T> struct AtomicValue<atomic<T>> { using type = T; };
template <class A> struct AtomicValue<const A> : AtomicValue<A> {};
#ifdef MSL_CHECK_ADDRESS_SPACES
template <class T> struct AtomicValue<device atomic<T>> { using type = T; };
template <class T> struct AtomicValue<threadgroup atomic<T>> { using type = T; };
#endif
template <class A> using atomic_value_t = typename AtomicValue<A>::type;
} // namespace detail

// One loop for all: the sanitizer instruments compare-exchange, but not atomic min and max.
#define MSL_ATOMIC(name, after)                                                                    \
    template <class A, class T = detail::atomic_value_t<A>>                                        \
    inline T atomic_##name##_explicit(A *a, detail::identity_t<T> x, memory_order)                 \
        MSL_ATOMIC_BODY(uint *bits = (uint *)&a->value;                                            \
                        uint old = __atomic_load_n(bits, __ATOMIC_RELAXED); for (;;) {             \
                            T before = as_type<T>(old);                                            \
                            uint next = as_type<uint>((T)(after));                                 \
                            if (__atomic_compare_exchange_n(bits, &old, next, false,               \
                                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED))   \
                                return before;                                                     \
                        })
MSL_ATOMIC(fetch_add, before + x)
MSL_ATOMIC(fetch_sub, before - x)
MSL_ATOMIC(exchange, ((void)before, x))
MSL_ATOMIC(fetch_min, x < before ? x : before)
MSL_ATOMIC(fetch_max, before < x ? x : before)
MSL_ATOMIC(fetch_and, before &x)
MSL_ATOMIC(fetch_or, before | x)
MSL_ATOMIC(fetch_xor, before ^ x)
#undef MSL_ATOMIC

template <class A, class T = detail::atomic_value_t<A>>
inline T atomic_load_explicit(const A *a, memory_order)
    MSL_ATOMIC_BODY(return as_type<T>(__atomic_load_n(
        (const uint *)&a->value,
        __ATOMIC_RELAXED));) template <class A, class T = detail::atomic_value_t<A>>
    inline void atomic_store_explicit(A *a, detail::identity_t<T> x, memory_order) MSL_ATOMIC_BODY(
        __atomic_store_n((uint *)&a->value, as_type<uint>(x),
                         __ATOMIC_RELAXED);) template <class A, class T = detail::atomic_value_t<A>>
    inline bool atomic_compare_exchange_weak_explicit(A *a, T *expected, detail::identity_t<T> x,
                                                      memory_order, memory_order)
        MSL_ATOMIC_BODY(return __atomic_compare_exchange_n((uint *)&a->value, (uint *)expected,
                                                           as_type<uint>(x), true, __ATOMIC_RELAXED,
                                                           __ATOMIC_RELAXED);)
#undef MSL_ATOMIC_BODY

} // namespace metal
