/* SHA-256, through OpenSSL's libcrypto. */
#ifndef LILY_CKPT_HASH_H
#define LILY_CKPT_HASH_H

#include <stddef.h>
#include <stdint.h>

enum { HASH_BYTES = 32, HASH_HEX = 65 };

struct hash; /* a running SHA-256; NULL stands for one that could not be made */
struct hash *hash_new(void);
void hash_add(struct hash *h, const void *data, size_t n);
/* Ends and frees h; the digest as 64 hex digits. A failure gives 64 zeros, which match nothing. */
void hash_end_hex(struct hash *h, char out[HASH_HEX]);

/* Of one run of bytes. */
void hash_hex(const void *data, size_t n, char out[HASH_HEX]);

#endif
