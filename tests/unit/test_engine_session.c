/* Sessions on the fake backend: what is read again, what is resumed, and that it is never wrong. */
#include "base/clock.h"
#include "engine/rest.h"
#include "engine/session.h"
#include "engine_fake.h"

enum { V = 4096 };

/* n tokens of a text that depends on seed, without control tokens. */
static void fill(int32_t *ids, int32_t n, uint64_t seed) {
    for (int32_t i = 0; i < n; i++) {
        ids[i] = (int32_t)(fake_mix(seed * 1000003 + (uint64_t)i) % 256);
    }
}

static int32_t read_all(lily_session *s, const int32_t *ids, int32_t n) {
    int32_t cached = -1;
    lily_err err = {0};
    int rc = s->backend ? 0 : rest_end(s, &err); /* as session_enter, which callbacks may not */
    if (!rc) rc = session_sync(s, ids, (size_t)n, NULL, NULL, &cached, &err);
    if (rc) fail_msg("%s", err.msg);
    return cached;
}

/* An engine whose sessions keep six checkpoints; the last line of its log is in line[500]. */
static lily_engine *six_checkpoints(char *line) {
    return fake_engine((lily_engine_options){
        .log = fake_keep_line, .arg = line, .state_bytes = 6 * fake_state_bytes(NULL)});
}

/* Cancels at the event after so many. */
static int stop_soon(void *arg, int32_t done, int32_t total) {
    (void)done;
    (void)total;
    return --*(int32_t *)arg < 0;
}

/* The logits must be those of a session that never held anything else. */
static void expect_as_cold(lily_engine *e, lily_session *s, const int32_t *ids, int32_t n) {
    struct fake before = fake;
    lily_session *cold = fake_session(e);
    read_all(cold, ids, n);
    assert_non_null(lily_session_logits(s));
    assert_memory_equal(lily_session_logits(s), lily_session_logits(cold), V * sizeof(float));
    lily_session_free(cold);
    fake = before;
}

static void test_extension_reads_the_suffix(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    int32_t ids[400];
    fill(ids, 400, 1);
    assert_int_equal(read_all(s, ids, 250), 0);
    assert_int_equal(fake.prefilled, 250);
    assert_int_equal(read_all(s, ids, 251), 250);
    assert_int_equal(read_all(s, ids, 400), 251);
    assert_int_equal(fake.prefilled, 400);
    assert_int_equal(fake.restored, 0);
    expect_as_cold(e, s, ids, 400);
    fake_close_all(e, s);
}

static void test_repetition_reads_nothing(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[301];
    fill(ids, 301, 2);
    read_all(s, ids, 300);
    assert_int_equal(read_all(s, ids, 300), 300); /* the logits are still there */
    expect_as_cold(e, s, ids, 300);
    assert_int_equal(lily_session_step(s, ids[300], &err), 0);
    assert_int_equal(read_all(s, ids, 300), 256); /* gone: from the last grid point */
    assert_int_equal(fake.prefilled, 344);
    expect_as_cold(e, s, ids, 300);
    int32_t grid[128]; /* the checkpoint must leave a token to read */
    fill(grid, 128, 3);
    read_all(s, grid, 128);
    lily_session_step(s, 5, &err);
    assert_int_equal(read_all(s, grid, 128), 64);
    expect_as_cold(e, s, grid, 128);
    fake_close_all(e, s);
}

static void test_nothing_is_shared(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    int32_t a[200], b[200];
    fill(a, 200, 4);
    fill(b, 200, 5);
    b[0] = a[0] ^ 1;
    read_all(s, a, 200);
    assert_int_equal(read_all(s, b, 200), 0);
    expect_as_cold(e, s, b, 200);
    fake_close_all(e, s);
}

/* Interrupted just after going back, the session holds tokens and checkpoints ahead of its
 * position: of use when the same tokens come again, not to be believed after others. */
static void test_ahead_of_the_position(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    for (int step = 0; step < 3; step++) { /* none, of the same token, of another */
        lily_session *s = fake_session(e);
        lily_err err;
        int32_t ids[200], cached, events = 0;
        fill(ids, 200, 6);
        read_all(s, ids, 128); /* checkpoints at 64 and, as a step passes it, at 128 */
        read_all(s, ids, 127);
        assert_int_equal(lily_session_step(s, ids[127], &err), 0);
        assert_int_equal(lily_session_step(s, ids[128], &err), 0);
        assert_int_equal(session_sync(s, ids, 128, stop_soon, &events, &cached, &err),
                         LILY_ECANCELED);
        assert_int_equal(session_position(s), 64);
        if (step == 2) ids[64] ^= 1;
        if (step) assert_int_equal(lily_session_step(s, ids[64], &err), 0);
        assert_int_equal(read_all(s, ids, 200), step ? 65 : 128);
        expect_as_cold(e, s, ids, 200);
        lily_session_free(s);
    }
    fake_close_all(e, NULL);
}

/* System, question, generation prompt: as the chat template lays them out. */
struct prompt {
    int32_t ids[8192];
    int32_t n;
};

static void turn(struct prompt *p, int32_t length, uint64_t seed) {
    p->ids[p->n++] = FAKE_IM_START;
    fill(p->ids + p->n, length, seed);
    p->n += length;
}

static void test_edits_resume_at_turns(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    struct prompt first = {.n = 0};
    turn(&first, 1999, 10); /* system: [0, 2000) */
    turn(&first, 999, 11);  /* question: [2000, 3000) */
    struct prompt base = first;
    turn(&first, 9, 12); /* generation prompt */
    read_all(s, first.ids, first.n);
    for (int32_t i = 0; i < 200; i++) assert_int_equal(lily_session_step(s, i, &err), 0);

    struct prompt again = first; /* the same: from the last grid point */
    assert_int_equal(read_all(s, again.ids, again.n), 3008);
    for (int32_t i = 0; i < 200; i++) assert_int_equal(lily_session_step(s, i, &err), 0);

    struct prompt next = base; /* next turn with the reasoning stripped: parts at the answer */
    turn(&next, 300, 13);
    turn(&next, 80, 14);
    turn(&next, 9, 12);
    assert_int_equal(read_all(s, next.ids, next.n), 2944);
    expect_as_cold(e, s, next.ids, next.n);

    struct prompt edit = {.n = 0}; /* another question after the same system message */
    turn(&edit, 1999, 10);
    turn(&edit, 500, 15);
    turn(&edit, 9, 12);
    assert_int_equal(read_all(s, edit.ids, edit.n), 1984);
    expect_as_cold(e, s, edit.ids, edit.n);
    fake_close_all(e, s);
}

static void test_long_prompts_are_checkpointed(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    int32_t *ids = malloc(20000 * sizeof *ids);
    fill(ids, 20000, 20);
    read_all(s, ids, 20000);
    ids[9000] ^= 1;
    assert_int_equal(read_all(s, ids, 20000), 8192);
    expect_as_cold(e, s, ids, 20000);
    free(ids);
    fake_close_all(e, s);
}

static void test_answers_resume_within(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[1000];
    fill(ids, 1000, 30);
    read_all(s, ids, 100);
    for (int32_t i = 100; i < 900; i++) assert_int_equal(lily_session_step(s, ids[i], &err), 0);
    ids[890] ^= 1; /* the client's text is tokenised differently near the end */
    assert_int_equal(read_all(s, ids, 1000), 832);
    expect_as_cold(e, s, ids, 1000);
    fake_close_all(e, s);
}

/* Random prompts that share prefixes with earlier ones, in any order, with steps and interrupted
 * reads in between, chunks of any size, budgets of any size: never another answer than cold. */
static void test_never_wrong(void **state) {
    (void)state;
    for (uint64_t round = 0; round < 40; round++) {
        const lily_engine_options options = {.state_bytes = (round % 8) * fake_state_bytes(NULL) +
                                                            (round % 8 == 0),
                                             .context = 1000};
        lily_engine *e = fake_engine(options);
        lily_session *s = fake_session(e);
        int32_t known[4][800];
        for (uint64_t i = 0; i < 4; i++) fill(known[i], 800, round * 4 + i);
        fake.chunk = round % 3 == 0 ? 0 : round % 3 == 1 ? 7 : 100;
        for (uint64_t turn_no = 0; turn_no < 40; turn_no++) {
            uint64_t dice = fake_mix(round * 1000 + turn_no);
            int32_t *ids = known[dice % 4], *other = known[dice / 4 % 4];
            int32_t from = (int32_t)(dice / 16 % 800);
            if (dice / 3 % 3 == 0) memcpy(ids, other, (size_t)from * sizeof *ids);
            if (dice / 5 % 7 == 0) ids[from] = FAKE_IM_START;
            int32_t n = 1 + (int32_t)(dice / 128 % 800), cached;
            lily_err err;
            if (dice / 11 % 4 == 0) {
                int32_t events = (int32_t)(dice / 13 % 5);
                session_sync(s, ids, (size_t)n, stop_soon, &events, &cached, &err);
                int32_t at = session_position(s); /* go on from there with another token */
                if (at > 0 && at < 800 && dice / 17 % 2) {
                    ids[at] = (int32_t)(dice % 256);
                    assert_int_equal(lily_session_step(s, ids[at], &err), 0);
                    expect_as_cold(e, s, ids, at + 1);
                }
                continue;
            }
            assert_in_range(read_all(s, ids, n), 0, n);
            expect_as_cold(e, s, ids, n);
            int32_t steps = (int32_t)(dice / 7 % 150);
            for (int32_t i = n; i < n + steps && i < 800; i++) {
                assert_int_equal(lily_session_step(s, ids[i], &err), 0);
                if (i % 50 == 0) expect_as_cold(e, s, ids, i + 1);
            }
        }
        fake_close_all(e, s);
    }
}

static void test_cancelled_reading_goes_on(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[1000], cached, events = 3;
    fill(ids, 1000, 40);
    fake.chunk = 100;
    assert_int_equal(session_sync(s, ids, 1000, stop_soon, &events, &cached, &err), LILY_ECANCELED);
    assert_null(lily_session_logits(s));
    assert_int_equal(fake.prefilled, 300);
    assert_int_equal(read_all(s, ids, 1000), 300);
    expect_as_cold(e, s, ids, 1000);
    lily_cancel(s); /* before a call: belongs to none */
    ids[999] ^= 1;
    assert_int_equal(lily_session_sync(s, ids, 1000, &err), 0);
    expect_as_cold(e, s, ids, 1000);
    fake_close_all(e, s);
}

/* LC1: one spoilt state must not outlive its request. */
static void test_non_finite_logits(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[300], cached;
    fill(ids, 300, 50);
    for (int32_t where = 100; where < 400; where += 100) {
        fake.nan_at = where; /* before, at and after the end of the prompt */
        int rc = session_sync(s, ids, 200, NULL, NULL, &cached, &err);
        for (int32_t i = 200; i < 300 && !rc; i++) rc = lily_session_step(s, ids[i], &err);
        assert_int_equal(rc, LILY_ENUMERIC);
        assert_non_null(strstr(err.msg, "non-finite"));
        assert_null(lily_session_logits(s));
        assert_int_equal(read_all(s, ids, 200), 0); /* no checkpoint may survive */
        expect_as_cold(e, s, ids, 200);
        lily_session_reset(s);
        fake.nan_at = 0;
    }
    fake_close_all(e, s);
}

/* Short of memory all checkpoints but one go to disk, then that one too; a prompt is read again
 * from what is in memory or there, and the log says so once. */
static void test_memory_pressure(void **state) {
    (void)state;
    char line[500] = "";
    lily_engine *e = six_checkpoints(line);
    lily_session *s = fake_session(e);
    int32_t ids[301];
    fill(ids, 301, 40);
    fake.pressure = BACKEND_PRESSURE_WARN;
    read_all(s, ids, 150); /* a checkpoint at 128 */
    assert_string_equal(
        line, "memory: the system is short of it; gave back 5 state checkpoints, 0 are on disk");
    assert_int_equal(fake.states, 1);
    line[0] = 0;
    ids[140] ^= 1;
    assert_int_equal(read_all(s, ids, 300), 128); /* and one at 256 in its place */
    assert_string_equal(line, "");
    ids[299] ^= 1;
    fake.pressure = BACKEND_PRESSURE_CRITICAL;
    assert_int_equal(read_all(s, ids, 300), 256);
    assert_string_equal(
        line, "memory: the system is short of it; gave back 1 state checkpoint, 1 is on disk");
    ids[130] ^= 1;
    assert_int_equal(read_all(s, ids, 300), 0);
    assert_int_equal(fake.states, 0);
    expect_as_cold(e, s, ids, 300);
    fake_close_all(e, s);
}

/* What was taken before memory ran short is resumed from disk, as from memory. */
static void test_checkpoints_on_disk(void **state) {
    (void)state;
    char line[500] = "";
    lily_engine *e = six_checkpoints(line);
    lily_session *s = fake_session(e);
    int32_t ids[301];
    fill(ids, 301, 40);
    assert_int_equal(read_all(s, ids, 150), 0); /* a checkpoint at 128 */
    assert_int_equal(read_all(s, ids, 300), 150);
    ids[299] ^= 1;
    fake.pressure = BACKEND_PRESSURE_CRITICAL;
    assert_int_equal(read_all(s, ids, 301), 256);
    ids[300] ^= 1;
    assert_int_equal(read_all(s, ids, 301), 256);
    assert_string_equal(
        line, "memory: the system is short of it; gave back 6 state checkpoints, 2 are on disk");
    assert_int_equal(fake.states, 0);
    ids[200] ^= 1;
    assert_int_equal(read_all(s, ids, 300), 128);
    expect_as_cold(e, s, ids, 300);
    ids[140] ^= 1;
    assert_int_equal(read_all(s, ids, 300), 128);
    expect_as_cold(e, s, ids, 300);
    assert_int_equal(fake.states, 0);
    fake_close_all(e, s);
}

/* Idle and short of memory a session goes to disk with all that it holds; the next call goes on
 * from there as if it had stayed, at any position and after going back too. */
static void test_a_session_at_rest(void **state) {
    (void)state;
    char line[500] = "";
    lily_engine *e = six_checkpoints(line);
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[1001];
    fill(ids, 1001, 70);
    assert_int_equal(read_all(s, ids, 777), 0);
    assert_true(lily_session_idle(s));
    assert_int_equal(fake.sessions, 1); /* memory is not short */
    fake.pressure = BACKEND_PRESSURE_WARN;
    for (int i = 0; i < 2; i++) {
        assert_true(lily_session_idle(s));
        assert_int_equal(fake.sessions, 0);
        assert_int_equal(fake.states, 0);
        assert_string_equal(
            line, "memory: the system is short of it; the session of 777 tokens waits on disk");
    }
    assert_int_equal(read_all(s, ids, 1000), 777);
    expect_as_cold(e, s, ids, 1000);
    fake.pressure = BACKEND_PRESSURE_NONE;
    ids[900] ^= 1; /* back to a checkpoint, which lies on disk too */
    assert_int_equal(read_all(s, ids, 1000), 768);
    assert_int_equal(fake.states, 6); /* what was given back is there again */
    expect_as_cold(e, s, ids, 1000);
    fake.pressure = BACKEND_PRESSURE_CRITICAL;
    assert_true(lily_session_idle(s));
    assert_int_equal(lily_session_step(s, 3, &err), 0); /* a step wakes it as well */
    ids[1000] = 3;
    expect_as_cold(e, s, ids, 1001);
    assert_true(lily_session_idle(s));
    lily_session_reset(s);
    assert_int_equal(fake.sessions, 0);
    assert_int_equal(read_all(s, ids, 500), 0);
    assert_true(lily_session_idle(s));
    fake_close_all(e, s);
}

/* Every call that needs the session's memory wakes it first. */
static void test_calls_at_rest(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){.state_bytes = 6 * fake_state_bytes(NULL)});
    lily_session *s = fake_session(e);
    lily_result result;
    lily_err err;
    int32_t ids[300];
    fill(ids, 300, 72);
    const lily_request request = {.prompt = ids, .n_prompt = 300, .max_tokens = 1};
    fake.pressure = BACKEND_PRESSURE_WARN;
    read_all(s, ids, 300);
    for (int call = 0; call < 4; call++) {
        assert_true(lily_session_idle(s));
        assert_int_equal(fake.sessions, 0);
        int rc = 0;
        if (call == 0) rc = lily_session_greedy(s, 3, 2, NULL, NULL, &err);
        if (call == 1) rc = lily_generate(s, &request, &result, &err);
        if (call == 2) rc = lily_session_score(s, ids, 70, NULL, NULL, &err);
        if (call == 3) rc = lily_session_greedy(s, 3, INT32_MAX, NULL, NULL, &err);
        assert_int_equal(rc, call == 3 ? LILY_ECONTEXT : 0);
        assert_int_equal(fake.sessions, 1);
    }
    fake_close_all(e, s);
}

/* A request that arrives meanwhile ends the writing; the session goes on in memory. */
static void test_a_rest_cancelled(void **state) {
    (void)state;
    char line[500] = "";
    lily_engine *e = six_checkpoints(line);
    lily_session *s = fake_session(e);
    int32_t ids[1000];
    fill(ids, 1000, 73);
    read_all(s, ids, 900);
    fake.pressure = BACKEND_PRESSURE_WARN;
    line[0] = 0;
    lily_cancel(s);
    assert_true(lily_session_idle(s)); /* nothing is begun */
    assert_string_equal(line, "");
    assert_int_equal(fake.states, 6);
    fake.cancels = s;
    assert_true(lily_session_idle(s)); /* ended behind the first piece */
    assert_null(fake.cancels);
    assert_int_equal(fake.sessions, 1);
    assert_int_equal(read_all(s, ids, 1000), 900);
    expect_as_cold(e, s, ids, 1000);
    assert_true(lily_session_idle(s)); /* asked again it is written */
    assert_int_equal(fake.sessions, 0);
    fake_close_all(e, s);
}

/* A request given up while the session is read back leaves it on disk, for the next one. */
static void test_waking_cancelled(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_result result;
    lily_err err;
    int32_t ids[1000];
    fill(ids, 1000, 74);
    const lily_request request = {.prompt = ids, .n_prompt = 950, .max_tokens = 1};
    fake.pressure = BACKEND_PRESSURE_WARN;
    read_all(s, ids, 900);
    assert_true(lily_session_idle(s));
    fake.cancels = s;
    assert_int_equal(lily_session_sync(s, ids, 950, &err), LILY_ECANCELED);
    assert_int_equal(fake.sessions, 0);
    assert_int_equal(fake.states, 0);
    fake.cancels = s;
    assert_int_equal(lily_generate(s, &request, &result, &err), 0);
    assert_int_equal(result.finish, LILY_FINISH_CANCELLED);
    assert_int_equal(result.prompt_tokens, 950);
    assert_int_equal(fake.sessions, 0);
    assert_int_equal(lily_session_held(s), 900);
    lily_cancel(s); /* before a call it does nothing */
    assert_int_equal(session_enter(s, &err), 0);
    assert_int_equal(read_all(s, ids, 1000), 900);
    session_leave(s, 0);
    expect_as_cold(e, s, ids, 1000);
    fake_close_all(e, s);
}

/* A full disk is told once and tried again, ever later; then all is as if it had never been full.
 */
static void test_a_full_disk_is_tried_again(void **state) {
    (void)state;
    char line[500] = "";
    lily_engine *e = fake_engine((lily_engine_options){.log = fake_keep_line, .arg = line});
    lily_session *s = fake_session(e);
    int32_t ids[300];
    fill(ids, 300, 75);
    read_all(s, ids, 300);
    fake.pressure = BACKEND_PRESSURE_WARN;
    fake.export_fails = true;
    assert_true(lily_session_idle(s));
    assert_string_equal(line, "memory: the system is short of it; fake: told not to export; it is "
                              "tried again later");
    line[0] = 0;
    for (int32_t wait = 30; wait < 10000; wait *= 2) {
        int32_t most = wait < 1800 ? wait : 1800;
        assert_int_equal(s->rest.wait, most);
        assert_true(s->rest.next_ns > clock_ns() + (int64_t)(most - 5) * 1000000000);
        fake.export_fails = false;
        assert_true(lily_session_idle(s)); /* not yet */
        assert_int_equal(fake.sessions, 1);
        fake.export_fails = true;
        s->rest.next_ns = clock_ns();
        assert_true(lily_session_idle(s));
    }
    assert_string_equal(line, "");
    fake.export_fails = false;
    s->rest.next_ns = clock_ns();
    assert_true(lily_session_idle(s));
    assert_int_equal(fake.sessions, 0);
    assert_int_equal(read_all(s, ids, 300), 300);
    assert_true(lily_session_idle(s)); /* at once */
    assert_int_equal(fake.sessions, 0);
    fake_close_all(e, s);
}

/* What a failed call leaves: everything, unless the backend or the model failed. */
static void test_what_failures_leave(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){.context = 1024});
    lily_session *s = fake_session(e);
    lily_result result;
    lily_err err;
    int32_t ids[1025];
    fill(ids, 1025, 76);
    const lily_sampling bad = {.temperature = -1};
    lily_request request = {.prompt = ids, .n_prompt = 1024, .max_tokens = 1};
    assert_int_equal(lily_session_held(s), 0);
    read_all(s, ids, 900);
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_ECONTEXT);
    request.n_prompt = 950;
    request.sampling = &bad;
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_EINVAL);
    request.sampling = NULL;
    request.tools = "{";
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_EINVAL);
    request.tools = NULL;
    assert_int_equal(lily_session_held(s), 900);
    fake.pressure = BACKEND_PRESSURE_WARN;
    assert_true(lily_session_idle(s));
    fake.no_sessions = true;
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_ENOMEM);
    fake.no_sessions = false;
    fake.no_states = true; /* room for the session, but not to read its state */
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_ENOMEM);
    assert_int_equal(fake.sessions, 0);
    fake.no_states = false;
    assert_int_equal(lily_session_held(s), 900);
    assert_int_equal(read_all(s, ids, 940), 900);
    expect_as_cold(e, s, ids, 940);
    fake.fail_at = 945;
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_EBACKEND);
    assert_int_equal(lily_session_held(s), 0);
    read_all(s, ids, 900);
    fake.nan_at = 950;
    assert_int_equal(lily_generate(s, &request, &result, &err), LILY_ENUMERIC);
    assert_int_equal(lily_session_held(s), 0);
    fake_close_all(e, s);
}

/* Whatever fails, no wrong token is gone on from. */
static void test_a_rest_that_fails(void **state) {
    (void)state;
    char line[500] = "";
    lily_engine *e = six_checkpoints(line);
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[500], cached;
    fill(ids, 500, 71);
    fake.pressure = BACKEND_PRESSURE_CRITICAL;
    read_all(s, ids, 300);
    fake.export_fails = true; /* it stays */
    assert_true(lily_session_idle(s));
    assert_int_equal(fake.sessions, 1);
    fake.export_fails = false;
    s->rest.next_ns = clock_ns();
    assert_int_equal(read_all(s, ids, 400), 300);
    assert_true(lily_session_idle(s));
    fake.no_sessions = true; /* no room to wake: it waits on */
    assert_int_equal(session_enter(s, &err), LILY_ENOMEM);
    assert_int_equal(lily_session_sync(s, ids, 450, &err), LILY_ENOMEM);
    fake.no_sessions = false;
    assert_int_equal(session_enter(s, &err), 0);
    assert_int_equal(session_sync(s, ids, 450, NULL, NULL, &cached, &err), 0);
    session_leave(s, 0);
    assert_int_equal(cached, 400);
    expect_as_cold(e, s, ids, 450);
    assert_true(lily_session_idle(s));
    fake.import_fails = true; /* what cannot be read is read anew */
    assert_int_equal(read_all(s, ids, 500), 0);
    assert_string_equal(line, "session on disk: fake: told not to import; it was emptied");
    fake.import_fails = false;
    expect_as_cold(e, s, ids, 500);
    fake_close_all(e, s);
}

static void test_backend_failures(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[300], cached;
    fill(ids, 300, 60);
    read_all(s, ids, 100);
    fake.fail_at = 150;
    assert_int_equal(session_sync(s, ids, 200, NULL, NULL, &cached, &err), LILY_EBACKEND);
    assert_null(lily_session_logits(s));
    assert_int_equal(read_all(s, ids, 200), 0);
    expect_as_cold(e, s, ids, 200);
    fake.fail_at = 201;
    assert_int_equal(lily_session_step(s, 1, &err), LILY_EBACKEND);
    assert_int_equal(read_all(s, ids, 200), 0);

    ids[100] ^= 1;
    fake.chunk = -1; /* reads nothing, and says that all is well */
    assert_int_equal(session_sync(s, ids, 200, NULL, NULL, &cached, &err), LILY_EBACKEND);
    assert_string_equal(err.msg, "backend fake: read 0 of 192 tokens");
    assert_int_equal(lily_session_score(s, ids, 200, NULL, NULL, &err), LILY_EBACKEND);
    fake.chunk = 0;
    read_all(s, ids, 200);

    ids[199] ^= 1;
    fake.restore_fails = true; /* costs time only */
    assert_int_equal(read_all(s, ids, 200), 0);
    expect_as_cold(e, s, ids, 200);
    fake.restore_fails = false;
    lily_session_reset(s);
    fake.save_fails = true;
    read_all(s, ids, 200);
    ids[199] ^= 1;
    assert_int_equal(read_all(s, ids, 200), 0);
    expect_as_cold(e, s, ids, 200);
    fake_close_all(e, s);
}

static void test_bad_arguments(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){.context = 100, .max_sessions = 2});
    lily_session *s = fake_session(e), *other, *third;
    lily_err err;
    int32_t ids[101];
    fill(ids, 101, 70);
    assert_int_equal(lily_session_sync(s, ids, 0, &err), LILY_EINVAL);
    assert_int_equal(lily_session_sync(s, ids, 101, &err), LILY_ECONTEXT);
    assert_non_null(strstr(err.msg, "101"));
    assert_non_null(strstr(err.msg, "100"));
    read_all(s, ids, 50);
    ids[60] = V;
    assert_int_equal(lily_session_sync(s, ids, 80, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "4096 at 60"));
    ids[60] = -1;
    assert_int_equal(lily_session_sync(s, ids, 80, &err), LILY_EINVAL);
    assert_int_equal(lily_session_step(s, V, &err), LILY_EINVAL);
    assert_int_equal(lily_session_step(s, -1, &err), LILY_EINVAL);
    assert_int_equal(read_all(s, ids, 55), 50); /* a refused call changes nothing */
    ids[60] = 1;
    read_all(s, ids, 100);
    assert_int_equal(lily_session_step(s, 1, &err), LILY_ECONTEXT);
    expect_as_cold(e, s, ids, 100);

    assert_int_equal(lily_session_new(e, 101, &other, &err), LILY_EINVAL);
    assert_int_equal(lily_session_new(e, -1, &other, &err), LILY_EINVAL);
    assert_int_equal(lily_session_new(e, 10, &other, &err), 0);
    assert_int_equal(lily_session_sync(other, ids, 11, &err), LILY_ECONTEXT);
    assert_int_equal(lily_session_new(e, 0, &third, &err), LILY_EBUSY);
    assert_null(third);
    lily_session_free(other);
    fake.no_sessions = true; /* a failure takes no place */
    for (int i = 0; i < 3; i++) {
        assert_int_equal(lily_session_new(e, 0, &third, &err), LILY_ENOMEM);
        assert_null(third);
    }
    fake_close_all(e, s);
}

/* Sessions must not see one another. */
static void test_two_sessions(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *a = fake_session(e), *b = fake_session(e);
    lily_err err;
    int32_t ids[300];
    fill(ids, 300, 80);
    read_all(a, ids, 200);
    read_all(b, ids, 100);
    for (int32_t i = 0; i < 100; i++) {
        assert_int_equal(lily_session_step(a, ids[200 + i], &err), 0);
        assert_int_equal(lily_session_step(b, ids[100 + i], &err), 0);
    }
    expect_as_cold(e, a, ids, 300);
    expect_as_cold(e, b, ids, 200);
    lily_session_free(b);
    fake_close_all(e, a);
}

struct rows {
    lily_engine *engine;
    const int32_t *ids;
    size_t next, stop_at;
};

static int check_row(void *arg, size_t i, const float *logits) {
    struct rows *r = arg;
    assert_int_equal(i, r->next++);
    if (i % 37 == 0) {
        lily_session *cold = fake_session(r->engine);
        read_all(cold, r->ids, (int32_t)i + 1);
        assert_memory_equal(logits, lily_session_logits(cold), V * sizeof(float));
        lily_session_free(cold);
    }
    return r->stop_at && i + 1 == r->stop_at;
}

static void test_score(void **state) {
    (void)state;
    lily_engine *e = fake_engine((lily_engine_options){0});
    lily_session *s = fake_session(e);
    lily_err err;
    int32_t ids[200];
    fill(ids, 200, 90);
    fake.chunk = 50;
    read_all(s, ids, 100); /* must not shorten the rows */
    struct rows rows = {.engine = e, .ids = ids};
    assert_int_equal(lily_session_score(s, ids, 200, check_row, &rows, &err), 0);
    assert_int_equal(rows.next, 200);
    assert_int_equal(read_all(s, ids, 200), 200);
    expect_as_cold(e, s, ids, 200);
    rows = (struct rows){.engine = e, .ids = ids, .stop_at = 120};
    assert_int_equal(lily_session_score(s, ids, 200, check_row, &rows, &err), LILY_ECANCELED);
    assert_int_equal(rows.next, 120);
    fake.nan_at = 77;
    rows = (struct rows){.engine = e, .ids = ids};
    assert_int_equal(lily_session_score(s, ids, 200, check_row, &rows, &err), LILY_ENUMERIC);
    assert_int_equal(rows.next, 76);
    fake.fail_at = 77;
    assert_int_equal(lily_session_score(s, ids, 200, NULL, NULL, &err), LILY_EBACKEND);
    read_all(s, ids, 100);
    expect_as_cold(e, s, ids, 100);
    fake_close_all(e, s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_extension_reads_the_suffix),
        cmocka_unit_test(test_repetition_reads_nothing),
        cmocka_unit_test(test_nothing_is_shared),
        cmocka_unit_test(test_ahead_of_the_position),
        cmocka_unit_test(test_edits_resume_at_turns),
        cmocka_unit_test(test_long_prompts_are_checkpointed),
        cmocka_unit_test(test_answers_resume_within),
        cmocka_unit_test(test_never_wrong),
        cmocka_unit_test(test_cancelled_reading_goes_on),
        cmocka_unit_test(test_non_finite_logits),
        cmocka_unit_test(test_memory_pressure),
        cmocka_unit_test(test_checkpoints_on_disk),
        cmocka_unit_test(test_a_session_at_rest),
        cmocka_unit_test(test_calls_at_rest),
        cmocka_unit_test(test_a_rest_cancelled),
        cmocka_unit_test(test_waking_cancelled),
        cmocka_unit_test(test_a_full_disk_is_tried_again),
        cmocka_unit_test(test_what_failures_leave),
        cmocka_unit_test(test_a_rest_that_fails),
        cmocka_unit_test(test_backend_failures),
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_two_sessions),
        cmocka_unit_test(test_score),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
