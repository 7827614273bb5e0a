#include "engine/machine.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#if defined(__APPLE__)
#include <mach/mach.h>
#include <sys/sysctl.h>
#else
#include <sched.h>
#endif

#if defined(__APPLE__)

static void read_text_of(const char *name, char *out, size_t n) {
    if (sysctlbyname(name, out, &n, NULL, 0)) out[0] = 0;
}

static void read_system(struct machine *m) {
    char version[32], build[32];
    read_text_of("hw.model", m->model, sizeof m->model);
    read_text_of("kern.osproductversion", version, sizeof version);
    read_text_of("kern.osversion", build, sizeof build);
    snprintf(m->os_version, sizeof m->os_version, "macOS %s (%s)", version, build);
    size_t n = sizeof m->cpu;
    if (sysctlbyname("machdep.cpu.brand_string", m->cpu, &n, NULL, 0)) m->cpu[0] = 0;
    n = sizeof m->memory_total;
    if (sysctlbyname("hw.memsize", &m->memory_total, &n, NULL, 0)) m->memory_total = 0;
    vm_statistics64_data_t vm = {0};
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&vm, &count) ==
        KERN_SUCCESS) {
        uint64_t pages = (uint64_t)vm.free_count + vm.inactive_count + vm.purgeable_count;
        m->memory_available = pages * (uint64_t)vm_kernel_page_size;
    }
}

#else

/* The value of "key ... : value" in text, trimmed, in out[n]; false when absent. */
static bool field(const char *text, const char *key, char *out, size_t n) {
    size_t length = strlen(key);
    for (const char *line = text; line && *line;) {
        const char *end = strchr(line, '\n');
        const char *colon = strchr(line, ':');
        if (strncmp(line, key, length) == 0 && colon && (!end || colon < end)) {
            const char *value = colon + 1 + strspn(colon + 1, " \t");
            int size = end ? (int)(end - value) : (int)strlen(value);
            snprintf(out, n, "%.*s", size > 0 ? size : 0, value);
            return true;
        }
        line = end ? end + 1 : NULL;
    }
    return false;
}

/* The beginning of a file of the kernel's, whose size stat does not tell. Empty: not there. */
static const char *read_text(const char *path, char *out, size_t n) {
    FILE *f = fopen(path, "r");
    out[f ? fread(out, 1, n - 1, f) : 0] = 0;
    if (f) fclose(f);
    return out;
}

/* A number in a file of its own; false for "max" and when there is none. */
static bool read_number(const char *path, uint64_t *out) {
    char text[64], *end;
    unsigned long long value = strtoull(read_text(path, text, sizeof text), &end, 10);
    if (end == text) return false;
    *out = value;
    return true;
}

static void read_memory(struct machine *m) {
    char value[64], info[4096];
    read_text("/proc/meminfo", info, sizeof info);
    if (field(info, "MemTotal", value, sizeof value)) {
        m->memory_total = strtoull(value, NULL, 10) * 1024;
    }
    if (field(info, "MemAvailable", value, sizeof value)) {
        m->memory_available = strtoull(value, NULL, 10) * 1024;
    }
    uint64_t limit, used;
    if (read_number("/sys/fs/cgroup/memory.max", &limit) && limit < m->memory_total) {
        m->memory_total = limit;
        if (read_number("/sys/fs/cgroup/memory.current", &used)) {
            uint64_t left = used < limit ? limit - used : 0;
            if (left < m->memory_available) m->memory_available = left;
        }
    }
}

/* Product and distribution: files that say so in their first line, or in NAME="value". */
static void read_names(struct machine *m) {
    char release[4096];
    read_text("/sys/class/dmi/id/product_name", m->model, sizeof m->model);
    m->model[strcspn(m->model, "\n")] = 0;
    const char *name =
        strstr(read_text("/etc/os-release", release, sizeof release), "PRETTY_NAME=\"");
    if (!name) return;
    name += strlen("PRETTY_NAME=\"");
    snprintf(m->os_version, sizeof m->os_version, "%.*s", (int)strcspn(name, "\"\n"), name);
}

static void read_system(struct machine *m) {
    char info[8192];
    read_text("/proc/cpuinfo", info, sizeof info);
    /* Arm kernels name no model; the board's name, where there is one, says more than nothing. */
    if (!field(info, "model name", m->cpu, sizeof m->cpu) &&
        !field(info, "Model", m->cpu, sizeof m->cpu)) {
        m->cpu[0] = 0;
    }
    read_memory(m);
    read_names(m);
}

#endif

void machine_read(struct machine *m) {
    struct utsname name;
    *m = (struct machine){0};
    if (uname(&name) == 0) {
        snprintf(m->os, sizeof m->os, "%.60s %.60s", name.sysname, name.release);
        snprintf(m->arch, sizeof m->arch, "%.60s", name.machine);
    }
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
#if !defined(__APPLE__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
#endif
    m->cores = cores > 0 ? (int32_t)cores : 1;
    read_system(m);
    if (!m->cpu[0]) snprintf(m->cpu, sizeof m->cpu, "%s", m->arch[0] ? m->arch : "unknown");
}
