/* UTF-8 as the text layer needs it: validation, decoding of valid text, Python's whitespace. */
#ifndef LILY_TEXT_UTF8_H
#define LILY_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The offset of the first byte that is not part of valid UTF-8 (no surrogates, no overlong forms,
 * nothing above U+10FFFF), or n when all of text[n] is valid. */
size_t utf8_invalid_at(const char *text, size_t n);

/* Decodes the code point at text, which must be valid UTF-8 and not at its end; its length in
 * bytes goes to *len. */
uint32_t utf8_decode(const char *text, size_t *len);

/* Narrows [*begin, *end) of valid UTF-8 by the whitespace that Python's str.strip() removes. */
void utf8_strip(const char *text, size_t *begin, size_t *end);

#endif
