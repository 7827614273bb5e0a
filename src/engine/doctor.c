/* lily doctor: the machine, and each backend with why it can or cannot be used. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "base/err.h"
#include "engine/engine.h"
#include "engine/machine.h"
#include "lily.h"

/* Backends the project has a place for, in order of preference, and why this build may lack them.
 */
static const struct {
    const char *name, *reason;
} known[] = {
#if defined(__APPLE__)
    {"metal", "not in this build: it has no Metal backend"},
    {"cuda", "not in this build: CUDA does not exist on macOS"},
#else
    {"metal", "not in this build: Metal exists on macOS only"},
    {"cuda", "not in this build: it has no CUDA backend"},
#endif
    {"cpu", "not in this build"},
    {"ref", "not in this build"},
};

const char *engine_why_absent(const char *name) {
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(known[i].name, name) == 0) return known[i].reason;
    }
    return NULL;
}

static json_t *machine_json(void) {
    struct machine m;
    machine_read(&m);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:I, s:I}", "model", m.model, "os", m.os,
                     "os_version", m.os_version, "arch", m.arch, "cpu", m.cpu, "cores",
                     (int)m.cores, "memory_total_bytes", (json_int_t)m.memory_total,
                     "memory_available_bytes", (json_int_t)m.memory_available);
}

static json_t *backends_json(void) {
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        struct backend_probe probe = {0};
        snprintf(probe.reason, sizeof probe.reason, "%s", known[i].reason);
        for (size_t j = 0; backend_all[j]; j++) {
            if (strcmp(backend_all[j]->name, known[i].name) == 0) backend_all[j]->probe(&probe);
        }
        json_array_append_new(list, json_pack("{s:s, s:b, s:s, s:s}", "name", known[i].name,
                                              "usable", probe.usable, "device", probe.device,
                                              "reason", probe.reason));
    }
    return list;
}

int lily_doctor(char **json, lily_err *err) {
#ifdef LILY_EMBEDDED_STANDIN
    int embedded = 1;
#else
    int embedded = 0;
#endif
    json_t *doc =
        json_pack("{s:s, s:o*, s:o*, s:b}", "version", LILY_VERSION, "machine", machine_json(),
                  "backends", backends_json(), "embedded_standin", embedded);
    *json = doc ? json_dumps(doc, JSON_INDENT(2)) : NULL;
    json_decref(doc);
    return *json ? 0 : ERR_NOMEM(err, "doctor");
}
