#include <stdint.h>
#define PRIu64 "llu"
#define PRId64 "lld"
#define PRIx64 "llx"
