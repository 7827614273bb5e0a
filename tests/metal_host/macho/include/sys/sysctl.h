#include <stddef.h>
int sysctlbyname(const char *name, void *old, size_t *old_bytes, void *new_value, size_t new_bytes);
