// Tensors of Metal 4: views of memory (tensor) and values spread over the registers of a scope's
// threads (cooperative_tensor). Extents, strides and indices name the innermost dimension first.
// Modelled: two dimensions, tensor_inline; missing: tensor_handle, iterators, reductions.
#pragma once

namespace metal {

template <class T, size_t N> struct array {
    T values[N];
    constexpr T &operator[](size_t i) { return values[i]; }
    constexpr const T &operator[](size_t i) const { return values[i]; }
    static constexpr size_t size() { return N; }
};

inline constexpr size_t dynamic_extent = ~(size_t)0;

template <class Index, size_t... E> class extents {
    static_assert(sizeof...(E) == 2, "tensors of two dimensions are modelled");

  public:
    using index_type = Index;
    static constexpr size_t rank() { return sizeof...(E); }
    template <class... A> explicit constexpr extents(A... dynamic) {
        constexpr size_t all[] = {E...};
        static_assert(sizeof...(A) == ((E == dynamic_extent) + ...), "one value for each extent "
                                                                     "that is not fixed");
        const Index given[] = {(Index)dynamic..., 0};
        for (size_t i = 0, next = 0; i < rank(); i++)
            values_[i] = all[i] == dynamic_extent ? given[next++] : (Index)all[i];
    }
    constexpr Index extent(size_t i) const { return values_[i]; }

  private:
    Index values_[sizeof...(E)];
};
namespace detail {
template <class Index, size_t Rank> struct Dynamic;
template <class Index> struct Dynamic<Index, 2> {
    using type = extents<Index, dynamic_extent, dynamic_extent>;
};
template <class T> struct Value { using type = T; }; // T without const and address space
template <class T> struct Value<const T> { using type = T; };
#ifdef MSL_CHECK_ADDRESS_SPACES
template <class T> struct Value<device T> { using type = T; };
template <class T> struct Value<const device T> { using type = T; };
template <class T> struct Value<threadgroup T> { using type = T; };
template <class T> struct Value<const threadgroup T> { using type = T; };
#endif
} // namespace detail
template <class Index, size_t Rank> using dextents = typename detail::Dynamic<Index, Rank>::type;

struct tensor_inline {};

template <class T, class Extents, class Descriptor> class tensor;
template <class T, class Extents> class tensor<T, Extents, tensor_inline> {
  public:
    using element_type = T;
    using value_type = typename detail::Value<T>::type;
    using extents_type = Extents;
    using index_type = typename Extents::index_type;
    using strides_type = array<index_type, 2>;

    tensor(T *data, Extents e) : tensor(data, e, strides_type{{1, e.extent(0)}}) {}
    tensor(T *data, Extents e, strides_type strides)
        : data_(data), extents_(e), strides_(strides) {}

    // A view from (x, y) on. Extents that are not given end where this tensor ends; given ones are
    // the kernel's word that as much is there.
    tensor<T, dextents<index_type, 2>, tensor_inline> slice(index_type x, index_type y) const {
        return slice<dynamic_extent, dynamic_extent>(x, y);
    }
    template <size_t W, size_t H>
    tensor<T, extents<index_type, W, H>, tensor_inline> slice(index_type x, index_type y) const {
        T *from = data_ + (x * (long)strides_[0] + y * (long)strides_[1]);
        return {from, rest<W, H>(x, y), strides_};
    }

    T *data() const { return data_; }
    T *place(int x, int y) const { // null beyond the extents; for the shim
        if (x >= extent(0) || y >= extent(1)) return nullptr;
        return data_ + (x * (long)strides_[0] + y * (long)strides_[1]);
    }
    index_type extent(size_t i) const { return extents_.extent(i); }
    index_type stride(size_t i) const { return strides_[i]; }

  private:
    template <size_t W, size_t H> extents<index_type, W, H> rest(index_type x, index_type y) const {
        index_type w = x < extent(0) ? extent(0) - x : 0, h = y < extent(1) ? extent(1) - y : 0;
        if constexpr (W == dynamic_extent && H == dynamic_extent)
            return extents<index_type, W, H>(w, h);
        else if constexpr (W == dynamic_extent)
            return extents<index_type, W, H>(w);
        else if constexpr (H == dynamic_extent)
            return extents<index_type, W, H>(h);
        else
            return extents<index_type, W, H>();
    }
    T *data_;
    Extents extents_;
    strides_type strides_;
};
template <class T, class Extents> tensor(T *, Extents) -> tensor<T, Extents, tensor_inline>;
template <class T, class Extents, class Index>
tensor(T *, Extents, array<Index, 2>) -> tensor<T, Extents, tensor_inline>;

template <size_t N> struct execution_simdgroups {
    static_assert(N > 0, "a scope has a simdgroup");
    static constexpr size_t static_size = N;
};
using execution_simdgroup = execution_simdgroups<1>;

// ---- cooperative tensors

namespace detail {
// Which element of an Inner x Outer tensor lies at place `i` of a thread. Metal leaves that to the
// implementation; here it follows the seed, the shape, the operand and the type (both in Salt), so
// that a kernel which assumes one layout fails. One place of each thread holds nothing. In order
// (seed 0) the layout of a single simdgroup is the one that public kernels assume: 16 x 16 pieces,
// each lane with two runs of four neighbours.
template <int Inner, int Outer, unsigned Simdgroups, unsigned Salt> struct Layout {
    static constexpr unsigned threads = 32 * Simdgroups, count = Inner * Outer;
    static constexpr unsigned capacity = (count + threads - 1) / threads + 1;
    static constexpr unsigned places = threads * capacity;
    static constexpr int inner = Inner, outer = Outer;

    unsigned factor = 0, shift = 0;
    Layout() {
        ulong seed = msl_seed();
        if (seed == 0) return;
        ulong mixed = (seed * 0x9e3779b97f4a7c15u ^ Salt) * 0xbf58476d1ce4e5b9u ^ places;
        shift = (unsigned)(mixed >> 40) % places;
        factor = (unsigned)(mixed >> 16) % places | 1;
        while (divisor(factor, places) != 1) factor = factor + 2;
    }
    // `count` for a place that holds nothing.
    unsigned element(unsigned number, unsigned i) const {
        unsigned e = factor == 0
                         ? in_order(number, i)
                         : (unsigned)(((ulong)factor * (number * capacity + i) + shift) % places);
        return e < count ? e : count;
    }

  private:
    static unsigned divisor(unsigned a, unsigned b) {
        while (b != 0) {
            unsigned rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    }
    static unsigned in_order(unsigned number, unsigned i) {
        if (i == capacity - 1) return count;
        if constexpr (Simdgroups != 1 || Inner % 16 != 0 || Outer % 16 != 0)
            return number * (capacity - 1) + i;
        unsigned quad = number / 4, piece = i / 8;
        unsigned row = ((quad & 4) | (number / 2 % 4)) + i % 8 / 4 * 8;
        unsigned column = ((quad & 2) | (number & 1)) * 4 + i % 4;
        return (piece / (Inner / 16) * 16 + row) * Inner + piece % (Inner / 16) * 16 + column;
    }
};
template <unsigned Simdgroups> inline unsigned thread_of_scope() {
    return Simdgroups == 1 ? msl_lane() : msl_thread();
}
} // namespace detail

template <class T, class Index, class Layout> class cooperative_tensor {
  public:
    using element_type = T;
    using index_type = Index;
    using layout_type = Layout;

    cooperative_tensor() { // nothing is promised of new elements
        for (unsigned i = 0; i < Layout::capacity; i++) elements_[i] = (T)__builtin_nanf("");
    }
    static constexpr uint16_t get_capacity() { return Layout::capacity; }
    bool is_valid_element(uint i) const { return element(i) < Layout::count; }
    array<index_type, 2> get_multidimensional_index(uint i) const {
        unsigned e = element(i) % Layout::count; // a place that holds nothing: anywhere
        return {{(index_type)(e % Layout::inner), (index_type)(e / Layout::inner)}};
    }
    T &operator[](uint i) { return elements_[within(i)]; }
    const T &operator[](uint i) const { return elements_[within(i)]; }

    template <class U, class E> MSL_COLLECTIVE void load(const tensor<U, E, tensor_inline> &from) {
        static_assert(is_same_v<typename detail::Value<U>::type, T>, "load does not convert");
        msl_meet(nullptr, simdgroups, MSL_SITE);
        each(from, [&](unsigned i, U *p) { elements_[i] = p == nullptr ? (T)0 : (T)*p; });
    }
    template <class U, class E>
    MSL_COLLECTIVE void store(const tensor<U, E, tensor_inline> &to) const {
        static_assert(is_same_v<typename detail::Value<U>::type, T>, "store does not convert");
        msl_meet(nullptr, simdgroups, MSL_SITE);
        each(to, [&](unsigned i, U *p) {
            if (p != nullptr) *p = elements_[i];
        });
    }
    T *elements() { return elements_; } // for the shim

  private:
    static constexpr unsigned simdgroups = Layout::threads / 32;
    static unsigned element(uint i) {
        return Layout().element(detail::thread_of_scope<simdgroups>(), within(i));
    }
    MSL_COLLECTIVE static uint within(uint i) {
        if (i >= Layout::capacity) msl_beyond_capacity(MSL_SITE);
        return i;
    }
    // Calls f(place, pointer into the tensor) for all valid places; null beyond its extents.
    template <class U, class E, class F>
    METAL_FUNC static void each(const tensor<U, E, tensor_inline> &t, F f) {
        Layout layout;
        unsigned thread_index = detail::thread_of_scope<simdgroups>();
        for (unsigned i = 0; i < Layout::capacity; i++) {
            unsigned e = layout.element(thread_index, i);
            if (e == Layout::count) continue;
            f(i, t.place((int)(e % Layout::inner), (int)(e / Layout::inner)));
        }
    }
    T elements_[Layout::capacity];
};

} // namespace metal
