// Counts how many tokens go to each expert, and gives each token its place in that expert's list.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void route(device const uint *expert [[buffer(0)]],
                      device atomic_uint *counts [[buffer(1)]],
                      device uint *places [[buffer(2)]], constant uint &tokens [[buffer(3)]],
                      uint token [[thread_position_in_grid]]) {
    if (token >= tokens) return; // GUARD
    places[token] = atomic_fetch_add_explicit(&counts[expert[token]], 1u, memory_order_relaxed);
}
