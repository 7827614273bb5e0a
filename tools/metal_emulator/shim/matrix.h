// simdgroup_matrix: 8 x 8 elements, two in each lane.
#pragma once

namespace metal {

namespace detail {
struct FragmentPlace { // of a lane's first element; the second is in the next column
    int row, column;
};
// The layout that public Metal code relies on when it uses thread_elements().
inline FragmentPlace fragment_place(unsigned lane) {
    unsigned quad = lane / 4;
    return {(int)((quad & 4) + (lane / 2) % 4), (int)((quad & 2) * 2 + (lane % 2) * 2)};
}
} // namespace detail

template <class T, int Rows, int Columns> class simdgroup_matrix {
    static_assert(Rows == 8 && Columns == 8, "Metal has 8 x 8 only");
    static_assert(is_floating_point_v<T>, "half, bfloat or float");

  public:
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal) {
        detail::FragmentPlace p = detail::fragment_place(msl_lane());
        for (int i = 0; i < 2; i++) elements_[i] = p.row == p.column + i ? diagonal : (T)0;
    }
    vec<T, 2> &thread_elements() { return elements_; }
    const vec<T, 2> &thread_elements() const { return elements_; }

  private:
    vec<T, 2> elements_;
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Rows, int Columns = Rows>
inline simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, Rows, Columns> m;
    m.thread_elements() = (vec<T, 2>)value;
    return m;
}

namespace detail {
#ifdef MSL_CHECK_ADDRESS_SPACES
template <class T, class U> inline constexpr bool same_element = true; // U has an address space
#else
template <class T, class U> inline constexpr bool same_element = is_same_v<T, U>;
#endif
inline ulong fragment_index(int i, ulong per_row, ulong2 origin, bool transpose) {
    FragmentPlace p = fragment_place(msl_lane());
    ulong row = (ulong)p.row, column = (ulong)(p.column + i);
    if (transpose) return (origin.y + column) * per_row + origin.x + row;
    return (origin.y + row) * per_row + origin.x + column;
}
} // namespace detail

template <class T, class U>
METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8> &m, const U *p, ulong per_row = 8,
                               ulong2 origin = (ulong2)0, bool transpose = false) {
    static_assert(detail::same_element<T, __remove_cv(U)>, "simdgroup_load does not convert");
    for (int i = 0; i < 2; i++)
        m.thread_elements()[i] = p[detail::fragment_index(i, per_row, origin, transpose)];
}
template <class T, class U>
METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8> &m, U *p, ulong per_row = 8,
                                ulong2 origin = (ulong2)0, bool transpose = false) {
    static_assert(detail::same_element<T, U>, "simdgroup_store does not convert");
    for (int i = 0; i < 2; i++)
        p[detail::fragment_index(i, per_row, origin, transpose)] = m.thread_elements()[i];
}

#pragma clang attribute push(__attribute__((no_sanitize("thread"))), apply_to = function)
namespace detail {
struct Operands {
    float a[2], b[2];
};
struct Tiles { // of one multiplication, assembled once for all lanes
    float a[8][8], b[8][8];
};
inline void assemble(msl_simd_round *round, Tiles *tiles) {
    for (unsigned lane = 0; lane < 32; lane++) {
        FragmentPlace p = fragment_place(lane);
        const Operands &v = lane_value<Operands>(round, lane);
        for (int i = 0; i < 2; i++) {
            tiles->a[p.row][p.column + i] = v.a[i];
            tiles->b[p.row][p.column + i] = v.b[i];
        }
    }
    round->done = 1;
}
} // namespace detail

// Products and sums in float, rounded once to D: one order of several that hardware may use.
template <class D, class A, class B, class C>
MSL_COLLECTIVE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d,
                                                  const simdgroup_matrix<A, 8, 8> &a,
                                                  const simdgroup_matrix<B, 8, 8> &b,
                                                  const simdgroup_matrix<C, 8, 8> &c) {
    const auto &ea = a.thread_elements();
    const auto &eb = b.thread_elements();
    detail::Operands mine = {{(float)ea[0], (float)ea[1]}, {(float)eb[0], (float)eb[1]}};
    msl_simd_round *round = msl_simd_exchange(&mine, sizeof mine, MSL_SITE);
    static_assert(sizeof(detail::Tiles) <= sizeof round->result, "tiles fit the round");
    detail::Tiles *tiles = (detail::Tiles *)round->result;
    if (!round->done) detail::assemble(round, tiles);
    detail::FragmentPlace p = detail::fragment_place(msl_lane());
    vec<D, 2> sum = (vec<D, 2>)(D)0;
    for (int i = 0; i < 2; i++) {
        float s = (float)c.thread_elements()[i];
        for (int k = 0; k < 8; k++) s += tiles->a[p.row][k] * tiles->b[k][p.column + i];
        sum[i] = (D)s;
    }
    d.thread_elements() = sum;
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                               const simdgroup_matrix<B, 8, 8> &b) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8>((D)0));
}

#pragma clang attribute pop

} // namespace metal
