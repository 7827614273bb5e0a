/* The server's worker on an engine that is not there: what it does at the moment of the end. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "serve/server.h"
#include "serve/worker.h"

static struct server server;
static int rests, waits;

/* ---- an engine ------------------------------------------------------------------------------- */

bool lily_session_idle(lily_session *s) {
    (void)s;
    rests++;
    return true;
}
int32_t lily_session_held(const lily_session *s) {
    (void)s;
    return 0;
}
int lily_generate(lily_session *s, const lily_request *request, lily_result *result,
                  lily_err *err) {
    (void)s, (void)request, (void)result, (void)err;
    fail_msg("found a request, expected none");
    return 0;
}
void lily_tokens_free(lily_tokens *t) {
    (void)t;
}
/* For the rest of the server, which does not run. */
void lily_engine_get_info(const lily_engine *e, lily_engine_info *out) {
    (void)e, (void)out;
}
void lily_sampling_defaults(const lily_engine *e, bool thinking, lily_sampling *out) {
    (void)e, (void)thinking, (void)out;
}
int lily_sampling_check(const lily_engine *e, const lily_sampling *s, lily_err *err) {
    (void)e, (void)s, (void)err;
    return 0;
}
int lily_session_new(lily_engine *e, int32_t context, lily_session **out, lily_err *err) {
    (void)e, (void)context, (void)out, (void)err;
    return LILY_ENOMEM;
}
void lily_session_free(lily_session *s) {
    (void)s;
}
void lily_cancel(lily_session *s) {
    (void)s;
}
int lily_chat_prompt(const lily_engine *e, const char *messages, const char *tools,
                     const lily_chat_options *options, lily_tokens *out, lily_err *err) {
    (void)e, (void)messages, (void)tools, (void)options, (void)out, (void)err;
    return LILY_EINVAL;
}

/* ---- time ------------------------------------------------------------------------------------ */

/* It runs out, and the second time the server was told to end before the lock was there again. */
int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict lock,
                           const struct timespec *restrict until) {
    (void)c, (void)lock, (void)until;
    server.stopping = ++waits == 2;
    return ETIMEDOUT;
}

/* Nobody would cancel what it began then: the watch has looked for the last time. */
static void no_rest_begins_at_the_end(void **state) {
    (void)state;
    server = (struct server){.watches_memory = true};
    pthread_mutex_init(&server.lock, NULL);
    pthread_cond_init(&server.work, NULL);
    assert_null(worker_main(&server));
    assert_int_equal(waits, 2);
    assert_int_equal(rests, 1);
    assert_false(server.resting);
    pthread_cond_destroy(&server.work);
    pthread_mutex_destroy(&server.lock);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_rest_begins_at_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
