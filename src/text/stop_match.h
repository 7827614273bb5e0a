/* Stop strings looked for byte by byte, so that the result does not depend on how text arrives. */
#ifndef LILY_TEXT_STOP_MATCH_H
#define LILY_TEXT_STOP_MATCH_H

#include <stddef.h>

#include "base/err.h"

struct stop_string;
struct stop_match {
    struct stop_string *strings; /* [n] */
    size_t n;
};

/* Copies the strings; empty ones are ignored. LILY_EINVAL when one is not UTF-8. */
int stop_match_init(struct stop_match *m, const char *const *stops, size_t n, lily_err *err);
void stop_match_free(struct stop_match *m);

/* Takes one more byte; returns the length of the longest stop string that it completes, or 0. */
size_t stop_match_feed(struct stop_match *m, char c);
/* How many of the last bytes could still become a stop string. */
size_t stop_match_held(const struct stop_match *m);
void stop_match_reset(struct stop_match *m);

#endif
