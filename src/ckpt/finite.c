#include "ckpt/finite.h"

enum { BLOCK = 2048 };

size_t bf16_find_not_finite(const uint8_t *data, size_t n) {
    uint16_t block[BLOCK];
    for (size_t at = 0; at < n; at += BLOCK) {
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        memcpy(block, data + 2 * at, 2 * m);
        uint16_t bad = 0;
        for (size_t i = 0; i < m; i++) bad |= (uint16_t)((block[i] & 0x7f80) == 0x7f80);
        if (!bad) continue;
        for (size_t i = 0; i < m; i++) {
            if ((block[i] & 0x7f80) == 0x7f80) return at + i;
        }
    }
    return SIZE_MAX;
}
