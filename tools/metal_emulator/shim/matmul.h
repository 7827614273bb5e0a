// matmul2d of Metal's performance primitives: destination (+)= left * right, by one simdgroup or
// by all of a threadgroup's. The threads of the scope meet; the first that goes on computes for
// all. What the operation reads and writes in memory is reported as accesses of its threads: each
// row of an operand as read by two of them, of two simdgroups where there are two, since in Metal
// any thread may be the one that reads it.
#pragma once

#include "tensor.h"

namespace mpp {
namespace tensor_ops {

template <class T> inline constexpr T dynamic_length_v = (T)-1;

struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int rows, int columns, int depth = dynamic_length_v<int>,
                                  bool left_transposed = false, bool right_transposed = false,
                                  bool relaxed = false, mode what = mode::multiply)
        : m(rows), n(columns), k(depth), transpose_left(left_transposed),
          transpose_right(right_transposed), relaxed_precision(relaxed), matmul_mode(what) {}
};

namespace detail {
using metal::detail::thread_of_scope;
using metal::detail::Value;

template <class T> struct Operand { // a type of elements, or an operand in registers
    using element = T;
    static constexpr bool memory = false;
};
template <class T, class E, class L> struct Operand<metal::cooperative_tensor<T, E, L>> {
    using element = T;
    static constexpr bool memory = false;
};
template <class T, class E> struct Operand<metal::tensor<T, E, metal::tensor_inline>> {
    using element = typename Value<T>::type;
    static constexpr bool memory = true;
};
template <class T> using element_of = typename Operand<T>::element;

// The floating point rows of the table in Apple's header; integers are not modelled.
template <class L, class R, class D> constexpr bool combination() {
    using metal::is_floating_point_v, metal::is_same_v;
    if (!is_floating_point_v<L> || !is_floating_point_v<R>) return false;
    if (is_same_v<D, float>) return true;
    bool has_float = is_same_v<L, float> || is_same_v<R, float>;
    return !has_float && (is_same_v<L, D> || is_same_v<R, D>);
}
template <class T> constexpr unsigned salt(unsigned operand) {
    return operand * 8 + (metal::is_same_v<T, float> ? 1 : metal::is_same_v<T, half> ? 2 : 3);
}

#ifndef MSL_CHECK_ADDRESS_SPACES
// Touches other threads' registers, and memory on behalf of all: not to be checked as this one's.
#pragma clang attribute push(__attribute__((no_sanitize("thread"))), apply_to = function)

// Calls f(x, y, pointer) for each element of an operand of inner x outer elements. Beyond the
// extents of a tensor the pointer is null: zero when read, lost when written.
template <class T, class F>
void visit(T &operand, void *const *threads_operands, int inner, int outer, F f) {
    if constexpr (Operand<T>::memory) {
        for (int y = 0; y < outer; y++)
            for (int x = 0; x < inner; x++) f(x, y, operand.place(x, y));
    } else {
        using L = typename T::layout_type;
        L layout;
        for (unsigned t = 0; t < L::threads; t++) {
            auto *elements = ((T *)threads_operands[t])->elements();
            for (unsigned i = 0; i < L::capacity; i++) {
                unsigned e = layout.element(t, i);
                if (e < L::count) f((int)(e % L::inner), (int)(e / L::inner), &elements[i]);
            }
        }
    }
}

struct Operands { // of one thread
    void *part[3];
};
// The same operand of all threads.
inline void *const *operands_of(void *const *threads, unsigned count, int part) {
    static void *list[1024];
    for (unsigned t = 0; t < count; t++) list[t] = ((Operands *)threads[t])->part[part];
    return list;
}

// Products and sums in float, in the order of the depth: one of several that hardware may use.
template <matmul2d_descriptor D, unsigned Threads, class L, class R, class C>
void multiply(void *const *threads, L &left, R &right, C &destination, int k) {
    constexpr int m = D.m, n = D.n;
    constexpr bool flip_left = D.transpose_left, flip_right = D.transpose_right;
    float *a = (float *)msl_scratch(sizeof(float) * ((size_t)(m + n) * k + m * n));
    float *b = a + (size_t)m * k, *c = b + (size_t)k * n;
    visit(left, operands_of(threads, Threads, 0), flip_left ? m : k, flip_left ? k : m,
          [&](int x, int y, auto *p) {
              a[flip_left ? x * k + y : y * k + x] = p == nullptr ? 0.0f : (float)*p;
          });
    visit(right, operands_of(threads, Threads, 1), flip_right ? k : n, flip_right ? n : k,
          [&](int x, int y, auto *p) {
              b[flip_right ? x * n + y : y * n + x] = p == nullptr ? 0.0f : (float)*p;
          });
    void *const *results = operands_of(threads, Threads, 2);
    for (int i = 0; i < m * n; i++) c[i] = 0.0f;
    if constexpr (D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate)
        visit(destination, results, n, m,
              [&](int x, int y, auto *p) { c[y * n + x] = p == nullptr ? 0.0f : (float)*p; });
    for (int i = 0; i < m; i++)
        for (int j = 0; j < k; j++)
            for (int x = 0; x < n; x++) c[i * n + x] += a[i * k + j] * b[j * n + x];
    visit(destination, results, n, m, [&](int x, int y, auto *p) {
        if (p != nullptr) *p = (element_of<C>)c[y * n + x];
    });
}
#pragma clang attribute pop

#ifdef MSL_CHECKED
// This thread's share of the reads of inner x outer elements.
template <unsigned Threads, class T>
void touch_reads(const T &t, int inner, int outer, const void *site) {
    if constexpr (Operand<T>::memory) {
        unsigned me = thread_of_scope<Threads / 32>(), turn = (unsigned)msl_seed() + me;
        int width = inner < t.extent(0) ? inner : (int)t.extent(0);
        int height = outer < t.extent(1) ? outer : (int)t.extent(1);
        for (int y = 0; y < height; y++) {
            if ((turn + y) % (Threads / 2) != 0) continue;
            for (int x = 0; x < width;) {
                int run = t.stride(0) == 1 ? width : 1;
                msl_touch(t.place(x, y), sizeof *t.data() * run, false, site);
                x += run;
            }
        }
    }
}
// Each element of a destination is one thread's, as in a cooperative tensor.
template <class Layout, class T> void touch_writes(const T &t, bool read, const void *site) {
    if constexpr (Operand<T>::memory) {
        Layout layout;
        unsigned me = thread_of_scope<Layout::threads / 32>();
        for (unsigned i = 0; i < Layout::capacity; i++) {
            unsigned e = layout.element(me, i);
            if (e == Layout::count) continue;
            auto *p = t.place((int)(e % Layout::inner), (int)(e / Layout::inner));
            if (p == nullptr) continue;
            if (read) msl_touch(p, sizeof *p, false, site);
            msl_touch(p, sizeof *p, true, site);
        }
    }
}
#endif
#endif
} // namespace detail

template <matmul2d_descriptor D, class Scope> class matmul2d {
    static constexpr unsigned simdgroups = Scope::static_size;
    static constexpr bool accumulates =
        D.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
    static_assert(D.m > 0 && D.n > 0, "matmul2d: rows and columns of the tile are constants");
    static_assert(D.k > 0 || D.k == dynamic_length_v<int>,
                  "matmul2d: a depth, or dynamic_length_v<int>");

    template <class T, class Coordinate, int Inner, int Outer, unsigned Part>
    using registers = metal::cooperative_tensor<
        T, Coordinate, metal::detail::Layout<Inner, Outer, simdgroups, detail::salt<T>(Part)>>;

  public:
    using scope = Scope;

    template <class L, class R, class T>
    using cooperative_tensor_left_input_t =
        registers<L, int, D.transpose_left ? D.m : D.k, D.transpose_left ? D.k : D.m, 1>;
    template <class L, class R, class T>
    using cooperative_tensor_right_input_t =
        registers<R, int, D.transpose_right ? D.k : D.n, D.transpose_right ? D.n : D.k, 2>;
    template <class L, class R, class T, class Coordinate>
    using cooperative_tensor_destination_t = registers<T, Coordinate, D.n, D.m, 3>;

    template <class L, class R, class T>
    cooperative_tensor_left_input_t<L, R, T> get_left_input_cooperative_tensor() const {
        static_assert(simdgroups == 1, "inputs in registers are for a single simdgroup");
        return {};
    }
    template <class L, class R, class T>
    cooperative_tensor_right_input_t<L, R, T> get_right_input_cooperative_tensor() const {
        static_assert(simdgroups == 1, "inputs in registers are for a single simdgroup");
        return {};
    }
    template <class L, class R, class T, class Coordinate = int>
    cooperative_tensor_destination_t<L, R, T, Coordinate>
    get_destination_cooperative_tensor() const {
        return {};
    }

    // Operands are lvalues that may change, as in Metal.
    template <class L, class R, class C>
    MSL_COLLECTIVE void run(L &left, R &right, C &destination) const {
        static_assert(detail::combination<detail::element_of<L>, detail::element_of<R>,
                                          detail::element_of<C>>(),
                      "matmul2d: this combination of types is none of Metal's, or not modelled");
#ifndef MSL_CHECK_ADDRESS_SPACES
        constexpr unsigned threads = 32 * simdgroups;
        const void *site = MSL_SITE;
        int k = D.k;
        if constexpr (D.k < 0) k = (int)left.extent(D.transpose_left ? 1 : 0);
#ifdef MSL_CHECKED
        detail::touch_reads<threads>(left, D.transpose_left ? D.m : k, D.transpose_left ? k : D.m,
                                     site);
        detail::touch_reads<threads>(right, D.transpose_right ? k : D.n,
                                     D.transpose_right ? D.n : k, site);
        detail::touch_writes<metal::detail::Layout<D.n, D.m, simdgroups, 7>>(destination,
                                                                             accumulates, site);
#endif
        detail::Operands mine = {{&left, &right, &destination}};
        if (void *const *all = msl_meet(&mine, simdgroups, site))
            detail::multiply<D, threads>(all, left, right, destination, k);
#endif
    }
};

} // namespace tensor_ops
} // namespace mpp
