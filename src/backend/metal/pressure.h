/* How much memory the machine has, and how short of it the system says it is. */
#ifndef LILY_METAL_PRESSURE_H
#define LILY_METAL_PRESSURE_H

#include <stdint.h>

#include "backend/backend.h"

uint64_t metal_machine_memory(void); /* bytes installed */

/* The kernel's own level, that of Activity Monitor's colours: a call of well under a microsecond,
 * so it is asked where something can be given back and no source is kept open. */
enum backend_pressure metal_pressure(const struct backend_model *m);

#endif
