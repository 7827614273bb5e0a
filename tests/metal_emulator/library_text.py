"""A kernel library's text as the host puts it together (src/backend/metal/source.c): the shape's
numbers as macros, then the file with its quoted includes, each once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KERNELS = ROOT / "src/backend/metal/kernels"
SHAPES = {"mini": "mini", "real": "qwen36_35b_a3b"}


@cache
def shape(name: str) -> dict[str, int]:
    """Integers of a shape header without their prefix: shape("mini")["HIDDEN"]."""
    text = (ROOT / f"src/model/shapes/{SHAPES[name]}.h").read_text(encoding="utf-8")
    found = re.findall(r"^#define SHAPE_(\w+)\s+(\d+)(?![\d.])", text, re.M)
    return {key: int(value) for key, value in found}


def _included(path: Path, done: set[Path]) -> str:
    done.add(path)
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r'#include "(?:.*/)?([^"/]+)"', line)
        if not match:
            lines.append(line)
        elif (inner := KERNELS / match.group(1)) not in done:
            lines.append(_included(inner, done))
    return "\n".join(lines) + "\n"


def library_text(file: str, shape_name: str) -> str:
    macros = "".join(f"#define SHAPE_{k} {v}\n" for k, v in shape(shape_name).items())
    common = (ROOT / "src/model/shapes/shape_common.h").read_text(encoding="utf-8")
    return macros + common + _included(KERNELS / file, set())


def enumerators(header: str) -> dict[str, int]:
    """Every enumerator and every macro that is a plain number of a header of kernels/."""
    text = (KERNELS / header).read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    values = {k: int(v) for k, v in re.findall(r"^#define (\w+)\s+(\d+)\s*$", text, re.M)}
    for body in re.findall(r"enum \w+ \{(.*?)\}", text, re.S):
        at = 0
        for item in filter(None, (i.strip() for i in body.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            at = int(value) if value.isdigit() else values[value] if value else at
            values[name] = at
            at += 1
    return values
