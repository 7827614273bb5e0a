/* All tensors of a folder by name, over all its shards, checked against the index: a shard that is
 * missing, a tensor that lies in another shard than the index says, and tensors that only one of
 * the two knows are faults. */
#ifndef LILY_CKPT_CATALOG_H
#define LILY_CKPT_CATALOG_H

#include <stdbool.h>

#include "ckpt/faults.h"
#include "ckpt/folder.h"
#include "ckpt/safetensors.h"

struct catalog_shard {
    char *name; /* owned: file name in the folder */
    char *path; /* owned: for messages */
    struct file_map map;
    struct st_file file;
};

struct catalog_entry {
    const struct st_tensor *tensor;
    const struct catalog_shard *shard;
    bool used; /* bound to a weight, or skipped knowingly */
};

struct catalog {
    struct catalog_shard *shards; /* [n_shards] owned */
    size_t n_shards;
    struct catalog_entry *entries; /* [n] owned, sorted by name */
    size_t n;
    bool damaged; /* a shard could not be read: missing tensors are no news (inspection only) */
};

/* Opens the shards that model.safetensors.index.json names, or model.safetensors alone. The caller
 * ends *out with catalog_close; the tensors point into its mappings. */
int catalog_open(const struct folder *folder, struct catalog *out, struct faults *f);
/* The same for one file that stands alone (inspection). */
int catalog_open_file(const char *path, struct catalog *out, struct faults *f);
void catalog_close(struct catalog *c);

/* The tensor of that name, or NULL. */
struct catalog_entry *catalog_find(const struct catalog *c, const char *name);

/* The tensor whose data holds that address, or NULL: tells which one a bad value lies in. */
const struct catalog_entry *catalog_locate(const struct catalog *c, const uint8_t *address);

#endif
