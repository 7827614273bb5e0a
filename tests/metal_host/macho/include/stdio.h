/* What the Metal host uses of the C library of macOS, declared after the C standard and POSIX, for
 * the Mach-O check alone: no SDK is at hand where it runs. */
#include <stdarg.h>
#include <stddef.h>
int snprintf(char *restrict out, size_t n, const char *restrict format, ...)
    __attribute__((format(printf, 3, 4)));
int vsnprintf(char *restrict out, size_t n, const char *restrict format, va_list arguments);
