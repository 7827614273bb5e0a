// Barriers and operations across the 32 lanes of a simdgroup.
#pragma once

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return (mem_flags)((int)a | (int)b);
}

MSL_COLLECTIVE inline void threadgroup_barrier(mem_flags flags) {
    msl_threadgroup_barrier(MSL_SITE, (int)flags);
}
MSL_COLLECTIVE inline void simdgroup_barrier(mem_flags flags) {
    msl_simdgroup_barrier(MSL_SITE, (int)flags);
}

// What follows exchanges registers: the executor's memory and stacks, which need no checks.
#pragma clang attribute push(__attribute__((no_sanitize("thread"))), apply_to = function)
namespace detail {
template <class T> inline const T &lane_value(const msl_simd_round *round, unsigned lane) {
    static_assert(sizeof(T) <= sizeof round->payload[0], "value too large for a simd operation");
    return *(const T *)round->payload[lane];
}
inline bool takes_part(const msl_simd_round *round, unsigned lane) {
    return (round->mask >> lane & 1) != 0;
}
} // namespace detail

namespace detail {
template <class T> constexpr void require_exchangeable() {
    using E = element_t<T>;
    static_assert(is_arithmetic_v<E> && !is_same_v<E, bool> && sizeof(E) <= 4 && count_v<T> <= 4,
                  "simd operations take numbers of up to 32 bits and vectors of them");
}
template <class T> constexpr void require_reducible() {
    require_exchangeable<T>();
    static_assert(sizeof(element_t<T>) > 1 && !is_same_v<element_t<T>, bfloat>,
                  "simd reductions take float, half, and integers of 16 and 32 bits");
}
} // namespace detail

// Tree order: neighbours 16 apart first. The hardware's order is unknown; so tests take tolerances.
#define MSL_REDUCE(name, identity, combine)                                                        \
    template <class T> MSL_COLLECTIVE T name(T value) {                                            \
        detail::require_reducible<T>();                                                            \
        msl_simd_round *round = msl_simd_exchange(&value, sizeof value, MSL_SITE);                 \
        T *result = (T *)round->result;                                                            \
        if (!round->done) {                                                                        \
            T part[32];                                                                            \
            for (unsigned i = 0; i < 32; i++)                                                      \
                part[i] = detail::takes_part(round, i) ? detail::lane_value<T>(round, i)           \
                                                       : (T)(identity);                            \
            for (int half_width = 16; half_width > 0; half_width /= 2)                             \
                for (int i = 0; i < half_width; i++) {                                             \
                    T a = part[i], b = part[i + half_width];                                       \
                    part[i] = (T)(combine);                                                        \
                }                                                                                  \
            *result = part[0];                                                                     \
            round->done = 1;                                                                       \
        }                                                                                          \
        return *result;                                                                            \
    }
#define MSL_ELEMENT detail::element_t<T>
MSL_REDUCE(simd_sum, 0, a + b)
MSL_REDUCE(simd_product, 1, a *b)
MSL_REDUCE(simd_max, numeric_limits<MSL_ELEMENT>::lowest(), max(a, b))
MSL_REDUCE(simd_min, numeric_limits<MSL_ELEMENT>::max(), min(a, b))
MSL_REDUCE(simd_or, 0, a | b)
MSL_REDUCE(simd_and, ~(T)0, a &b)
MSL_REDUCE(simd_xor, 0, a ^ b)
#undef MSL_ELEMENT
#undef MSL_REDUCE

// `source` may lie outside the simdgroup: then the lane keeps its own value, as on the hardware.
#define MSL_SHUFFLE(name, source)                                                                  \
    template <class T> MSL_COLLECTIVE T name(T value, ushort k) {                                  \
        detail::require_exchangeable<T>();                                                         \
        msl_simd_round *round = msl_simd_exchange(&value, sizeof value, MSL_SITE);                 \
        int lane = (int)msl_lane(), from = (source);                                               \
        if (from < 0 || from > 31) return value;                                                   \
        if (!detail::takes_part(round, (unsigned)from)) {                                          \
            msl_inactive_lane(MSL_SITE);                                                           \
            return value;                                                                          \
        }                                                                                          \
        return detail::lane_value<T>(round, (unsigned)from);                                       \
    }
MSL_SHUFFLE(simd_shuffle, ((void)lane, k))
MSL_SHUFFLE(simd_broadcast, ((void)lane, k))
MSL_SHUFFLE(simd_shuffle_xor, lane ^ k)
MSL_SHUFFLE(simd_shuffle_up, lane - k)
MSL_SHUFFLE(simd_shuffle_down, lane + k)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane - k) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + k) & 31)
MSL_SHUFFLE(quad_shuffle_xor, (lane & ~3) + ((lane ^ k) & 3))
MSL_SHUFFLE(quad_broadcast, (lane & ~3) + (k & 3))
#undef MSL_SHUFFLE

template <class T> MSL_COLLECTIVE T simd_broadcast_first(T value) {
    detail::require_exchangeable<T>();
    msl_simd_round *round = msl_simd_exchange(&value, sizeof value, MSL_SITE);
    return detail::lane_value<T>(round, (unsigned)__builtin_ctz(round->mask));
}

#define MSL_SCAN(name, inclusive, identity, op)                                                    \
    template <class T> MSL_COLLECTIVE T name(T value) {                                            \
        detail::require_reducible<T>();                                                            \
        msl_simd_round *round = msl_simd_exchange(&value, sizeof value, MSL_SITE);                 \
        T result = (T)(identity);                                                                  \
        for (unsigned i = 0; i < msl_lane() + (inclusive); i++)                                    \
            if (detail::takes_part(round, i)) result = result op detail::lane_value<T>(round, i);  \
        return result;                                                                             \
    }
MSL_SCAN(simd_prefix_inclusive_sum, 1, 0, +)
MSL_SCAN(simd_prefix_exclusive_sum, 0, 0, +)
MSL_SCAN(simd_prefix_inclusive_product, 1, 1, *)
MSL_SCAN(simd_prefix_exclusive_product, 0, 1, *)
#undef MSL_SCAN

class simd_vote {
  public:
    using vote_t = ulong;
    explicit simd_vote(ulong bits) : bits_(bits) {}
    explicit operator ulong() const { return bits_; }

  private:
    ulong bits_;
};
namespace detail {
inline uint ballot(bool p, const void *site, uint *mask) {
    uint value = p, bits = 0;
    msl_simd_round *round = msl_simd_exchange(&value, sizeof value, site);
    for (unsigned i = 0; i < 32; i++)
        if (takes_part(round, i) && lane_value<uint>(round, i)) bits |= 1u << i;
    *mask = round->mask;
    return bits;
}
} // namespace detail
MSL_COLLECTIVE inline simd_vote simd_ballot(bool p) {
    uint mask;
    return simd_vote(detail::ballot(p, MSL_SITE, &mask));
}
MSL_COLLECTIVE inline bool simd_any(bool p) {
    uint mask;
    return detail::ballot(p, MSL_SITE, &mask) != 0;
}
MSL_COLLECTIVE inline bool simd_all(bool p) {
    uint mask;
    uint bits = detail::ballot(p, MSL_SITE, &mask);
    return bits == mask;
}
MSL_COLLECTIVE inline bool simd_is_first() {
    uint mask;
    detail::ballot(true, MSL_SITE, &mask);
    return (int)msl_lane() == __builtin_ctz(mask);
}

#pragma clang attribute pop
} // namespace metal
