#include "ckpt/memory.h"

#include <unistd.h>

#include "ckpt/table.h"

uint64_t memory_quantised_bytes(const struct shape *s, int32_t layers) {
    uint64_t sum = 0;
    struct tensor_walk w;
    tensor_walk_start(&w, s, layers);
    while (tensor_walk_next(&w)) {
        uint64_t n = (uint64_t)tensor_rows(w.role, s) * (uint64_t)tensor_cols(w.role, s) *
                     (uint64_t)tensor_items(w.role, s);
        bool small = w.role->kind == KIND_VECTOR || w.role->kind == KIND_CONV;
        /* A scale and a bias of 2 bytes for each group. */
        sum += small ? 4 * n : n * (uint64_t)w.role->bits / 8 + n / (uint64_t)s->group * 4;
    }
    return sum;
}

uint64_t memory_session_bytes(const struct shape *s, int32_t layers, int32_t context) {
    uint64_t attention = (uint64_t)shape_attention_layers(s, layers);
    uint64_t deltanet = (uint64_t)layers - attention;
    uint64_t kv = attention * 2 * (uint64_t)s->kv_dim * 2 * (uint64_t)context;
    uint64_t state = (uint64_t)s->gdn_v_dim * (uint64_t)s->gdn_head_dim;
    uint64_t conv = (uint64_t)s->conv_dim * (uint64_t)(s->conv_taps - 1);
    return kv + deltanet * (state + conv) * 4;
}

uint64_t memory_present(void) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
}
