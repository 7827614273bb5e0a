/* lily chat on a terminal and an engine that is short of memory: what happens while nobody types,
 * and when a signal comes with a key. */
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>
#ifdef __APPLE__
#include <util.h>
#else
#include <pty.h>
#endif

#include <cmocka.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/err.h"
#include "cli/command.h"
#include "lily.h"

/* ---- an engine ------------------------------------------------------------------------------- */

struct lily_engine {
    lily_log_fn log;
    void *arg;
};
struct lily_session {
    lily_engine *engine;
    int idle; /* calls of lily_session_idle */
    atomic_bool cancel;
};

int lily_engine_open(const lily_engine_options *options, lily_engine **out, lily_err *err) {
    static lily_engine engine;
    (void)err;
    engine = (lily_engine){.log = options->log, .arg = options->arg};
    *out = &engine;
    return 0;
}
void lily_engine_close(lily_engine *e) {
    (void)e;
}
void lily_engine_get_info(const lily_engine *e, lily_engine_info *out) {
    (void)e;
    *out = (lily_engine_info){.model_name = "none", .backend = "none", .device = "none"};
}
void lily_sampling_defaults(const lily_engine *e, bool thinking, lily_sampling *out) {
    (void)e, (void)thinking;
    *out = (lily_sampling){.top_p = 1};
}
int lily_sampling_check(const lily_engine *e, const lily_sampling *s, lily_err *err) {
    (void)e, (void)s, (void)err;
    return 0;
}
int lily_session_new(lily_engine *e, int32_t context, lily_session **out, lily_err *err) {
    static lily_session session;
    (void)context, (void)err;
    session.engine = e;
    *out = &session;
    return 0;
}
void lily_session_free(lily_session *s) {
    (void)s;
}
void lily_session_reset(lily_session *s) {
    (void)s;
}
void lily_cancel(lily_session *s) {
    atomic_store(&s->cancel, true);
}
int lily_chat_prompt(const lily_engine *e, const char *messages, const char *tools,
                     const lily_chat_options *options, lily_tokens *out, lily_err *err) {
    (void)e, (void)messages, (void)tools, (void)options, (void)out;
    return ERR(err, LILY_EINVAL, "prompt: found one, expected none");
}
void lily_tokens_free(lily_tokens *t) {
    (void)t;
}
int lily_generate(lily_session *s, const lily_request *request, lily_result *result,
                  lily_err *err) {
    (void)s, (void)request, (void)result;
    return ERR(err, LILY_EINVAL, "request: found one, expected none");
}

/* The first time it is done at once, then it takes long, and the fourth time nothing more is
 * wanted. */
bool lily_session_idle(lily_session *s) {
    char line[64];
    int64_t end = clock_ns() + (int64_t)90 * 1000000000;
    snprintf(line, sizeof line, "idle %d", ++s->idle);
    s->engine->log(s->engine->arg, line);
    if (s->idle == 1 || s->idle == 4) return s->idle != 4;
    while (!atomic_load(&s->cancel) && clock_ns() < end) usleep(1000);
    s->engine->log(s->engine->arg, atomic_exchange(&s->cancel, false) ? "ended" : "lasted");
    return true;
}

/* ---- a Ctrl-C at the worst moment ------------------------------------------------------------ */

static int fatal_key; /* counted from 1; 0: none */

/* What a terminal does at Ctrl-C, here between the look at the queue and the read. */
int pselect(int n, fd_set *restrict in, fd_set *restrict out, fd_set *restrict odd,
            const struct timespec *restrict pause, const sigset_t *restrict mask) {
    int (*system_pselect)(int, fd_set *, fd_set *, fd_set *, const struct timespec *,
                          const sigset_t *);
    *(void **)&system_pselect = dlsym(RTLD_NEXT, "pselect");
    int ready = system_pselect(n, in, out, odd, pause, mask);
    if (ready > 0 && fatal_key > 0 && --fatal_key == 0) {
        tcflush(STDIN_FILENO, TCIFLUSH);
        raise(SIGINT);
    }
    return ready;
}

/* ---- a terminal ------------------------------------------------------------------------------ */

struct terminal {
    int fd;
    pid_t child;
    struct buf seen;
};

static void open_terminal(struct terminal *t) {
    *t = (struct terminal){0};
    t->child = forkpty(&t->fd, NULL, NULL, NULL);
    assert_true(t->child >= 0);
    if (t->child) return;
    char *words[] = {(char *)"chat", (char *)"--no-history", NULL};
    setenv("TERM", "xterm", 1);
    _exit(cmd_chat(2, words));
}

static void type(const struct terminal *t, const char *text) {
    assert_int_equal(write(t->fd, text, strlen(text)), strlen(text));
}

/* Until text is seen behind all that was expected before; fails after some seconds. */
static void expect(struct terminal *t, const char *text, int seconds) {
    int64_t end = clock_ns() + (int64_t)seconds * 1000000000;
    for (;;) {
        const char *at = t->seen.data ? strstr(t->seen.data, text) : NULL;
        if (at) {
            size_t gone = (size_t)(at - t->seen.data) + strlen(text);
            memmove(t->seen.data, t->seen.data + gone, t->seen.len - gone + 1);
            t->seen.len -= gone;
            return;
        }
        char bytes[1024];
        struct timeval pause = {.tv_usec = 100000};
        fd_set set;
        FD_ZERO(&set);
        FD_SET(t->fd, &set);
        if (select(t->fd + 1, &set, NULL, NULL, &pause) > 0) {
            ssize_t n = read(t->fd, bytes, sizeof bytes);
            if (n > 0) assert_true(buf_append(&t->seen, bytes, (size_t)n));
        }
        if (clock_ns() > end) fail_msg("no \"%s\" in \"%s\"", text, t->seen.data);
    }
}

static void leave(struct terminal *t) {
    int status;
    type(t, "/quit\r");
    assert_int_equal(waitpid(t->child, &status, 0), t->child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(t->fd);
    buf_free(&t->seen);
}

static void waiting_for_the_user(void **state) {
    (void)state;
    struct terminal t;
    open_terminal(&t);
    expect(&t, "> ", 60);
    type(&t, "//x");
    expect(&t, "x", 60);
    expect(&t, "\033[Klily: idle 1\r\n", 60);
    expect(&t, "> //x", 60); /* the line stands there again */
    expect(&t, "lily: idle 2\r\n", 60);
    type(&t, "y"); /* a key ends what takes long */
    expect(&t, "lily: ended\r\n", 60);
    expect(&t, "> //x", 60);
    expect(&t, "y", 60);
    expect(&t, "lily: idle 3\r\n", 60);
    type(&t, "\003"); /* and so does Ctrl-C */
    expect(&t, "lily: ended\r\n", 60);
    expect(&t, "(Ctrl-D leaves)", 60);
    expect(&t, "lily: idle 4\r\n", 60);
    leave(&t);
}

/* No key follows: a read that waits for one would not end. */
static void interrupted_between_look_and_read(void **state) {
    (void)state;
    struct terminal t;
    fatal_key = 3;
    open_terminal(&t);
    fatal_key = 0;
    expect(&t, "> ", 60);
    type(&t, "ab");
    expect(&t, "ab", 60);
    type(&t, "c");
    expect(&t, "(Ctrl-D leaves)", 60);
    expect(&t, "> ", 60);
    leave(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waiting_for_the_user),
        cmocka_unit_test(interrupted_between_look_and_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
