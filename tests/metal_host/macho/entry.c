/* Keeps the whole backend in the linked file. */
#include "backend/backend.h"

int main(void) {
    struct backend_probe probe;
    backend_metal.probe(&probe);
    return probe.usable ? 0 : 1;
}
