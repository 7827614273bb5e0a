#include "cli/keyboard.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/select.h>
#include <unistd.h>

#include "cli/interrupt.h"
#include "cli/model_options.h"

/* ---- while nobody types ---------------------------------------------------------------------- */

struct watch {
    lily_session *session;
    atomic_bool over;
};

/* A key ends what is written: its user does not wait for gigabytes to reach a disk. */
static void *watch_keys(void *arg) {
    enum { LOOK_MS = 20 };
    struct watch *w = arg;
    struct pollfd keys = {.fd = STDIN_FILENO, .events = POLLIN};
    int ready = 0;
    while (!atomic_load(&w->over) && ready == 0) ready = poll(&keys, 1, LOOK_MS);
    if (ready > 0) lily_cancel(w->session);
    return NULL;
}

/* Signals are let in meanwhile, but not in the thread beside, where the line editor's handlers have
 * no place. */
static void give_back_memory(struct keyboard *k, const sigset_t *open_mask) {
    struct watch watch = {.session = k->session};
    sigset_t ours, none;
    pthread_t thread;
    sigfillset(&none);
    pthread_sigmask(SIG_SETMASK, &none, &ours);
    if (pthread_create(&thread, NULL, watch_keys, &watch) == 0) {
        model_log_at_prompt(true);
        interrupt_session(k->session);
        pthread_sigmask(SIG_SETMASK, open_mask, NULL);
        k->asked_enough = !interrupted() && !lily_session_idle(k->session);
        atomic_store(&watch.over, true);
        pthread_join(thread, NULL);
        interrupt_session(NULL);
        if (model_log_at_prompt(false)) k->redraw(k->arg);
    }
    pthread_sigmask(SIG_SETMASK, &ours, NULL);
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* Ctrl-C empties the terminal's queue, also of a key that was just reported: a read that waited for
 * another then, with the signals held, would not end. Reads that never wait need an open file of
 * their own, since standard input's is mostly that of the output as well. Where there is none (a
 * terminal that is not the controlling one and has no name here), reads may wait. */
void keyboard_open(struct keyboard *k) {
    const int how = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    const char *name = ttyname(STDIN_FILENO);
    k->fd = tcgetpgrp(STDIN_FILENO) >= 0 ? open("/dev/tty", how) : -1;
    if (k->fd < 0 && name) k->fd = open(name, how);
    if (k->fd < 0) k->fd = STDIN_FILENO;
}

void keyboard_close(struct keyboard *k) {
    if (k->fd > STDIN_FILENO) close(k->fd);
    k->fd = STDIN_FILENO;
}

/* Waits for a byte with the signals let in only here, so that none is missed between a look at the
 * flag and the wait. false: a signal to act on, or the end. */
static bool wait_for_key(struct keyboard *k, const sigset_t *open_mask) {
    fd_set keys;
    while (!interrupted()) {
        const struct timespec pause = {.tv_sec = 2};
        FD_ZERO(&keys);
        FD_SET(STDIN_FILENO, &keys);
        int n = pselect(STDIN_FILENO + 1, &keys, NULL, NULL, k->asked_enough ? NULL : &pause,
                        open_mask);
        if (n > 0) return true;
        if (n == 0) give_back_memory(k, open_mask);
        if (n < 0 && errno != EINTR) return false;
    }
    return false;
}

int keyboard_read(struct keyboard *k, wchar_t *out) {
    sigset_t ours, before, open_mask;
    mbstate_t state = {0};
    int got = -1;
    sigemptyset(&ours);
    sigaddset(&ours, SIGINT);
    sigaddset(&ours, SIGTERM);
    sigaddset(&ours, SIGHUP);
    sigprocmask(SIG_BLOCK, &ours, &before);
    open_mask = before;
    sigdelset(&open_mask, SIGINT);
    while (wait_for_key(k, &open_mask)) {
        char byte;
        got = (int)read(k->fd, &byte, 1);
        if (got < 0 && errno == EAGAIN) continue; /* the key is gone again */
        if (got != 1) break;
        /* A Ctrl-D typed before the editor took the terminal over (during an answer, say) is kept
         * by the terminal as a zero byte. */
        if (byte == 0) byte = 'D' & 0x1f;
        size_t n = mbrtowc(out, &byte, 1, &state);
        if (n == (size_t)-1)
            memset(&state, 0, sizeof state); /* not text: drop it */
        else if (n != (size_t)-2)
            break;
        got = -1;
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return got;
}
