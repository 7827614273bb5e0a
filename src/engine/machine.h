/* What machine this is. */
#ifndef LILY_ENGINE_MACHINE_H
#define LILY_ENGINE_MACHINE_H

#include <stdint.h>

struct machine {
    char os[128];                            /* "Linux 6.1.0" */
    char os_version[128];                    /* "macOS 26.2 (25C56)", "Debian GNU/Linux 12"; may be
                                                empty, and so may model */
    char model[128];                         /* "Mac17,6"; a PC's board or product */
    char arch[64];                           /* "x86_64" */
    char cpu[128];                           /* "AMD EPYC 9V74" */
    int32_t cores;                           /* logical ones this process may use */
    uint64_t memory_total, memory_available; /* bytes, a control group's limit taken into account;
                                                available is 0 where the system does not say */
};
void machine_read(struct machine *out);

#endif
