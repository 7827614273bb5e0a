/* The arithmetic of bench and eval, and the .npy writer. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "cli/measure.h"
#include "cli/npy.h"

static void test_median_spread(void **state) {
    (void)state;
    double odd[] = {5, 1, 3}, even[] = {4, 1, 2, 3}, one[] = {7}, zero[] = {0, 0};
    assert_true(median(odd, 3) == 3);
    assert_true(median(even, 4) == 2.5);
    assert_true(median(one, 1) == 7 && spread(one, 1) == 0);
    double range[] = {10, 8, 12, 10};
    assert_true(fabs(spread(range, 4) - 0.4) < 1e-12);
    assert_true(spread(zero, 2) == 0);
}

/* The values of the rule, computed with wide integers. */
static void test_measured_token(void **state) {
    (void)state;
    const int32_t vocab = 248077;
    for (uint64_t i = 0; i < 100000; i += 7) {
        uint64_t wide = i * 2654435761u % ((uint64_t)1 << 32) % (uint64_t)vocab;
        assert_int_equal(measured_token((uint32_t)i, vocab), (int32_t)wide);
    }
}

/* FNV-1a's published values. */
static void test_digest(void **state) {
    (void)state;
    assert_true(digest_add(DIGEST_START, "", 0) == UINT64_C(0xcbf29ce484222325));
    assert_true(digest_add(DIGEST_START, "a", 1) == UINT64_C(0xaf63dc4c8601ec8c));
    assert_true(digest_add(DIGEST_START, "foobar", 6) == UINT64_C(0x85944171f73967e8));
}

static void test_logits(void **state) {
    (void)state;
    const float tie[] = {1, 3, 3, 2};
    assert_int_equal(argmax(tie, 4), 1);
    const float even[] = {7, 7, 7, 7};
    assert_true(fabs(log_probability(even, 4, 2) + log(4.0)) < 1e-12);
    /* Far from zero nothing overflows, and a masked entry has no mass. */
    const float far[] = {1000, 999, -INFINITY};
    assert_true(fabs(log_probability(far, 3, 0) + log1p(exp(-1.0))) < 1e-9);
    assert_true(log_probability(far, 3, 2) == -INFINITY);
}

static void test_bandwidth(void **state) {
    (void)state;
    double rate = 0;
    lily_err err;
    assert_int_equal(read_bandwidth(2, &rate, &err), 0);
    assert_true(rate > 1e8 && rate < 1e13);
}

/* ---- .npy ------------------------------------------------------------------------------------ */

static void folder_path(char *out, size_t room, const char *folder, const char *name) {
    snprintf(out, room, "%s/%s", folder, name);
}

static void test_npy(void **state) {
    (void)state;
    char folder[] = "/tmp/lily-npy-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    folder_path(path, sizeof path, folder, "x.npy");
    struct npy_writer *w;
    lily_err err;
    assert_int_equal(npy_open(path, 2, 3, &w, &err), 0);
    const float rows[2][3] = {{1, 2, 3}, {4, 5, 6}};
    assert_int_equal(npy_row(w, rows[0], &err), 0);
    assert_false(file_exists(path)); /* not before it is complete */
    assert_int_equal(npy_row(w, rows[1], &err), 0);
    assert_int_equal(npy_row(w, rows[1], &err), LILY_EINVAL);
    assert_int_equal(npy_commit(w, &err), 0);
    char *data;
    size_t size;
    assert_int_equal(file_read(path, 4096, &data, &size, &err), 0);
    assert_memory_equal(data, "\x93NUMPY\x01\x00", 8);
    size_t header = 10 + (size_t)(unsigned char)data[8] + 256 * (size_t)(unsigned char)data[9];
    assert_int_equal(header % 64, 0);
    assert_int_equal(size, header + sizeof rows);
    assert_int_equal(data[header - 1], '\n');
    assert_non_null(strstr(data + 10, "'shape': (2, 3)"));
    assert_memory_equal(data + header, rows, sizeof rows);
    free(data);
    unlink(path);
    rmdir(folder);
}

static void test_npy_incomplete(void **state) {
    (void)state;
    char folder[] = "/tmp/lily-npy-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    folder_path(path, sizeof path, folder, "x.npy");
    struct npy_writer *w;
    lily_err err;
    const float row[] = {1, 2, 3};
    assert_int_equal(npy_open(path, 2, 3, &w, &err), 0);
    assert_int_equal(npy_row(w, row, &err), 0);
    assert_int_equal(npy_commit(w, &err), LILY_EINVAL);
    assert_int_equal(npy_open(path, 2, 3, &w, &err), 0);
    npy_abort(w);
    assert_int_equal(npy_open(path, SIZE_MAX / 2, 16, &w, &err), LILY_EINVAL);
    folder_path(path, sizeof path, folder, "none/x.npy");
    assert_int_not_equal(npy_open(path, 2, 3, &w, &err), 0);
    assert_int_equal(rmdir(folder), 0); /* nothing was left behind */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_median_spread),  cmocka_unit_test(test_measured_token),
        cmocka_unit_test(test_digest),         cmocka_unit_test(test_logits),
        cmocka_unit_test(test_bandwidth),      cmocka_unit_test(test_npy),
        cmocka_unit_test(test_npy_incomplete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
