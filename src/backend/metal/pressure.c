#include "backend/metal/pressure.h"

#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <unistd.h>
#endif

uint64_t metal_machine_memory(void) {
#ifdef __APPLE__
    uint64_t bytes = 0;
    size_t n = sizeof bytes;
    return sysctlbyname("hw.memsize", &bytes, &n, NULL, 0) == 0 ? bytes : 0;
#else
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
#endif
}

enum backend_pressure metal_pressure(const struct backend_model *m) {
    (void)m;
#ifdef __APPLE__
    enum { NORMAL = 1, CRITICAL = 4 }; /* DISPATCH_MEMORYPRESSURE_...; 2 is a warning */
    int level = NORMAL;
    size_t n = sizeof level;
    if (sysctlbyname("kern.memorystatus_vm_pressure_level", &level, &n, NULL, 0) == 0) {
        if (level >= CRITICAL) return BACKEND_PRESSURE_CRITICAL;
        if (level > NORMAL) return BACKEND_PRESSURE_WARN;
    }
#endif
    return BACKEND_PRESSURE_NONE;
}
