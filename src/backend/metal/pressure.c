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
