#include "ckpt/packed.h"
#include "ckpt/load.h"
#include <string.h>
bool packed_recognise(const uint8_t *data, size_t size) {
    return size >= 8 && memcmp(data, "LILYPACK", 8) == 0;
}
size_t packed_header_bytes(const uint8_t *data) {
    (void)data;
    return 0;
}
int packed_open(struct ckpt *c, struct faults *f) {
    return ERR(f->err, LILY_EINVAL, "%s: packed files are not read yet", c->path);
}
