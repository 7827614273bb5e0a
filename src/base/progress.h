/* Progress of long work, shown on standard error only when a person watches (a terminal). */
#ifndef LILY_BASE_PROGRESS_H
#define LILY_BASE_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct progress {
    const char *label; /* must outlive the bar */
    const char *unit;  /* "B" is shown in binary multiples, anything else as a count */
    int64_t started_ns;
    int64_t drawn_ns;
    bool watched; /* standard error is a terminal */
    bool drawn;
};

void progress_start(struct progress *p, const char *label, const char *unit);
/* Redraws at most ten times a second; cheap enough to call per tensor or chunk. total 0: unknown.
 */
void progress_update(struct progress *p, uint64_t done, uint64_t total);
void progress_end(struct progress *p); /* clears the line */

#endif
