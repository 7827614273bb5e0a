/* One line per request on standard error. */
#ifndef LILY_SERVE_ACCESS_LOG_H
#define LILY_SERVE_ACCESS_LOG_H

#include <stdint.h>

struct job;

#define ACCESS_GONE 499 /* shown when the client left before its reply ended */

/* A request that needed no model. path may hold anything: it is shown with '?' for what is not
 * printable. */
void access_log_line(const char *method, const char *path, int status, int64_t elapsed_ns);
/* A chat completion that has ended; the job is the caller's alone. */
void access_log_job(const struct job *job);

#endif
