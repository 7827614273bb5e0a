/* The seam through which tests put in their own backends; otherwise lily_plan. */
#ifndef LILY_ENGINE_PLAN_H
#define LILY_ENGINE_PLAN_H

#include "backend/backend.h"
#include "lily.h"

/* all is ended by NULL, plans by a NULL name. */
int engine_plan(const struct backend *const *all, const struct backend_planner *plans,
                const lily_plan_options *options, char **json, lily_err *err);

#endif
