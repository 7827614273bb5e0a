#include "cli/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

static volatile sig_atomic_t noted;
static _Atomic(lily_session *) running;
static pthread_t main_thread;

/* lily_cancel only stores to an atomic, so a handler may call it. */
static void note(int signal_number) {
    /* The system may pick any thread; only in the main one does a signal end a blocked read. */
    if (!pthread_equal(pthread_self(), main_thread)) {
        pthread_kill(main_thread, signal_number);
        return;
    }
    /* A request to end the program outweighs a Ctrl-C that came before it. */
    if (!noted || signal_number != SIGINT) noted = signal_number;
    lily_session *s = atomic_load(&running);
    if (s) lily_cancel(s);
}

/* SIGHUP as well: a closed terminal should leave no half-written file. But nohup, which has it
 * ignored, is to outlive its terminal. SIGINT is caught even so: a script's background job has it
 * ignored, and whoever sends it there means the job. */
void interrupt_catch(void) {
    main_thread = pthread_self();
    struct sigaction action = {.sa_handler = note};
    sigemptyset(&action.sa_mask);
    /* No SA_RESTART: a blocked read of the keyboard or of standard input must return. */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    struct sigaction before;
    if (sigaction(SIGHUP, NULL, &before) || before.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
}

int interrupted(void) {
    return noted;
}

void interrupt_clear(void) {
    noted = 0;
}

/* SIGINT alone: what ends the program need not wait for a terminal stopped with Ctrl-S. */
static void mask_sigint(int how) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    pthread_sigmask(how, &set, NULL);
}

void interrupt_hold(void) {
    mask_sigint(SIG_BLOCK);
}

void interrupt_release(void) {
    mask_sigint(SIG_UNBLOCK);
}

void interrupt_session(lily_session *s) {
    atomic_store(&running, s);
}
