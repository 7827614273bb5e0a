#include "serve/access_log.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "serve/job.h"

/* "2026-11-29T15:48:26Z " */
static void timestamp(char *out, size_t size) {
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(out, size, "%Y-%m-%dT%H:%M:%SZ ", &utc);
}

static double seconds(int64_t from_ns, int64_t to_ns) {
    return from_ns && to_ns > from_ns ? (double)(to_ns - from_ns) * 1e-9 : 0;
}

/* Writes a line, or drops it when that would have to wait: a program that starts the server with a
 * pipe for its errors and never reads it would otherwise stop the server after 64 KiB. A pipe that
 * polls writable takes at least PIPE_BUF bytes, more than any line here has. */
static void put_line(const char *line) {
    static atomic_ulong dropped;
    struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&p, 1, 0) != 1 || !(p.revents & POLLOUT)) {
        atomic_fetch_add(&dropped, 1);
        return;
    }
    unsigned long lost = atomic_exchange(&dropped, 0);
    if (lost) fprintf(stderr, "lily: %lu lines of the log were lost, nobody read them\n", lost);
    fputs(line, stderr);
}

void access_log_line(const char *method, const char *path, int status, int64_t elapsed_ns) {
    char when[40], shown[128], line[256];
    size_t n = 0;
    for (; path[n] && n + 1 < sizeof shown; n++)
        shown[n] = path[n] > ' ' && path[n] < 0x7f ? path[n] : '?';
    shown[n] = 0;
    timestamp(when, sizeof when);
    snprintf(line, sizeof line, "%s%s %s %d %.3fs\n", when, method, shown, status,
             seconds(1, elapsed_ns + 1));
    put_line(line);
}

void access_log_job(const struct job *job) {
    const lily_result *r = &job->result;
    char when[40];
    int status = job->gone ? ACCESS_GONE : job->error.status ? job->error.status : 200;
    struct buf line = {0};
    timestamp(when, sizeof when);
    bool ok = buf_printf(&line, "%sPOST /v1/chat/completions %d %.3fs %s%s id=%s", when, status,
                         seconds(job->accepted_ns, job->done_ns),
                         job->answer.stream ? "stream " : "", job->outcome, job->id);
    if (ok && job->prompt.n) ok = buf_printf(&line, " prompt=%zu", job->prompt.n);
    if (ok && job->started_ns) {
        /* The first token falls out of the prompt: a decode step stands behind each other. */
        bool measured = r->decode_seconds > 0 && r->output_tokens > 1;
        double rate = measured ? (r->output_tokens - 1) / r->decode_seconds : 0;
        ok = buf_printf(&line,
                        " cached=%d output=%d reasoning=%d queued=%.3fs prefill=%.3fs "
                        "decode=%.3fs (%.1f tok/s)",
                        (int)r->cached_tokens, (int)r->output_tokens, (int)r->reasoning_tokens,
                        seconds(job->accepted_ns, job->started_ns), r->prefill_seconds,
                        r->decode_seconds, rate);
    }
    if (ok && buf_puts(&line, "\n")) put_line(line.data);
    buf_free(&line);
}
