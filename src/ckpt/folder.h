/* A checkpoint's files by name: those of a directory, or the stand-in linked into the program. */
#ifndef LILY_CKPT_FOLDER_H
#define LILY_CKPT_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/file.h"

struct folder {
    char *path;    /* owned; the directory, or "(embedded)" */
    bool embedded; /* files are parts of the program itself */
};

/* path NULL: the embedded stand-in, or models/mini beside the program where none is linked in. */
int folder_open(const char *path, struct folder *out, lily_err *err);
void folder_close(struct folder *f);

bool folder_has(const struct folder *f, const char *name);

/* Maps a file; the caller ends it with file_unmap. LILY_ENOENT when there is none. */
int folder_map(const struct folder *f, const char *name, struct file_map *out, lily_err *err);

/* "<folder>/<name>" for messages and for opening, malloc'd for the caller; NULL: out of memory. */
char *folder_join(const struct folder *f, const char *name);

#endif
