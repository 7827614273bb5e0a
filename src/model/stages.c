#include "model/stages.h"

const char *stage_name(enum stage stage) {
    static const char *const names[] = {
#define STAGE_NAME(name, text, what) text,
        STAGE_MAP(STAGE_NAME)
#undef STAGE_NAME
    };
    return stage < STAGE_COUNT ? names[stage] : "unknown";
}
