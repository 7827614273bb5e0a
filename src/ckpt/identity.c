#include "ckpt/identity.h"

#include <string.h>

#include "ckpt/load.h"
#include "ckpt/packed.h"

enum { SAMPLES = 64, SAMPLE_BYTES = 4096 };

static void add_number(struct hash *h, uint64_t value) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(value >> (8 * i));
    hash_add(h, bytes, sizeof bytes);
}

static void add_shard(struct hash *h, const struct catalog_shard *s) {
    hash_add(h, s->name, strlen(s->name) + 1);
    add_number(h, s->map.size);
    hash_add(h, s->map.data, s->file.header_bytes);
    const uint8_t *data = s->map.data + s->file.header_bytes;
    size_t size = s->map.size - s->file.header_bytes;
    if (size <= (size_t)SAMPLES * SAMPLE_BYTES) {
        hash_add(h, data, size);
        return;
    }
    size_t step = (size - SAMPLE_BYTES) / (SAMPLES - 1);
    for (size_t i = 0; i + 1 < SAMPLES; i++) hash_add(h, data + i * step, SAMPLE_BYTES);
    hash_add(h, data + size - SAMPLE_BYTES, SAMPLE_BYTES);
}

void identity_of(const struct ckpt *c, char out[HASH_HEX]) {
    struct hash *h = hash_new();
    add_number(h, c->weights.embed.bits == 16);
    if (c->form == FORM_PACKED) {
        hash_add(h, c->packed.data, packed_header_bytes(c->packed.data));
    } else {
        hash_add(h, c->texts.file[TEXT_CONFIG].data, c->texts.file[TEXT_CONFIG].size);
        for (size_t i = 0; i < c->catalog.n_shards; i++) add_shard(h, &c->catalog.shards[i]);
    }
    hash_end_hex(h, out);
}
