#include "ckpt/hash.h"

#include <openssl/evp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct hash {
    EVP_MD_CTX *ctx;
    bool ok;
};

struct hash *hash_new(void) {
    struct hash *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->ctx = EVP_MD_CTX_new();
    h->ok = h->ctx && EVP_DigestInit_ex(h->ctx, EVP_sha256(), NULL) == 1;
    return h;
}

void hash_add(struct hash *h, const void *data, size_t n) {
    if (h && h->ok && n > 0) h->ok = EVP_DigestUpdate(h->ctx, data, n) == 1;
}

void hash_end_hex(struct hash *h, char out[HASH_HEX]) {
    unsigned char digest[EVP_MAX_MD_SIZE] = {0};
    unsigned int n = 0;
    if (!h || !h->ok || EVP_DigestFinal_ex(h->ctx, digest, &n) != 1 || n != HASH_BYTES) {
        memset(digest, 0, sizeof digest);
    }
    for (int i = 0; i < HASH_BYTES; i++) snprintf(out + 2 * i, 3, "%02x", digest[i]);
    if (h) EVP_MD_CTX_free(h->ctx);
    free(h);
}

void hash_hex(const void *data, size_t n, char out[HASH_HEX]) {
    struct hash *h = hash_new();
    hash_add(h, data, n);
    hash_end_hex(h, out);
}
