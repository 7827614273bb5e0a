"""Names of Metal's own types, and those that a text declares."""

from __future__ import annotations

from .tokens import TokenList

SCALARS = "char uchar short ushort int uint long ulong half bfloat float".split()
VECTORS = {f"{s}{n}" for s in SCALARS for n in (2, 3, 4)}
MATRICES = {f"{s}{c}x{r}" for s in ("float", "half") for c in (2, 3, 4) for r in (2, 3, 4)}
PACKED = {f"packed_{v}" for v in VECTORS}
FIXED = {f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)}
ATOMICS = {f"atomic_{t}" for t in ("int", "uint", "float")}
FRAGMENTS = {f"simdgroup_{t}8x8" for t in ("half", "bfloat", "float")}
TEMPLATES = {"vec", "packed_vec", "matrix", "simdgroup_matrix", "atomic", "tensor",
             "cooperative_tensor", "array"}  # fmt: skip
ALL = {"bool", "size_t", "ptrdiff_t", *SCALARS, *VECTORS, *MATRICES, *PACKED, *FIXED, *ATOMICS,
       *FRAGMENTS}  # fmt: skip
ADDRESS_SPACES = {"device", "constant", "threadgroup", "thread"}


def aliases(t: TokenList) -> set[str]:
    """Template parameters, and names that using and typedef give."""
    found = set()
    for i in range(len(t)):
        if t.text(i) in ("typename", "class") and t.text(i - 1) in ("<", ","):
            found.add(t.text(i + 1))
        elif t.text(i) == "using" and t.text(i + 2) == "=":
            found.add(t.text(i + 1))
        elif t.text(i) == "typedef":
            end = i
            while t.text(end) not in (";", "{"):
                end += 1
            if t.text(end) == ";" and t.kind(end - 1) == "name":
                found.add(t.text(end - 1))
    return found


def classes(t: TokenList) -> set[str]:
    words = ("struct", "class", "union")
    return {
        t.text(i + 1)
        for i in range(len(t))
        if t.text(i) in words and t.text(i - 1) not in ("<", ",") and t.kind(i + 1) == "name"
    }
