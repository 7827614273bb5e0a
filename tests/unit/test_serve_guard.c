/* Who may ask, and what for: Host, Origin, paths and methods. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "serve/guard.h"
#include "serve/routes.h"

static void local_hosts(void **state) {
    (void)state;
    static const char *const local[] = {"localhost",   "LOCALHOST:8080", "127.0.0.1",
                                        "127.1.2.3:1", "[::1]",          "[::1]:8080",
                                        "x.localhost", "localhost.",     "my.host:8080"};
    static const char *const foreign[] = {"",
                                          "evil.com",
                                          "evil.com:80",
                                          "localhost.evil.com",
                                          "127.0.0.1.evil",
                                          "128.0.0.1",
                                          "notlocalhost",
                                          "[::2]",
                                          "[::1",
                                          "[::1]x",
                                          ":8080",
                                          "0177.0.0.1.com",
                                          "evil.com#localhost",
                                          "0.0.0.0"};
    for (size_t i = 0; i < sizeof local / sizeof *local; i++)
        if (!guard_host_is_local(local[i], "my.host")) fail_msg("%s refused", local[i]);
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (guard_host_is_local(foreign[i], "my.host")) fail_msg("%s accepted", foreign[i]);
}

static void own_origins(void **state) {
    (void)state;
    assert_true(guard_origin_is_own(NULL, "localhost:1"));
    assert_true(guard_origin_is_own("http://localhost:1", "localhost:1"));
    assert_true(guard_origin_is_own("HTTPS://LocalHost:1", "localhost:1"));
    assert_false(guard_origin_is_own("http://localhost:2", "localhost:1"));
    assert_false(guard_origin_is_own("http://evil.com", "localhost:1"));
    assert_false(guard_origin_is_own("null", "localhost:1"));
    assert_false(guard_origin_is_own("", "localhost:1"));
    assert_false(guard_origin_is_own("http://localhost:1", NULL));
}

static void routes(void **state) {
    (void)state;
    static const struct {
        const char *method, *path;
        enum route route;
        int status;
    } cases[] = {
        {"GET", "/", ROUTE_INDEX, 0},
        {"HEAD", "/health", ROUTE_HEALTH, 0},
        {"GET", "/v1/models", ROUTE_MODELS, 0},
        {"GET", "/v1/models/a/b", ROUTE_MODEL, 0},
        {"POST", "/v1/chat/completions", ROUTE_CHAT, 0},
        {"OPTIONS", "/v1/chat/completions", ROUTE_OPTIONS, 0},
        {"GET", "/v1/chat/completions", ROUTE_NONE, 405},
        {"HEAD", "/v1/chat/completions", ROUTE_NONE, 405},
        {"POST", "/health", ROUTE_NONE, 405},
        {"GE", "/health", ROUTE_NONE, 405},
        {"", "/health", ROUTE_NONE, 405},
        {"GET", "/v1/models/", ROUTE_NONE, 404},
        {"GET", "/healthy", ROUTE_NONE, 404},
        {"OPTIONS", "/nowhere", ROUTE_NONE, 404},
        {"GET", "", ROUTE_NONE, 404},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *allow, *rest = "";
        struct api_error err = {0};
        enum route r = route_find(cases[i].method, cases[i].path, &allow, &rest, &err);
        if (r != cases[i].route || err.status != cases[i].status)
            fail_msg("%s %s: %d, %d", cases[i].method, cases[i].path, (int)r, err.status);
        if (err.status == 405) assert_non_null(allow);
        if (r == ROUTE_MODEL) assert_string_equal(rest, "a/b");
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(local_hosts),
        cmocka_unit_test(own_origins),
        cmocka_unit_test(routes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
