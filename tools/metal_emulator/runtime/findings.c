/* What the emulator found, its options, and the verdict at exit. */
#include "internal.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEPT = 1000 }; /* further findings are counted, not kept */

/* A GPU whose chunks of a prompt are not cut for the time they take, so that what runs does not
 * depend on the machine. */
#define FAST_DISPATCH 1e-5

static struct metal_emu_finding *kept;
static size_t kept_count;
static size_t counts[METAL_EMU_KINDS];

#define KIND_NAME(name, text) text,
static const char *const kind_names[] = {METAL_EMU_FINDINGS(KIND_NAME)};
#undef KIND_NAME

static const struct metal_emu_profile profiles[] = {
    {"M1 8 GB", 8, MTLGPUFamilyApple7, 1500},
    {"M1 16 GB", 16, MTLGPUFamilyApple7, 1500},
    {"M1 Pro 32 GB, macOS 14", 32, MTLGPUFamilyApple7, 1400},
    {"M1 Max 64 GB", 64, MTLGPUFamilyApple7, 2602},
    {"M2 24 GB", 24, MTLGPUFamilyApple8, 1500},
    {"M3 Max 128 GB", 128, MTLGPUFamilyApple9, 1500},
    {"M4 Pro 48 GB", 48, MTLGPUFamilyApple9, 2602},
    {"M5 24 GB, macOS 26.0", 24, MTLGPUFamilyApple10, 2600},
    {"M5 32 GB", 32, MTLGPUFamilyApple10, 2602},
    {"M5 Max 128 GB", 128, MTLGPUFamilyApple10, 2602},
};

struct metal_emu_options emu_options = {
    .profile = {"M1 8 GB", 8, MTLGPUFamilyApple7, 1500},
    .checked = true,
    .fill = true,
    .hang_ms = 1000,
    .seconds_per_dispatch = FAST_DISPATCH,
};

const struct metal_emu_profile *metal_emu_profile(const char *name) {
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++) {
        if (strcmp(profiles[i].name, name) == 0) return &profiles[i];
    }
    return NULL;
}

struct metal_emu_options metal_emu_defaults(void) {
    return (struct metal_emu_options){
        .profile = profiles[0],
        .checked = true,
        .fill = true,
        .hang_ms = 1000,
        .seconds_per_dispatch = FAST_DISPATCH,
    };
}

void metal_emu_configure(const struct metal_emu_options *options) {
    emu_lock();
    emu_options = *options;
    emu_unlock();
}

/* A host that broke a rule, or kept an object, does not end with status 0. */
__attribute__((destructor)) static void verdict(void) {
    emu_buffers_collect_writes();
    metal_emu_check_leaks();
    if (metal_emu_live_sources() > 0) emu_find(METAL_EMU_LEAK, "a memory-pressure source");
    size_t total = 0;
    for (size_t i = 0; i < METAL_EMU_KINDS; i++) total += counts[i];
    if (total == 0) return;
    fprintf(stderr, "metal emulator: %zu findings\n", total);
    fflush(NULL);
    _exit(METAL_EMU_EXIT);
}

void emu_find(enum metal_emu_kind kind, const char *format, ...) {
    struct metal_emu_finding found = {.kind = kind};
    int n = snprintf(found.text, sizeof found.text, "%s: ", kind_names[kind]);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(found.text + n, sizeof found.text - (size_t)n, format, arguments);
    va_end(arguments);
    emu_lock();
    counts[kind]++;
    if (!kept) kept = calloc(KEPT, sizeof *kept);
    if (kept && kept_count < KEPT) kept[kept_count++] = found;
    bool print = !emu_options.quiet;
    emu_unlock();
    if (print) fprintf(stderr, "metal emulator: %s\n", found.text);
}

bool emu_expect(id object, Class class, const char *what) {
    if (object && object->isa == class && !emu_is_dead(object)) return true;
    emu_find(METAL_EMU_ARGUMENT, "%s: found %s%s, expected %s", what,
             object && emu_is_dead(object) ? "released " : "", object ? object->isa->name : "nil",
             class->name);
    return false;
}

_Noreturn void emu_fatal(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("metal emulator: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

size_t metal_emu_finding_count(void) {
    emu_buffers_collect_writes();
    return kept_count;
}

const struct metal_emu_finding *metal_emu_finding(size_t index) {
    return index < kept_count ? &kept[index] : NULL;
}

size_t metal_emu_count_of(enum metal_emu_kind kind) {
    emu_buffers_collect_writes();
    return counts[kind];
}

const char *metal_emu_kind_name(enum metal_emu_kind kind) {
    return kind_names[kind];
}

void metal_emu_reset(void) {
    emu_lock();
    emu_buffers_collect_writes();
    free(kept);
    kept = NULL;
    kept_count = 0;
    memset(counts, 0, sizeof counts);
    emu_graphs_forget();
    metal_emu_inject(UINT32_MAX, 0, 0, false);
    metal_emu_inject_no_memory(UINT32_MAX);
    metal_emu_inject_nil("", UINT32_MAX);
    emu_unlock();
}
