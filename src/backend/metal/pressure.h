/* How much memory the machine has, and how short of it the system says it is. */
#ifndef LILY_METAL_PRESSURE_H
#define LILY_METAL_PRESSURE_H

#include <stdint.h>

#include "backend/backend.h"

struct metal_pressure; /* an observer of the system's memory-pressure source */

uint64_t metal_machine_memory(void); /* bytes installed */

/* Starts to observe; the level is the system's own from the beginning, that of Activity Monitor's
 * colours. The caller ends it with metal_pressure_end. */
int metal_pressure_begin(struct metal_pressure **out, lily_err *err);
void metal_pressure_end(struct metal_pressure *p); /* NULL is fine; no event is waited for */

enum backend_pressure metal_pressure_level(const struct metal_pressure *p);

#endif
