#include "serve/routes.h"

#include <stdbool.h>
#include <string.h>

#define ALLOW_GET  "GET, HEAD, OPTIONS"
#define ALLOW_POST "POST, OPTIONS"

static const struct entry {
    const char *path; /* ends with '/' and is longer than that: a prefix */
    const char *allow;
    enum route route;
} table[] = {
    {"/", ALLOW_GET, ROUTE_INDEX},
    {"/health", ALLOW_GET, ROUTE_HEALTH},
    {"/v1/models", ALLOW_GET, ROUTE_MODELS},
    {"/v1/models/", ALLOW_GET, ROUTE_MODEL},
    {"/v1/chat/completions", ALLOW_POST, ROUTE_CHAT},
};

static const struct entry *entry_find(const char *path, const char **rest) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        size_t n = strlen(table[i].path);
        bool prefix = n > 1 && table[i].path[n - 1] == '/';
        if (prefix ? !strncmp(path, table[i].path, n) && path[n] : !strcmp(path, table[i].path)) {
            *rest = path + n;
            return &table[i];
        }
    }
    return NULL;
}

/* Whole-word search of method in "GET, HEAD, OPTIONS". */
static bool allows(const char *allow, const char *method) {
    size_t n = strlen(method);
    for (const char *p = allow; n && p && *p; p = strchr(p, ','), p = p ? p + 2 : NULL) {
        if (!strncmp(p, method, n) && (p[n] == ',' || !p[n])) return true;
    }
    return false;
}

enum route route_find(const char *method, const char *path, const char **allow, const char **rest,
                      struct api_error *err) {
    const struct entry *e = entry_find(path, rest);
    *allow = e ? e->allow : NULL;
    if (!e) {
        api_error_set(err, 404, "not_found", NULL,
                      "%s: no such path; this server answers to "
                      "/v1/chat/completions, /v1/models and /health",
                      path);
        return ROUTE_NONE;
    }
    if (!strcmp(method, "OPTIONS")) return ROUTE_OPTIONS;
    if (!allows(e->allow, method)) {
        api_error_set(err, 405, "method_not_allowed", NULL,
                      "%s: method %s is not allowed, "
                      "expected one of %s",
                      path, method, e->allow);
        return ROUTE_NONE;
    }
    return e->route;
}
