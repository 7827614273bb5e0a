/* How long a prompt chunk may be, so that its command buffer takes about as long as wished: the
 * display's watchdog ends long ones, and a cancelled request waits for the chunk in flight.
 *
 * A chunk's time is foretold from counted work: operations of the products and bytes of weights,
 * which follow from its rows alone, and operations of attention, which grow with depth. Two numbers
 * are measured, as chunks end: seconds of a unit of work, and how much more an operation of
 * attention costs than one of a product. So the first chunk at a depth where none was timed yet is
 * already about right. Pure C without a device. */
#ifndef LILY_METAL_PACE_H
#define LILY_METAL_PACE_H

#include <stdint.h>

#include "backend/metal/layout.h"

struct metal_pace {
    double row_work;     /* operations of the products of one row */
    double dense_work;   /* reading the weights that every row needs, in operations */
    double expert_work;  /* reading all experts, in operations */
    double expert_share; /* of them that one row needs, in [0, 1] */
    double pair_work;    /* operations of one row's attention to one position, all layers */
    double unit;         /* seconds of an operation */
    double attention;    /* cost of an operation of attention, in those of a product */
    double target;       /* seconds a chunk aims at */
    int32_t limit, most; /* rows at most: by experience, by the scratch memory */
};

/* Before anything is measured: assumptions about a slow machine (pace.c). */
void metal_pace_new(struct metal_pace *p, const struct metal_layout *l, double target);

/* Seconds that n rows from position on will take. */
double metal_pace_foretell(const struct metal_pace *p, int32_t n, int32_t position);

/* Rows of the next chunk at most: a multiple of BACKEND_GRID, or 8, 16 or 32 where that many would
 * take too long. */
int32_t metal_pace_rows(const struct metal_pace *p, int32_t position);

/* n rows from position on took so long, or ended with an error of the GPU (it may have been the
 * watchdog's: half as many are tried next, and at most twice as many after each that succeeds). */
void metal_pace_took(struct metal_pace *p, int32_t n, int32_t position, double seconds);
void metal_pace_failed(struct metal_pace *p, int32_t n);

#endif
