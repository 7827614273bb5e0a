"""The executor seen from Python: the structs of executor.h and a few lines around them."""

from __future__ import annotations

import ctypes as c
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools" / "metal_emulator"))

from frontend import build as front_end  # noqa: E402

HEADER = (ROOT / "tools/metal_emulator/executor/executor.h").read_text(encoding="utf-8")
FAULTS = re.findall(r"MSL_FAULT_(\w+)", HEADER.split("msl_fault_kind {")[1].split("}")[0])
MAX_BUFFERS = 31


class CompileOptions(c.Structure):
    _fields_ = [
        ("checked", c.c_bool),
        ("contract", c.c_bool),
        ("defines", c.c_char_p),
        ("tool_root", c.c_char_p),
        ("cache_dir", c.c_char_p),
        ("language", c.c_uint32),
    ]


class Binding(c.Structure):
    _fields_ = [
        ("kind", c.c_int),
        ("access", c.c_int),
        ("index", c.c_uint32),
        ("element_size", c.c_uint32),
        ("reference", c.c_bool),
        ("name", c.c_char_p),
    ]


class KernelInfo(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("bindings", c.POINTER(Binding)),
        ("binding_count", c.c_size_t),
        ("max_threads", c.c_uint32),
    ]


class ConstantValue(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("index", c.c_uint32),
        ("size", c.c_uint32),
        ("value", c.c_void_p),
    ]


class Size(c.Structure):
    _fields_ = [("x", c.c_uint32), ("y", c.c_uint32), ("z", c.c_uint32)]


class Buffer(c.Structure):
    _fields_ = [("base", c.c_void_p), ("length", c.c_size_t), ("offset", c.c_size_t)]


class Dispatch(c.Structure):
    _fields_ = [
        ("grid", Size),
        ("group", Size),
        ("buffers", Buffer * MAX_BUFFERS),
        ("tg_length", c.c_uint32 * 31),
        ("seed", c.c_uint64),
    ]


class FaultInfo(c.Structure):
    _fields_ = [
        ("kind", c.c_int),
        ("kernel", c.c_char_p),
        ("line", c.c_uint32),
        ("buffer", c.c_int32),
        ("offset", c.c_uint64),
        ("group", c.c_uint32 * 3),
        ("thread", c.c_uint32),
        ("other", c.c_int64),
        ("other_group", c.c_uint32),
        ("count", c.c_uint64),
        ("text", c.c_char * 192),
    ]


class Range(c.Structure):
    _fields_ = [("begin", c.c_uint64), ("end", c.c_uint64)]


class UsageInfo(c.Structure):
    _fields_ = [
        ("index", c.c_uint32),
        ("bytes_read", c.c_uint64),
        ("bytes_written", c.c_uint64),
        ("read", c.POINTER(Range)),
        ("written", c.POINTER(Range)),
        ("read_count", c.c_size_t),
        ("written_count", c.c_size_t),
        ("unique_read", c.c_uint64),
        ("unique_written", c.c_uint64),
    ]


class ReportInfo(c.Structure):
    _fields_ = [
        ("faults", c.POINTER(FaultInfo)),
        ("fault_count", c.c_size_t),
        ("usage", c.POINTER(UsageInfo)),
        ("usage_count", c.c_size_t),
        ("threads", c.c_uint64),
        ("groups", c.c_uint64),
        ("group_barriers", c.c_uint64),
        ("simd_barriers", c.c_uint64),
        ("simd_operations", c.c_uint64),
        ("tg_static", c.c_uint32),
        ("tg_dynamic", c.c_uint32),
    ]


@dataclass(frozen=True)
class Fault:
    kind: str  # as in executor.h, without MSL_FAULT_
    line: int
    buffer: int
    offset: int
    text: str


@dataclass(frozen=True)
class Usage:
    read: list[tuple[int, int]]
    written: list[tuple[int, int]]
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Report:
    faults: list[Fault]
    usage: dict[int, Usage]
    threads: int
    groups: int
    group_barriers: int
    tg_static: int
    simd_operations: int

    def kinds(self) -> set[str]:
        return {f.kind for f in self.faults}


def _executor() -> c.CDLL:
    lib = c.CDLL(str(front_end.build_executor()))
    lib.msl_library_find.restype = c.POINTER(KernelInfo)
    return lib


def _ranges(ranges: c.POINTER(Range), count: int) -> list[tuple[int, int]]:
    return [(ranges[i].begin, ranges[i].end) for i in range(count)]


def _report(info: ReportInfo) -> Report:
    faults = [
        Fault(FAULTS[f.kind], f.line, f.buffer, f.offset, f.text.decode())
        for f in info.faults[: info.fault_count]
    ]
    usage = {
        u.index: Usage(
            _ranges(u.read, u.read_count),
            _ranges(u.written, u.written_count),
            u.bytes_read,
            u.bytes_written,
        )
        for u in info.usage[: info.usage_count]
    }
    counts = (info.threads, info.groups, info.group_barriers, info.tg_static,
              info.simd_operations)  # fmt: skip
    return Report(faults, usage, *counts)


class Library:
    """A compiled source; compiled anew only when the source or the tools have changed."""

    def __init__(
        self, source: str, checked: bool = True, contract: bool = False, language: int = 0
    ) -> None:
        self.lib = _executor()
        self.handle = c.c_void_p()
        self.message = c.create_string_buffer(8192)
        options = CompileOptions(checked, contract, None, None, None, language)
        code = self.lib.msl_library_compile(
            source.encode(), c.byref(options), c.byref(self.handle), self.message
        )
        if code:
            raise RuntimeError(self.message.value.decode())

    def kernel(self, name: str) -> KernelInfo:
        return self.lib.msl_library_find(self.handle, name.encode()).contents

    def pipeline(self, kernel: str, constants: dict[str, np.generic] | None = None) -> c.c_void_p:
        constants = constants or {}
        arrays = [np.asarray(v) for v in constants.values()]
        values = (ConstantValue * len(arrays))(
            *[
                ConstantValue(name.encode(), 0, a.nbytes, a.ctypes.data)
                for name, a in zip(constants, arrays)
            ]
        )
        pipeline = c.c_void_p()
        code = self.lib.msl_pipeline_create(
            self.handle, kernel.encode(), values, c.c_size_t(len(arrays)), c.byref(pipeline),
            self.message,
        )  # fmt: skip
        if code:
            raise RuntimeError(self.message.value.decode())
        return pipeline

    def run(
        self,
        kernel: str,
        grid: tuple[int, ...],
        group: tuple[int, ...],
        buffers: dict[int, np.ndarray],
        seed: int = 0,
        tg: dict[int, int] | None = None,
        constants: dict[str, np.generic] | None = None,
        offsets: dict[int, int] | None = None,
    ) -> Report:
        """Runs `kernel` on arrays, which it changes in place."""
        pad = (1, 1)
        dispatch = Dispatch(Size(*(*grid, *pad)[:3]), Size(*(*group, *pad)[:3]), seed=seed)
        for index, array in buffers.items():
            offset = (offsets or {}).get(index, 0)
            dispatch.buffers[index] = Buffer(array.ctypes.data, array.nbytes, offset)
        for index, length in (tg or {}).items():
            dispatch.tg_length[index] = length
        pipeline = self.pipeline(kernel, constants)
        report = c.POINTER(ReportInfo)()
        code = self.lib.msl_dispatch_run(
            pipeline, c.byref(dispatch), c.byref(report), self.message
        )
        if code:
            raise RuntimeError(self.message.value.decode())
        result = _report(report.contents)
        self.lib.msl_report_free(report)
        self.lib.msl_pipeline_free(pipeline)
        return result
