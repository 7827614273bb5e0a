/* Unicode normalisation form C, in linear time, by utf8proc's version of Unicode. The Rust library
 * that tokenizers are trained with has Unicode 9's tables (seen with tokenizers 0.23.3): of the 98
 * combining marks added since up to Unicode 14 it knows no class, so that where one of them meets
 * another mark the two may order or compose differently, and ids with them. */
#ifndef LILY_TEXT_NFC_H
#define LILY_TEXT_NFC_H

#include "base/buf.h"

/* Appends text[n] (valid UTF-8) in NFC to out. LILY_ENOMEM or LILY_EINVAL (text over 1 GiB). */
int nfc_append(const char *text, size_t n, struct buf *out, lily_err *err);

/* Whether text[n] is in NFC by a test that looks at single code points only: false means that
 * nfc_append is needed to find out. */
bool nfc_is_plain(const char *text, size_t n);

#endif
