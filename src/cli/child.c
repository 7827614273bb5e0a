#include "cli/child.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__APPLE__)
#include <mach-o/dyld.h>
#endif

#include "cli/interrupt.h"

extern char **environ;

enum { WORDS = 64, CHUNK = 65536, ENDS = 2, WAKE_MS = 200 };

/* Where this program lies, whatever it was called as. */
static int own_path(char *out, size_t room, lily_err *err) {
#if defined(__APPLE__)
    uint32_t n = (uint32_t)room;
    if (_NSGetExecutablePath(out, &n) == 0) return LILY_OK;
#else
    ssize_t n = readlink("/proc/self/exe", out, room - 1);
    if (n > 0) {
        out[n] = 0;
        return LILY_OK;
    }
#endif
    return ERR(err, LILY_EIO, "this program: found no path of its own, expected one");
}

/* A child whose output and errors come through pipes. */
struct child {
    pid_t pid;
    struct pollfd end[ENDS]; /* to read: standard output, standard error */
};

static int start(struct child *c, char *path, char *const *argv, lily_err *err) {
    int out[2], errors[2];
    posix_spawn_file_actions_t actions;
    if (pipe(out)) return err_system(err, errno, "pipe", "make");
    if (pipe(errors)) {
        close(out[0]), close(out[1]);
        return err_system(err, errno, "pipe", "make");
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, errors[1], STDERR_FILENO);
    for (int i = 0; i < 2; i++) {
        posix_spawn_file_actions_addclose(&actions, out[i]);
        posix_spawn_file_actions_addclose(&actions, errors[i]);
    }
    int failed = posix_spawn(&c->pid, path, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]), close(errors[1]);
    c->end[0] = (struct pollfd){.fd = out[0], .events = POLLIN};
    c->end[1] = (struct pollfd){.fd = errors[0], .events = POLLIN};
    if (!failed) return LILY_OK;
    close(out[0]), close(errors[0]);
    return err_system(err, failed, path, "start");
}

/* Both pipes to their ends; a descriptor of -1 is one that has ended. */
static bool collect(const struct child *c, struct buf *texts[ENDS]) {
    char chunk[CHUNK];
    struct pollfd end[ENDS];
    memcpy(end, c->end, sizeof end);
    bool whole = true, told = false;
    while (end[0].fd >= 0 || end[1].fd >= 0) {
        if (interrupted() && !told) told = kill(c->pid, SIGTERM) == 0;
        /* Wakes by itself, since a signal may come just before it sleeps. */
        int ready = poll(end, ENDS, WAKE_MS);
        if (ready < 0 && errno != EINTR) return false;
        if (ready <= 0) continue;
        for (int i = 0; i < ENDS; i++) {
            if (end[i].fd < 0 || !end[i].revents) continue;
            ssize_t n = read(end[i].fd, chunk, sizeof chunk);
            if (n > 0) whole = buf_append(texts[i], chunk, (size_t)n) && whole;
            if (n > 0 || (n < 0 && errno == EINTR)) continue;
            close(end[i].fd);
            end[i].fd = -1;
        }
    }
    return whole;
}

/* "lily: why", of several lines the last. */
static const char *last_line(struct buf *text) {
    static const char name[] = "lily: ";
    while (text->len > 0 && text->data[text->len - 1] == '\n') text->data[--text->len] = 0;
    if (!text->len) return "it said nothing";
    const char *newline = strrchr(text->data, '\n');
    const char *line = newline ? newline + 1 : text->data;
    return strncmp(line, name, sizeof name - 1) == 0 ? line + sizeof name - 1 : line;
}

static int judge(int status, struct buf *errors, lily_err *err) {
    if (interrupted()) return ERR(err, LILY_ECANCELED, "interrupted");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return LILY_OK;
    if (WIFSIGNALED(status))
        return ERR(err, LILY_EBUSY, "ended by signal %d: %s", WTERMSIG(status), last_line(errors));
    return ERR(err, LILY_EBUSY, "%s", last_line(errors));
}

int child_run(const char *const *words, struct buf *out, lily_err *err) {
    char path[4096], *argv[WORDS + 2] = {path};
    struct buf errors = {0};
    struct child c;
    int status = 0;
    for (int i = 0; i < WORDS && words[i]; i++) argv[i + 1] = (char *)(uintptr_t)words[i];
    int rc = own_path(path, sizeof path, err);
    if (rc == LILY_OK) rc = start(&c, path, argv, err);
    if (rc != LILY_OK) return rc;
    bool whole = collect(&c, (struct buf *[]){out, &errors});
    while (waitpid(c.pid, &status, 0) < 0 && errno == EINTR) continue;
    rc = whole ? judge(status, &errors, err) : ERR_NOMEM(err, "a child's output");
    buf_free(&errors);
    return rc;
}
