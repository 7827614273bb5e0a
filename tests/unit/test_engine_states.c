/* Which state checkpoints are kept. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/disk.h"
#include "engine/states.h"

/* A backend that has nothing but states, of state_size bytes, and memory for memory of them. */
struct backend_state {
    int32_t pos;
};
static size_t state_size;
static int32_t memory;

static size_t state_bytes(const struct backend_model *m) {
    (void)m;
    return state_size;
}

static int state_new(struct backend_model *m, struct backend_state **out, lily_err *err) {
    (void)m;
    if (memory == 0) return ERR_NOMEM(err, "state");
    *out = malloc(sizeof **out);
    memory--;
    return 0;
}

static void state_free(struct backend_state *state) {
    memory++;
    free(state);
}

static bool export_fails;

static int state_export(const struct backend_state *from, void *out, lily_err *err) {
    if (export_fails) return ERR(err, LILY_EBACKEND, "told not to export");
    memset(out, 0, state_size);
    memcpy(out, from, sizeof *from);
    return 0;
}

static int state_import(struct backend_state *to, const void *in, lily_err *err) {
    (void)err;
    memcpy(to, in, sizeof *to);
    return 0;
}

/* A session is the position that its state was restored to. */
struct backend_session {
    int32_t pos;
};

static int state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                         lily_err *err) {
    (void)err;
    assert_int_equal(from->pos, pos);
    s->pos = pos;
    return 0;
}

static const struct backend only_states = {.state_bytes = state_bytes,
                                           .state_new = state_new,
                                           .state_free = state_free,
                                           .state_restore = state_restore,
                                           .state_export = state_export,
                                           .state_import = state_import};

static void init(struct states *s, size_t bytes, uint64_t budget) {
    state_size = bytes;
    memory = 100;
    states_init(s, &only_states, NULL, budget);
}

/* Frees them; all memory must have come back. */
static void done(struct states *s) {
    states_free(s);
    assert_int_equal(memory, 100);
}

static bool add(struct states *s, int32_t pos, bool decode, const int32_t *keep, int32_t n_keep) {
    struct backend_state *room = states_add(s, pos, decode, keep, n_keep);
    if (room) room->pos = pos;
    return room != NULL;
}

/* Each entry must hold what was put in for its position, in ascending order. */
static void expect(const struct states *s, int32_t n, const int32_t *positions) {
    assert_int_equal(s->n, n);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(s->entry[i].pos, positions[i]);
        assert_int_equal(s->entry[i].saved->pos, positions[i]);
    }
}
#define EXPECT(s, ...)                                                                             \
    expect(s, (int32_t)(sizeof((int32_t[]){__VA_ARGS__}) / sizeof(int32_t)),                       \
           (int32_t[]){__VA_ARGS__})

static void test_budget(void **state) {
    (void)state;
    struct states s;
    init(&s, 100, 99);
    assert_false(add(&s, 64, false, NULL, 0));
    done(&s);
    init(&s, 100, 250);
    assert_int_equal(s.limit, 2);
    done(&s);
    init(&s, 1, UINT64_MAX);
    assert_int_equal(s.limit, STATES_MAX);
    assert_int_equal(memory, 100 - STATES_MAX); /* all of it is reserved at once */
    done(&s);
    state_size = 8;
    memory = 3; /* the budget allows more than there is */
    states_init(&s, &only_states, NULL, 800);
    assert_int_equal(s.limit, 3);
    for (int32_t pos = 64; pos <= 192; pos += 64) assert_true(add(&s, pos, false, NULL, 0));
    EXPECT(&s, 64, 128, 192);
    states_free(&s);
    assert_int_equal(memory, 3);
    init(&s, 0, 1000); /* a backend without state */
    assert_false(add(&s, 64, false, NULL, 0));
    done(&s);
}

static void test_find_and_drop(void **state) {
    (void)state;
    struct states s;
    init(&s, 8, 800);
    assert_null(states_find(&s, 1000));
    assert_true(add(&s, 128, false, NULL, 0));
    assert_true(add(&s, 64, false, NULL, 0)); /* out of order */
    assert_true(add(&s, 320, false, NULL, 0));
    assert_false(add(&s, 128, false, NULL, 0)); /* there already */
    EXPECT(&s, 64, 128, 320);
    assert_null(states_find(&s, 63));
    assert_int_equal(states_find(&s, 64)->pos, 64);
    assert_int_equal(states_find(&s, 319)->pos, 128);
    assert_int_equal(states_find(&s, 100000)->pos, 320);
    states_drop_above(&s, 128);
    EXPECT(&s, 64, 128);
    states_remove(&s, 64);
    EXPECT(&s, 128);
    states_clear(&s);
    assert_null(states_find(&s, 1000));
    assert_true(add(&s, 192, false, NULL, 0)); /* in used memory */
    EXPECT(&s, 192);
    done(&s);
}

static void test_eviction_takes_the_cheapest(void **state) {
    (void)state;
    struct states s;
    init(&s, 8, 32); /* four */
    add(&s, 1024, false, NULL, 0);
    add(&s, 1088, false, NULL, 0);
    add(&s, 4096, false, NULL, 0);
    add(&s, 5120, false, NULL, 0);
    add(&s, 9216, false, NULL, 0); /* without 1088, 64 tokens are read again: the least */
    EXPECT(&s, 1024, 4096, 5120, 9216);
    const int32_t keep[] = {1024, 5120};
    add(&s, 9280, false, keep, 2); /* 1024 and 5120 would cost least, but are kept */
    EXPECT(&s, 1024, 5120, 9216, 9280);
    const int32_t all[] = {1024, 5120, 9216, 9280};
    assert_false(add(&s, 9344, true, all, 4)); /* generating does not push out a fork */
    assert_true(add(&s, 9344, false, all, 4));
    EXPECT(&s, 1024, 5120, 9216, 9344);
    done(&s);
}

static void test_two_decode_checkpoints(void **state) {
    (void)state;
    struct states s;
    init(&s, 8, 8 * 6);
    add(&s, 64, false, NULL, 0);
    for (int32_t pos = 128; pos <= 1280; pos += 64) assert_true(add(&s, pos, true, NULL, 0));
    EXPECT(&s, 64, 1216, 1280);
    done(&s);
}

/* Each checkpoint is resumed as what was put in, wherever it is. */
static void expect_resumed(const struct states *s) {
    for (int32_t i = 0; i < s->n; i++) {
        struct backend_session session = {0};
        lily_err err;
        assert_int_equal(states_restore(s, &s->entry[i], &session, &err), 0);
        assert_int_equal(session.pos, s->entry[i].pos);
    }
}

/* Under memory pressure all but the newest go to disk. */
static void what_is_given_back_is_on_disk(void **state) {
    (void)state;
    struct states s;
    init(&s, 10, 60);
    for (int32_t pos = 64; pos <= 320; pos += 64) assert_true(add(&s, pos, false, NULL, 0));
    assert_int_equal(states_give_back(&s, 1), 5);
    assert_int_equal(memory, 99);
    assert_int_equal(s.on_disk, 4);
    assert_int_equal(s.n, 5);
    expect_resumed(&s);
    assert_int_equal(memory, 99);
    assert_true(add(&s, 384, true, NULL, 0)); /* in the place of the one in memory */
    assert_int_equal(s.n, 5);
    assert_int_equal(states_give_back(&s, 0), 1);
    assert_int_equal(s.on_disk, 5);
    assert_false(add(&s, 448, false, NULL, 0));
    expect_resumed(&s);
    states_drop_above(&s, 200); /* places become free, and are used again */
    assert_int_equal(s.on_disk, 3);
    states_clear(&s);
    assert_int_equal(s.on_disk, 0);
    done(&s);
}

/* As many on disk as there are places, and newer ones in memory: the oldest goes. */
static void a_full_file(void **state) {
    (void)state;
    struct states s;
    init(&s, 8, 8 * STATES_MAX);
    for (int32_t i = 1; i <= STATES_MAX; i++) assert_true(add(&s, 64 * i, false, NULL, 0));
    assert_int_equal(states_give_back(&s, 1), STATES_MAX - 1);
    for (int32_t i = 1; i <= 3; i++) {
        assert_true(add(&s, 64 * (STATES_MAX + i), false, NULL, 0));
        assert_int_equal(states_give_back(&s, 1), 0);
        assert_int_equal(s.n - s.on_disk, 1);
    }
    expect_resumed(&s);
    done(&s);
}

/* A new one of decode that finds no room replaces none: those on disk have no memory to give. */
static void no_room_drops_nothing(void **state) {
    (void)state;
    struct states s;
    const int32_t fork = 192;
    init(&s, 10, 30);
    assert_true(add(&s, 64, true, NULL, 0));
    assert_true(add(&s, 128, true, NULL, 0));
    assert_true(add(&s, fork, false, NULL, 0));
    assert_int_equal(states_give_back(&s, 1), 2);
    assert_int_equal(s.on_disk, 2);
    assert_false(add(&s, 256, true, &fork, 1));
    assert_int_equal(s.n, 3);
    assert_int_equal(s.entry[0].pos, 64);
    expect_resumed(&s);
    done(&s);
}

/* Where nothing can be written all but the newest are dropped, and none comes back. */
static void what_is_given_back_stays_away(void **state) {
    (void)state;
    struct states s;
    init(&s, 10, 60);
    export_fails = true;
    for (int32_t pos = 64; pos <= 192; pos += 64) assert_true(add(&s, pos, false, NULL, 0));
    assert_int_equal(memory, 94);
    assert_int_equal(states_give_back(&s, 1), 5);
    assert_int_equal(memory, 99);
    expect(&s, 1, (int32_t[]){192});
    assert_true(add(&s, 256, true, NULL, 0)); /* in the place of the one that stayed */
    expect(&s, 1, (int32_t[]){256});
    assert_int_equal(states_give_back(&s, 1), 0);
    assert_int_equal(states_give_back(&s, 0), 1);
    assert_false(add(&s, 320, false, NULL, 0));
    done(&s);
    init(&s, 10, 60); /* none taken yet: there is still room for the one */
    assert_int_equal(states_give_back(&s, 1), 5);
    assert_int_equal(memory, 99);
    assert_true(add(&s, 64, false, NULL, 0));
    assert_true(add(&s, 128, true, NULL, 0));
    EXPECT(&s, 128);
    done(&s);
    export_fails = false;
}

/* Nobody else can open what a session wrote, nor does a program hold it that is started meanwhile.
 */
static void a_file_of_its_own(void **state) {
    (void)state;
    struct stat file;
    lily_err err;
    int fd;
    assert_int_equal(disk_new(&fd, &err), 0);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(fstat(fd, &file), 0);
    assert_int_equal(file.st_nlink, 0);
    assert_int_equal(file.st_mode & 0777, 0600);
    char byte;
    assert_int_equal(disk_get(fd, 0, &byte, 1, &err), LILY_EIO); /* less than was asked for */
    assert_non_null(strstr(err.msg, "check that disk"));
    close(fd);
}

/* Where a write ends half-way the checkpoint is dropped; the file goes with its last one. */
static void a_disk_that_fills_up(void **state) {
    (void)state;
    struct states s;
    struct rlimit old, less;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    less = (struct rlimit){.rlim_cur = 100, .rlim_max = old.rlim_max};
    init(&s, 64, 64 * 4);
    for (int32_t pos = 64; pos <= 256; pos += 64) assert_true(add(&s, pos, false, NULL, 0));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &less), 0);
    int32_t gone = states_give_back(&s, 0);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(gone, 4);
    assert_int_equal(s.n, 1);
    assert_int_equal(s.on_disk, 1);
    expect_resumed(&s);
    assert_true(s.file.fd >= 0);
    states_clear(&s);
    assert_int_equal(s.file.fd, -1); /* its room is free */
    states_regain(&s);
    assert_true(add(&s, 64, false, NULL, 0));
    assert_int_equal(states_give_back(&s, 0), 4);
    expect_resumed(&s);
    done(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_find_and_drop),
        cmocka_unit_test(test_eviction_takes_the_cheapest),
        cmocka_unit_test(test_two_decode_checkpoints),
        cmocka_unit_test(what_is_given_back_is_on_disk),
        cmocka_unit_test(a_full_file),
        cmocka_unit_test(no_room_drops_nothing),
        cmocka_unit_test(what_is_given_back_stays_away),
        cmocka_unit_test(a_file_of_its_own),
        cmocka_unit_test(a_disk_that_fills_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
