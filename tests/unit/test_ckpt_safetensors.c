/* The safetensors reader on files in memory: what is right, and every way to be wrong. */
#include "ckpt_fixture.h"

#include "ckpt/safetensors.h"

/* A file of that header and n bytes of data; the caller frees it. */
static uint8_t *make(const char *header, size_t n, size_t *size) {
    uint64_t length = strlen(header);
    *size = 8 + length + n;
    uint8_t *file = malloc(*size + 1);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, length);
    memset(file + 8 + length, 1, n);
    return file;
}

static void accepts(const char *header, size_t n, size_t tensors) {
    size_t size;
    uint8_t *file = make(header, n, &size);
    struct st_file f;
    lily_err err = {0};
    if (st_parse("a.safetensors", file, size, &f, &err) != 0) fail_msg("%s", err.msg);
    assert_int_equal(f.n, tensors);
    st_close(&f);
    free(file);
}

static void refuses(const char *header, size_t n, const char *part) {
    size_t size;
    uint8_t *file = make(header, n, &size);
    struct st_file f;
    lily_err err = {0};
    int rc = st_parse("a.safetensors", file, size, &f, &err);
    if (rc == 0) fail_msg("accepted: %s", header);
    assert_int_equal(rc, LILY_EFORMAT);
    fx_message_has(err.msg, "a.safetensors: ");
    fx_message_has(err.msg, "found ");
    fx_message_has(err.msg, "expected ");
    fx_message_has(err.msg, part);
    free(file);
}

#define A(shape, begin, end)                                                                       \
    "\"a\":{\"dtype\":\"BF16\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"
#define B(shape, begin, end)                                                                       \
    "\"b\":{\"dtype\":\"U32\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static void test_right_files(void **state) {
    (void)state;
    accepts("{}", 0, 0);
    accepts("{\"__metadata__\":{\"format\":\"pt\"}}   ", 0, 0);
    accepts("{" A("[2,3]", "0", "12") "," B("[1]", "12", "16") "}", 16, 2);
    accepts("{" B("[1]", "12", "16") "," A("[2,3]", "0", "12") "}", 16, 2); /* any order of names */
    accepts("{" A("[]", "0", "2") "}", 2, 1);                               /* a scalar */
    accepts("{" A("[0,5]", "0", "0") "," B("[1]", "0", "4") "}", 4, 2);     /* an empty tensor */
}

static void test_values(void **state) {
    (void)state;
    size_t size;
    uint8_t *file = make("{" B("[1]", "12", "16") "," A("[2,3]", "0", "12") "}", 16, &size);
    struct st_file f;
    lily_err err = {0};
    assert_int_equal(st_parse("x", file, size, &f, &err), 0);
    assert_string_equal(f.tensors[0].name, "a"); /* in order of data */
    assert_int_equal(f.tensors[0].dtype, ST_BF16);
    assert_int_equal(f.tensors[0].rank, 2);
    assert_int_equal(f.tensors[0].dims[1], 3);
    assert_ptr_equal(f.tensors[0].data, file + size - 16);
    assert_int_equal(f.tensors[1].bytes, 4);
    assert_int_equal(f.header_bytes, size - 16);
    st_close(&f);
    free(file);
}

static void test_lengths(void **state) {
    (void)state;
    struct st_file f;
    lily_err err = {0};
    assert_int_equal(st_parse("x", (const uint8_t *)"1234567", 7, &f, &err), LILY_EFORMAT);
    assert_int_equal(st_parse("x", NULL, 0, &f, &err), LILY_EFORMAT);
    /* Every header length from absurd down to one too many. */
    const uint64_t lengths[] = {UINT64_MAX, UINT64_MAX - 7, INT64_MAX, ST_MAX_HEADER + 1, 1000, 3};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint8_t file[10] = {0};
        memcpy(file, &lengths[i], 8);
        memcpy(file + 8, "{}", 2);
        assert_int_equal(st_parse("x", file, 10, &f, &err), LILY_EFORMAT);
        fx_message_has(err.msg, "found a header of ");
    }
    /* Cut anywhere, a file is refused. */
    size_t size;
    uint8_t *file = make("{" A("[2,3]", "0", "12") "," B("[1]", "12", "16") "}", 16, &size);
    for (size_t n = 0; n < size; n++) {
        uint8_t *cut = malloc(n + 1); /* its own memory: sanitizers see a read too far */
        memcpy(cut, file, n);
        assert_int_equal(st_parse("x", cut, n, &f, &err), LILY_EFORMAT);
        free(cut);
    }
    free(file);
}

static void test_wrong_ranges(void **state) {
    (void)state;
    refuses("{" A("[2,3]", "0", "12") "}", 11, "cut short");
    refuses("{" A("[2,3]", "0", "12") "}", 13, "after the last tensor");
    refuses("{" A("[2,3]", "0", "12") "," B("[1]", "8", "12") "}", 12, "overlaps");
    refuses("{" A("[2,3]", "0", "12") "," B("[1]", "0", "4") "}", 12, "overlaps");
    refuses("{" A("[2,3]", "0", "12") "," B("[1]", "16", "20") "}", 20, "gap");
    refuses("{" A("[2,3]", "4", "16") "}", 16, "gap");
    refuses("{" A("[2,3]", "12", "0") "}", 12, "no range");
    refuses("{" A("[2,3]", "-1", "11") "}", 12, "no range");
    refuses("{" A("[2,3]", "0", "9223372036854775807") "}", 12, "cut short");
    refuses("{" A("[2,3]", "0", "99999999999999999999") "}", 12, "invalid JSON");
    refuses("{" A("[2,3]", "0.0", "12") "}", 12, "no range");
    refuses("{\"a\":{\"dtype\":\"BF16\",\"shape\":[2]}}", 4, "no range");
}

static void test_wrong_shapes(void **state) {
    (void)state;
    refuses("{" A("[2,4]", "0", "12") "}", 12, "found 12 bytes, expected what BF16 [2, 4] needs");
    refuses("{" A("[4294967296,4294967296]", "0", "12") "}", 12, "beyond any size");
    refuses("{" A("[9223372036854775807,2]", "0", "12") "}", 12, "beyond any size");
    refuses("{" A("[-6]", "0", "12") "}", 12, "not a count");
    refuses("{" A("[6.0]", "0", "12") "}", 12, "not a count");
    refuses("{" A("6", "0", "12") "}", 12, "no usable shape");
    refuses("{" A("[1,1,1,1,1,1,1,1,6]", "0", "12") "}", 12, "no usable shape");
    refuses("{\"a\":{\"dtype\":\"BF17\",\"shape\":[6],\"data_offsets\":[0,12]}}", 12, "BF17");
    refuses("{\"a\":{\"dtype\":1,\"shape\":[6],\"data_offsets\":[0,12]}}", 12, "dtype");
    refuses("{\"a\":null}", 0, "dtype");
}

static void test_wrong_json(void **state) {
    (void)state;
    refuses("{" A("[2,3]", "0", "12") "," A("[2,3]", "0", "12") "}", 12, "duplicate");
    refuses("{", 0, "invalid JSON");
    refuses("[]", 0, "not an object");
    refuses("{} x", 0, "invalid JSON");
    refuses("{\"\xff\xfe\":1}", 0, "UTF-8");
    refuses("", 0, "invalid JSON");
    char deep[20001];
    memset(deep, '[', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    refuses(deep, 0, "invalid JSON"); /* and no stack overflow */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_files),  cmocka_unit_test(test_values),
        cmocka_unit_test(test_lengths),      cmocka_unit_test(test_wrong_ranges),
        cmocka_unit_test(test_wrong_shapes), cmocka_unit_test(test_wrong_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
