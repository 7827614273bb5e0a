/* What a step costs, counted from its recording without a device (`lily plan`). */
#ifndef LILY_METAL_PLAN_H
#define LILY_METAL_PLAN_H

#include "backend/backend.h"

int metal_plan(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
               lily_err *err);

#endif
