#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"

static int fail(lily_err *err, const char *path, const char *verb) {
    return err_system(err, errno, path, verb);
}

static int not_regular(lily_err *err, const char *path, mode_t mode) {
    return ERR(err, LILY_EINVAL, "%s: found %s, expected a regular file; give a file's path", path,
               S_ISDIR(mode)    ? "a folder"
               : S_ISFIFO(mode) ? "a pipe"
                                : "a device or socket");
}

/* Opens a regular file for reading and tells its size; returns the descriptor or a negative code.
 */
static int open_regular(const char *path, size_t *size, lily_err *err) {
    /* Without O_NONBLOCK a pipe that nobody writes to would never open. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail(err, path, "open");
    struct stat st;
    if (fstat(fd, &st) != 0) {
        int rc = fail(err, path, "stat");
        close(fd);
        return rc;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return not_regular(err, path, st.st_mode);
    }
    *size = (size_t)st.st_size;
    return fd;
}

int file_map_open(const char *path, struct file_map *out, lily_err *err) {
    size_t size = 0;
    int fd = open_regular(path, &size, err);
    if (fd < 0) return fd;
    *out = (struct file_map){0};
    if (size > 0) {
        void *data = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            int rc = fail(err, path, "map");
            close(fd);
            return rc;
        }
        *out = (struct file_map){.data = data, .size = size, .mapped = true};
    }
    close(fd);
    return 0;
}

void file_unmap(struct file_map *map) {
    if (map->mapped) munmap((void *)(uintptr_t)map->data, map->size);
    *map = (struct file_map){0};
}

void file_map_will_need(const struct file_map *map) {
    /* Advice only: failure changes nothing but speed. */
    if (map->mapped) madvise((void *)(uintptr_t)map->data, map->size, MADV_WILLNEED);
}

/* Only a pipe or a device is waited for so long that a signal comes, and only a handler that wants
 * the wait ended lets it end. */
static int interrupted(lily_err *err, const char *path) {
    return ERR(err, LILY_ECANCELED, "%s: interrupted", path);
}

int file_read(const char *path, size_t limit, char **data, size_t *size, lily_err *err) {
    enum { STEP = 1 << 16 };
    struct buf bytes = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == EINTR ? interrupted(err, path) : fail(err, path, "open");
    ssize_t got = 1;
    int rc = 0;
    while (rc == 0 && got != 0) {
        if (bytes.len > limit) {
            rc = ERR(err, LILY_EFORMAT, "%s: found more than %zu bytes, expected at most so many",
                     path, limit);
        } else if (!buf_reserve(&bytes, STEP)) {
            rc = ERR_NOMEM(err, path);
        } else if ((got = read(fd, bytes.data + bytes.len, STEP)) > 0) {
            bytes.len += (size_t)got;
        } else if (got < 0) {
            rc = errno == EINTR ? interrupted(err, path) : fail(err, path, "read");
        }
    }
    close(fd);
    *size = bytes.len;
    if (rc == 0) {
        bytes.data[bytes.len] = 0;
        *data = buf_take(&bytes);
    }
    buf_free(&bytes);
    return rc;
}

bool file_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

bool file_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

struct file_writer {
    int fd;
    uint64_t offset;
    char *path; /* final name */
    char *temp; /* name while writing */
    bool named; /* the file has that name; else it has none, and goes when the program does */
};

static void writer_free(struct file_writer *w) {
    if (w->fd >= 0) close(w->fd);
    free(w->path);
    free(w->temp);
    free(w);
}

/* The rename at the end would put a file in the place of whatever is there. */
static int check_target(const char *path, lily_err *err) {
    size_t n = strlen(path);
    if (n == 0 || path[n - 1] == '/') {
        return ERR(err, LILY_EINVAL, "%s: found no file's name, expected one; give a file's path",
                   n ? path : "(empty path)");
    }
    struct stat st;
    if (stat(path, &st) != 0 || S_ISREG(st.st_mode)) return 0;
    return not_regular(err, path, st.st_mode);
}

/* The folder that path lies in, in out[PATH_MAX]. */
static void folder_of(const char *path, char *out) {
    snprintf(out, PATH_MAX, "%s", path);
    char *slash = strrchr(out, '/');
    if (slash) {
        slash[slash == out] = 0;
    } else {
        memcpy(out, ".", 2);
    }
}

/* A file without a name where the system has such: a program that is killed leaves nothing behind.
 * Its name will come from /proc, so that must be there. Else a file under w->temp. */
static int open_temporary(struct file_writer *w) {
#ifdef O_TMPFILE
    char folder[PATH_MAX];
    folder_of(w->path, folder);
    if (access("/proc/self/fd", X_OK) == 0) {
        w->fd = open(folder, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    }
    if (w->fd >= 0) return 0;
#endif
    w->fd = mkstemp(w->temp);
    w->named = w->fd >= 0;
    return w->named ? 0 : -1;
}

/* Gives the file the name w->temp, if it has none yet. */
static int name_temporary(struct file_writer *w) {
    if (w->named) return 0;
    char from[32];
    snprintf(from, sizeof from, "/proc/self/fd/%d", w->fd);
    char *end = w->temp + strlen(w->temp) - 6;
    for (unsigned i = 0; i < 1000; i++) { /* names left by a program that was killed just here */
        snprintf(end, 7, "%06u", ((unsigned)getpid() + i) % 1000000);
        if (linkat(AT_FDCWD, from, AT_FDCWD, w->temp, AT_SYMLINK_FOLLOW) == 0) {
            w->named = true;
            return 0;
        }
        if (errno != EEXIST) break;
    }
    return -1;
}

int file_writer_open(const char *path, struct file_writer **out, lily_err *err) {
    int checked = check_target(path, err);
    if (checked != 0) return checked;
    struct file_writer *w = calloc(1, sizeof *w);
    if (!w) return ERR_NOMEM(err, path);
    w->fd = -1;
    size_t room = strlen(path) + sizeof ".part-XXXXXX";
    w->path = strdup(path);
    w->temp = malloc(room);
    if (!w->path || !w->temp) {
        writer_free(w);
        return ERR_NOMEM(err, path);
    }
    snprintf(w->temp, room, "%s.part-XXXXXX", path);
    if (open_temporary(w) != 0) {
        int rc = fail(err, path, "create");
        writer_free(w);
        return rc;
    }
    *out = w;
    return 0;
}

int file_writer_write_at(struct file_writer *w, uint64_t offset, const void *bytes, size_t n,
                         lily_err *err) {
    const char *p = bytes;
    while (n > 0) {
        ssize_t r = pwrite(w->fd, p, n, (off_t)offset);
        if (r < 0 && errno == EINTR) continue;
        if (r < 0) return fail(err, w->path, "write");
        p += r;
        offset += (uint64_t)r;
        n -= (size_t)r;
    }
    return 0;
}

int file_writer_write(struct file_writer *w, const void *bytes, size_t n, lily_err *err) {
    int rc = file_writer_write_at(w, w->offset, bytes, n, err);
    if (rc == 0) w->offset += n;
    return rc;
}

uint64_t file_writer_offset(const struct file_writer *w) {
    return w->offset;
}

/* Makes the rename itself durable; a folder that cannot be synced is not an error. */
static void sync_folder(const char *path) {
    char folder[PATH_MAX];
    folder_of(path, folder);
    int fd = open(folder, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);
    close(fd);
}

int file_writer_commit(struct file_writer *w, lily_err *err) {
    /* The file was made private; a committed file is as readable as umask says. */
    mode_t mask = umask(0);
    umask(mask);
    int rc = 0;
    if (fchmod(w->fd, 0666 & ~mask) != 0 || fsync(w->fd) != 0) {
        rc = fail(err, w->path, "finish");
    } else if (name_temporary(w) != 0 || rename(w->temp, w->path) != 0) {
        rc = fail(err, w->path, "rename into place");
    }
    if (rc != 0) {
        if (w->named) unlink(w->temp);
    } else {
        sync_folder(w->path);
    }
    writer_free(w);
    return rc;
}

void file_writer_abort(struct file_writer *w) {
    if (w->named) unlink(w->temp);
    writer_free(w);
}
