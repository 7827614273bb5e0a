#include <stddef.h>
void *memcpy(void *restrict to, const void *restrict from, size_t n);
void *memmove(void *to, const void *from, size_t n);
void *memset(void *at, int value, size_t n);
void *memchr(const void *at, int value, size_t n);
int memcmp(const void *a, const void *b, size_t n);
size_t strlen(const char *text);
size_t strcspn(const char *text, const char *any);
int strcmp(const char *a, const char *b);
int strncmp(const char *a, const char *b, size_t n);
char *strstr(const char *text, const char *part);
char *strchr(const char *text, int c);
char *strrchr(const char *text, int c);
char *strerror(int code);
