"""Seeded text that is hard on a tokenizer: mixed scripts, code, emoji, marks, whitespace runs."""

import random
import unicodedata

# Ranges that people write in, and the corners where splitting and normalising go wrong.
SCRIPTS = {
    "latin": [(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)],
    "greek": [(0x370, 0x3FF), (0x1F00, 0x1FFF)],
    "cyrillic": [(0x400, 0x52F)],
    "hebrew": [(0x591, 0x5F4)],
    "arabic": [(0x600, 0x6FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFC)],
    "devanagari": [(0x900, 0x97F)],
    "bengali": [(0x980, 0x9FE)],
    "tamil": [(0xB80, 0xBFA)],
    "thai": [(0xE01, 0xE5B)],
    "tibetan": [(0xF00, 0xFDA)],
    "khmer": [(0x1780, 0x17F9)],
    "hangul": [(0xAC00, 0xD7A3), (0x1100, 0x11FF)],
    "kana": [(0x3041, 0x30FF), (0xFF61, 0xFF9F)],
    "han": [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF)],
    "digits": [(0x30, 0x39), (0x660, 0x669), (0x966, 0x96F), (0x2160, 0x2188), (0x2460, 0x2473)],
    "punctuation": [(0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E), (0x2010, 0x205E)],
    "symbols": [(0x2190, 0x22FF), (0x2500, 0x25FF), (0x20A0, 0x20BF), (0x1D400, 0x1D7FF)],
    "emoji": [(0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F900, 0x1F9FF), (0x2600, 0x27BF)],
    "marks": [(0x300, 0x36F), (0x483, 0x489), (0x1AB0, 0x1ABE), (0x20D0, 0x20F0)],
    "controls": [(0x00, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF)],
    "private": [(0xE000, 0xE010), (0xFFF9, 0xFFFF), (0x10FFFE, 0x10FFFF)],
    "musical": [(0x1D15E, 0x1D164), (0x1D165, 0x1D172)],
}
SPACES = (
    " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2003\u200a\u200b\u2028\u2029\u202f\u205f\u3000"
)
PIECES = [
    "'s", "'S", "'ſ", "'re", "'RE", "'Ll", "'d", "don't", "I'M", "we'VE", "x'T", "it's.", "''s",
    "नमस्ते", "สวัสดี", "مُحَمَّد", "e\u0301", "n\u0303o", "1234567", "->", "(x):\n", "    \n\n\t x",
    "3.14159", "½", "x²", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "☃️", "한국어", "각", "ﬁ", "Å", "Å",
    "for (int i = 0; i < n; ++i) {\n        a[i] += b[i] * c;\n    }\n", "#include <stdio.h>\r\n",
    "\tdef f(self, x: int) -> str:\n\t\treturn f\"{x!r}\"\n", "SELECT * FROM t WHERE a >= 'b''c';",
    '{"key": [1, 2.5e-3, null, "\\u00e9"], "z": {}}', "<div class=\"a\">&nbsp;</div>\n\n\n",
    "https://example.org/a_b?c=d&e=%20f#g", "$x_{i+1}^2 \\alpha \\le \\infty$", "```c\n\n\n```",
    "snake_case CamelCase kebab-case SCREAMING_CASE", "0xDEADBEEF", "1e-10", "    ", "\r\n\r\n",
    "The quick brown fox jumps over the lazy dog. ", "Größe, naïve, Ångström; œuvre! ",
]


def text(seed, length):
    """About `length` characters. Only code points of Unicode 3.2, which Python ships as ucd_3_2_0:
    every library agrees about those; later ones are compared one by one in the tests."""
    rng = random.Random(seed)
    old = unicodedata.ucd_3_2_0
    points = {
        name: [c for lo, hi in ranges for c in range(lo, hi + 1) if old.category(chr(c)) != "Cn"]
        for name, ranges in SCRIPTS.items()
    }
    names = [n for n in points if points[n]]
    out, size = [], 0
    while size < length:
        kind = rng.random()
        if kind < 0.35:
            script = points[rng.choice(names)]
            part = "".join(chr(rng.choice(script)) for _ in range(rng.randint(1, 12)))
        elif kind < 0.45:
            part = "".join(chr(rng.choice(points[rng.choice(names)])) for _ in range(8))
        elif kind < 0.65:
            part = "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 6)))
        elif kind < 0.75:
            part = rng.choice(" \t\n") * rng.randint(1, 40)
        elif kind < 0.85:
            part = rng.choice("abcdeghilmnorstuw") + "".join(
                chr(rng.choice(points["marks"])) for _ in range(rng.randint(1, 5))
            )
        else:
            part = rng.choice(PIECES)
        out.append(part)
        size += len(part)
    return "".join(out)[:length]
