#include "serve/guard.h"

#include <arpa/inet.h>
#include <string.h>
#include <strings.h>

/* The name in "name", "name:port" or "[v6]:port", without brackets; false: malformed or too long.
 */
static bool host_name(const char *host, char *out, size_t size) {
    size_t n;
    if (host[0] == '[') {
        host++;
        n = strcspn(host, "]");
        if (host[n] != ']' || (host[n + 1] && host[n + 1] != ':')) return false;
    } else {
        n = strcspn(host, ":");
    }
    if (n == 0 || n >= size) return false;
    memcpy(out, host, n);
    out[n] = 0;
    return true;
}

static bool is_loopback_name(const char *name) {
    struct in_addr v4;
    struct in6_addr v6;
    if (inet_pton(AF_INET, name, &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
    if (inet_pton(AF_INET6, name, &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
    size_t n = strlen(name);
    if (n && name[n - 1] == '.') n--;
    static const char local[] = "localhost";
    const size_t k = sizeof local - 1;
    if (n < k || strncasecmp(name + n - k, local, k)) return false;
    return n == k || name[n - k - 1] == '.';
}

bool guard_host_is_local(const char *host, const char *configured) {
    char name[256];
    if (!host_name(host, name, sizeof name)) return false;
    return is_loopback_name(name) || (configured && !strcasecmp(name, configured));
}

bool guard_origin_is_own(const char *origin, const char *host) {
    if (!origin) return true;
    const char *name = !strncasecmp(origin, "http://", 7)    ? origin + 7
                       : !strncasecmp(origin, "https://", 8) ? origin + 8
                                                             : NULL;
    return name && host && !strcasecmp(name, host);
}
