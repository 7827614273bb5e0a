"""Compiles MSL source to a shared object of kernels, and the executor; both cached by hash.

usage: python3 -m frontend.build [--checked] [--contract] [--language 310|320|400] [--cache DIR]
                                 [-D NAME=VALUE]... FILE
prints the path of the shared object; diagnostics go to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .rewrite import rewrite
from .tokens import MslError

CLANG = "clang++-19"
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT.parent.parent / "build" / "metal_emulator" / "cache"
_MARCH = "-march=x86-64-v3"
# Begins a text that somebody else wrote, by other rules: no lint, and buffers without an index.
FOREIGN = "#pragma msl_foreign\n"

_COMMON = [
    _MARCH, "-fPIC", "-fvisibility=hidden", "-fconvergent-functions",
    "-fno-lax-vector-conversions", "-fno-exceptions", "-fno-rtti", "-gline-tables-only",
    "-nostdinc", "-ffreestanding", "-fbuiltin",
    # Half expressions round at every step, as on the device, not once at the end.
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-Wno-everything", "-Werror=uninitialized", "-Werror=sometimes-uninitialized",
    "-Werror=return-type", "-Werror=array-bounds",
]  # fmt: skip
_FAST = ["-O2"]
_CHECKED = [
    "-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=thread",
    # By default a read before a write of the same place is not reported; here it may be the fault.
    "-mllvm", "-tsan-instrument-read-before-write=1",
    "-ftrivial-auto-var-init=pattern", "-DMSL_CHECKED",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    checked: bool = False
    contract: bool = False
    language: int = 0  # of Metal: 310 is version 3.1; 0: 400 for a text with tensors, else 310
    defines: tuple[str, ...] = ()
    cache: Path = CACHE


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MslError(done.stderr.strip() or f"{command[0]} failed without a word")
    return done.stdout


def _language(source: str, options: Options) -> int:
    return options.language or (400 if "<metal_tensor>" in source else 310)


def preprocess(source: str, options: Options) -> str:
    """The text after clang's preprocessor, with line marks that name kernel.metal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.metal"
        path.write_text(source, encoding="utf-8")
        command = [CLANG, "-E", "-x", "c++", "-std=c++17", "-nostdinc"]
        command += [f"-I{ROOT / 'shim/include'}"]
        language = _language(source, options)
        command += ["-D__METAL__", f"-D__METAL_VERSION__={language}", "-D__HAVE_BFLOAT__"]
        if language >= 400:
            command += ["-D__HAVE_TENSOR__"]
        command += [f"-D{d}" for d in options.defines]
        try:
            return _run(command + [str(path)]).replace(str(path), "kernel.metal")
        except MslError as error:
            raise MslError(str(error).replace(str(path), "kernel.metal")) from None


def translate(source: str, options: Options) -> str:
    """C++ text ready for clang."""
    preprocessed = preprocess(source, options)
    text = rewrite(preprocessed, None if source.startswith(FOREIGN) else _language(source, options))
    headers = ["metal_shim"]
    # Left in the text by the headers of shim/include that go beyond metal_stdlib.
    headers += [h for h in ("tensor", "matmul") if f"#pragma msl_{h}\n" in preprocessed]
    includes = "".join(f'#include "{ROOT / "shim" / header}.h"\n' for header in headers)
    return f'{includes}#line 1 "kernel.metal"\n{text}'


def _standard(source: str, options: Options) -> str:
    """Descriptors of Metal 4 are template arguments of class type, which C++ has since 20."""
    return "-std=c++20" if _language(source, options) >= 400 else "-std=c++17"


def check_address_spaces(source: str, options: Options = Options()) -> None:
    """Raises MslError where a pointer changes its address space."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.metal"  # as in the line marks: debug data may name either
        path.write_text(translate(source, options), encoding="utf-8")
        flags = [_standard(source, options), *(f for f in _COMMON if f != "-fPIC")]
        _run([CLANG, *flags, "-DMSL_CHECK_ADDRESS_SPACES", "-fsyntax-only", "-x", "c++", str(path)])


def _tool_files() -> list[Path]:
    folders = ("frontend", "shim", "executor")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.is_file()]
    return sorted(p for p in files if "__pycache__" not in p.parts)


def _hash(*parts: str) -> str:
    digest = hashlib.sha256(_run([CLANG, "--version"]).encode())
    for path in _tool_files():
        digest.update(path.read_bytes())
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:32]


def _publish(command: list[str], target: Path) -> Path:
    """Runs a command that writes its last argument; the file appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        _run(command + ["-o", str(partial)])
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def build_executor(cache: Path = CACHE) -> Path:
    """The executor as a shared object; kernel libraries link against it by its soname."""
    folder = cache / f"executor-{_hash('executor')}"
    target = folder / "libmsl_executor.so"
    if target.exists():
        return target
    sources = sorted(str(p) for p in (ROOT / "executor").glob("*.cpp"))
    command = [CLANG, "-std=c++17", "-O2", "-g", _MARCH, "-fPIC", "-shared", "-Wall", "-Wextra"]
    command += ["-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
    command += [f'-DMSL_TOOL_ROOT="{ROOT}"', "-Wl,-soname,libmsl_executor.so", *sources, "-ldl"]
    return _publish(command, target)


def build(source: str, options: Options = Options()) -> Path:
    """Path of the shared object for `source`; raises MslError with the source's line numbers."""
    executor = build_executor(options.cache)
    flags = [_standard(source, options), *_COMMON, *(_CHECKED if options.checked else _FAST)]
    flags.append("-ffp-contract=fast" if options.contract else "-ffp-contract=off")
    target = options.cache / f"{_hash(source, str(options.language), *flags, *options.defines)}.so"
    if target.exists():
        return target
    text = translate(source, options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.metal"  # as in the line marks: debug data may name either
        path.write_text(text, encoding="utf-8")
        unit = Path(folder) / "kernel.o"
        _run([CLANG, *flags, "-x", "c++", "-c", str(path), "-o", str(unit)])
        # No runtime of the sanitizer: its entry points are the executor's.
        link = [CLANG, "-shared", "-nostdlib", str(unit), str(executor), "-lm"]
        return _publish(link, target)


def main() -> int:
    parser = argparse.ArgumentParser(prog="frontend.build", description=__doc__)
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--contract", action="store_true")
    parser.add_argument("--language", type=int, default=0, choices=[310, 320, 400])
    parser.add_argument("--address-spaces", action="store_true", help="check only, build nothing")
    parser.add_argument("--print", action="store_true", help="print the C++ text, build nothing")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("-D", dest="defines", action="append", default=[])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    options = Options(
        args.checked, args.contract, args.language, tuple(args.defines), args.cache
    )
    try:
        source = args.file.read_text(encoding="utf-8")
        if args.print:
            print(translate(source, options))
        elif args.address_spaces:
            check_address_spaces(source, options)
        else:
            print(build(source, options))
    except MslError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
