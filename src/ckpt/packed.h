#ifndef LILY_CKPT_PACKED_H
#define LILY_CKPT_PACKED_H
#include "ckpt/faults.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
struct ckpt;
bool packed_recognise(const uint8_t *data, size_t size);
size_t packed_header_bytes(const uint8_t *data);
int packed_open(struct ckpt *c, struct faults *f);
#endif
