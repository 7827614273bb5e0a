/* The keyboard under the line editor: one character at a time, signals in between. While nobody
 * types the session is asked every two seconds to give its memory back where the system is short of
 * it (lily_session_idle). */
#ifndef LILY_CLI_KEYBOARD_H
#define LILY_CLI_KEYBOARD_H

#include <stdbool.h>
#include <wchar.h>

#include "lily.h"

struct keyboard {
    lily_session *session;     /* the caller's, at no call while a key is awaited */
    bool asked_enough;         /* it is of no use to ask it again */
    void (*redraw)(void *arg); /* the line as typed so far: one of the engine's log replaced it */
    void *arg;
    int fd; /* keyboard_open's */
};

/* Opens standard input's terminal once more for k, which keyboard_close ends. */
void keyboard_open(struct keyboard *k);
void keyboard_close(struct keyboard *k);

/* The next character: 1, 0 at the end, -1 after a signal. SIGINT is let in while it waits, also
 * where the caller holds it. */
int keyboard_read(struct keyboard *k, wchar_t *out);

#endif
