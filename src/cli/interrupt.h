/* Ctrl-C and its like: the handler takes a note, the work ends at its next callback. */
#ifndef LILY_CLI_INTERRUPT_H
#define LILY_CLI_INTERRUPT_H

#include "lily.h"

/* From now on SIGINT, SIGTERM and SIGHUP are noted instead of ending the process. Called by the
 * main thread, before others are started. */
void interrupt_catch(void);

/* The signal noted since the last clear, or 0. */
int interrupted(void);
void interrupt_clear(void);

/* Between the two SIGINT waits. A write to a terminal that a signal ends loses what stdio held, and
 * Ctrl-C at a terminal comes in the middle of its writes. */
void interrupt_hold(void);
void interrupt_release(void);

/* The session whose lily_generate a signal cancels; NULL: none. */
void interrupt_session(lily_session *s);

#endif
