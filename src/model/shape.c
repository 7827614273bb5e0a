#include "model/shape.h"

#include <string.h>

const struct shape *const shape_all[] = {&shape_qwen36_35b_a3b, &shape_mini, NULL};

const struct shape *shape_find(const char *name) {
    for (int i = 0; shape_all[i]; i++) {
        if (strcmp(shape_all[i]->name, name) == 0) return shape_all[i];
    }
    return NULL;
}
