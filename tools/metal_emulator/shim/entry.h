// How the executor learns of a library's kernels and calls them.
#pragma once

namespace metal {
namespace detail {

using Source = msl_source;

struct Parameter { // as the front end read it
    Source source;
    unsigned index;
    const char *name;
};
using ThreadContext = msl_thread_context;

inline void threadgroup_variable(const threadgroup void *base, unsigned size, const char *name) {
#ifndef MSL_CHECK_ADDRESS_SPACES
    msl_threadgroup_variable(base, size, name);
#endif
}
inline bool constant_defined(const void *p) {
    return msl_constant_defined(p);
}

struct ConstantRegistration {
    ConstantRegistration(const char *name, unsigned index, void *address, unsigned size) {
        msl_register_constant(name, index, address, size);
    }
};

#ifndef MSL_CHECK_ADDRESS_SPACES
extern "C" const char __start_tgmem[] __attribute__((weak, visibility("hidden")));
extern "C" const char __stop_tgmem[] __attribute__((weak, visibility("hidden")));
struct SectionRegistration {
    SectionRegistration() { msl_register_section(__start_tgmem, __stop_tgmem); }
};
static SectionRegistration section_registration;

// What follows reads the executor's own memory, which the checks know nothing of.
#pragma clang attribute push(__attribute__((no_sanitize("thread"))), apply_to = function)
template <class T> T position(const uint *v) {
    static_assert(is_same_v<element_t<T>, uint> || is_same_v<element_t<T>, ushort>,
                  "positions are uint or ushort");
    if constexpr (count_v<T> == 1)
        return (T)v[0];
    else {
        T r;
        for (int i = 0; i < count_v<T>; i++) r[i] = (element_t<T>)v[i];
        return r;
    }
}
template <class T> T scalar_position(uint v) {
    static_assert(is_same_v<T, uint> || is_same_v<T, ushort>, "this attribute is uint or ushort");
    return (T)v;
}

// The value of a parameter whose C++ type is T and whose attribute is P.
template <class T, Source S> struct Argument {
    static T get(const ThreadContext *c, unsigned) {
        if constexpr (S == Source::thread_position_in_grid)
            return position<T>(c->position_in_grid);
        else if constexpr (S == Source::threadgroup_position_in_grid)
            return position<T>(c->group_position);
        else if constexpr (S == Source::thread_position_in_threadgroup)
            return position<T>(c->position_in_group);
        else if constexpr (S == Source::threads_per_threadgroup)
            return position<T>(c->group_size);
        else if constexpr (S == Source::dispatch_threads_per_threadgroup)
            return position<T>(c->full_group_size);
        else if constexpr (S == Source::threadgroups_per_grid)
            return position<T>(c->group_count);
        else if constexpr (S == Source::threads_per_grid)
            return position<T>(c->grid_size);
        else if constexpr (S == Source::thread_index_in_threadgroup)
            return scalar_position<T>(c->index_in_group);
        else if constexpr (S == Source::thread_index_in_simdgroup)
            return scalar_position<T>(c->lane);
        else if constexpr (S == Source::simdgroup_index_in_threadgroup)
            return scalar_position<T>(c->simdgroup);
        else if constexpr (S == Source::simdgroups_per_threadgroup)
            return scalar_position<T>(c->simdgroup_count);
        else
            return scalar_position<T>(32);
    }
    static constexpr unsigned size = 0, alignment = 0;
    static constexpr bool writable = false, reference = false;
};
template <class T, Source S> struct Argument<T *, S> {
    static T *get(const ThreadContext *c, unsigned index) {
        if constexpr (S == Source::threadgroup_argument)
            return (T *)c->threadgroup_memory[index];
        else
            return (T *)c->buffers[index];
    }
    static constexpr unsigned size = sizeof(T), alignment = alignof(T);
    static constexpr bool writable = !__is_const(T), reference = false;
};
template <class T, Source S> struct Argument<T &, S> {
    static T &get(const ThreadContext *c, unsigned index) {
        return *Argument<T *, S>::get(c, index);
    }
    static constexpr unsigned size = sizeof(T), alignment = alignof(T);
    static constexpr bool writable = !__is_const(T), reference = true;
};

template <class T, T... I> struct Sequence {};
template <unsigned N> using Indices = __make_integer_seq<Sequence, unsigned, N>;

constexpr bool indices_differ(const Parameter *p) {
    for (; p->source != Source::end; p++)
        for (const Parameter *q = p + 1; q->source != Source::end; q++) {
            bool group = p->source == Source::threadgroup_argument;
            bool bound = p->source <= Source::threadgroup_argument &&
                         q->source <= Source::threadgroup_argument &&
                         group == (q->source == Source::threadgroup_argument);
            if (bound && p->index == q->index) return false;
        }
    return true;
}

template <auto Function, const Parameter *P> struct KernelRegistration {
    static_assert(indices_differ(P), "two parameters of a kernel have one index");
    KernelRegistration(const char *name, unsigned count, unsigned max_threads) {
        declare(Function, name, count, max_threads);
    }
    template <class... A>
    static void declare(void (*)(A...), const char *name, unsigned count, unsigned max_threads) {
        fill<A...>(Indices<sizeof...(A)>{}, name, count, max_threads);
    }
    template <class... A, unsigned... I>
    static void fill(Sequence<unsigned, I...>, const char *name, unsigned count,
                     unsigned max_threads) {
        static const msl_parameter_info table[] = {
            {P[I].source, P[I].index, P[I].name, Argument<A, P[I].source>::size,
             Argument<A, P[I].source>::alignment, Argument<A, P[I].source>::writable,
             Argument<A, P[I].source>::reference}...,
            {Source::end, 0, nullptr, 0, 0, false, false}};
        msl_register_kernel(name, run<A...>, table, count, max_threads);
    }
    template <class... A> static void run(const void *context) {
        call<A...>((const ThreadContext *)context, Indices<sizeof...(A)>{});
    }
    template <class... A, unsigned... I>
    METAL_FUNC static void call(const ThreadContext *c, Sequence<unsigned, I...>) {
        ((void (*)(A...))Function)(Argument<A, P[I].source>::get(c, P[I].index)...);
    }
};
#pragma clang attribute pop
#endif

} // namespace detail
} // namespace metal
