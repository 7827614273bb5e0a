/* Files: read-only maps, whole reads, and writes that appear complete or not at all. */
#ifndef LILY_BASE_FILE_H
#define LILY_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* A read-only view of bytes: a mapped file or memory that outlives it (embedded data). */
struct file_map {
    const uint8_t *data; /* [size]; NULL when size is 0 */
    size_t size;
    bool mapped; /* file_unmap releases it */
};

int file_map_open(const char *path, struct file_map *out, lily_err *err);
void file_unmap(struct file_map *map);

/* Tells the kernel that the whole map will be read soon (readahead, large pages where it can). */
void file_map_will_need(const struct file_map *map);

/* Reads a file or a pipe to its end into a malloc'd, zero-terminated buffer, the caller's to free;
 * more than limit bytes are an error. LILY_ECANCELED: a signal ended the wait for a pipe. */
int file_read(const char *path, size_t limit, char **data, size_t *size, lily_err *err);

bool file_exists(const char *path);
bool file_is_dir(const char *path);

/* An atomic writer of a new file, or in the place of a regular one (anything else is LILY_EINVAL):
 * bytes go to a temporary file in the target's folder (without a name where there are such); commit
 * syncs and renames it; abort (or a failed commit) removes it. Exactly one of commit and abort ends
 * a writer. */
struct file_writer;
int file_writer_open(const char *path, struct file_writer **out, lily_err *err);
int file_writer_write(struct file_writer *w, const void *bytes, size_t n, lily_err *err);
/* Writes n bytes at an absolute offset (header fix-ups, parallel parts). */
int file_writer_write_at(struct file_writer *w, uint64_t offset, const void *bytes, size_t n,
                         lily_err *err);
uint64_t file_writer_offset(const struct file_writer *w); /* of the next file_writer_write */
int file_writer_commit(struct file_writer *w, lily_err *err);
void file_writer_abort(struct file_writer *w);

#endif
