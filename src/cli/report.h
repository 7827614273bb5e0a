/* lily bench --report: one file with everything that a comparison needs. Each row is measured by a
 * fresh process of this program (`bench --json` with that row alone); the file is written anew
 * after each, so that an interrupted run leaves what it has. */
#ifndef LILY_CLI_REPORT_H
#define LILY_CLI_REPORT_H

#include <stdbool.h>

#include "cli/model_options.h"
#include "cli/options.h"

struct report_options {
    const struct model_options *model;
    const char *path;      /* of the file: JSON; ends in .md: a table, then the same JSON */
    struct int_list sizes; /* prompt lengths and depths, ascending */
    int32_t tokens;        /* decoded at each depth */
    int32_t repeats;       /* after one warm-up */
    int32_t minutes;       /* rows that would take longer are left out, and said to be */
    float bandwidth;       /* GB/s as stated by the user, 0: none */
    const char *note;      /* the user's, NULL: none */
};

/* What both kinds of bench end with, and exit status 1, when a row is marked so. */
#define DIGESTS_DIFFER                                                                             \
    "bench: found runs that did not repeat the digest of their row, expected the same results "    \
    "from "                                                                                        \
    "the same input; see the rows marked \"differs\""

/* Prints rows as they come; returns the exit status. Rows left out are counted in the last line. */
int bench_report(const struct report_options *o);

#endif
