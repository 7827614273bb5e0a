"""A profiler's list of kernels as a table: what each stage of a step takes, and what limits it.

    kernel_table.py NCU.csv

NCU.csv is what `ncu --csv --page raw` writes about `cuda-check steps` (tests/cuda/run.sh). Kernels of
one name in one step are one line. Standard library alone.
"""

import csv
import re
import sys

# In the order of steps_for_profiler (checks_speed.c).
STEPS = ("prompt of 4,096", "decode of 1", "decode of 8", "decode of 32")
FIRST = ("embed", "decode_step")  # kernels that begin a step
PLAIN_READ = 4642  # GB/s, a plain read of 20 GB on an H200
UNIT_SHARES = (
    ("tensor", "tensor cores", "sm__pipe_tensor_cycles_active"),
    ("issue", "instructions issued", "sm__issue_active"),
    ("shared", "shared memory and first cache", "l1tex__data_pipe_lsu_wavefronts"),
    ("L2", "second cache", "lts__t_sectors"),
)
WARPS = "sm__warps_active"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
# What a warp that issues nothing waits for; the rest by its own name.
WAITS = {
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory",
    "barrier": "a barrier",
    "wait": "the instruction before",
    "math_pipe_throttle": "an arithmetic unit",
    "gmma": "a product",
    "no_instruction": "instructions",
    "lg_throttle": "the queue to memory",
    "mio_throttle": "the queue to shared memory",
    "imc_miss": "constants",
    "membar": "a fence",
    "branch_resolving": "a branch",
}
UNITS = {"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


KINDS = ("sum", "ratio", "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active")


def read(path):
    """[(kernel, {metric: value in seconds, bytes or percent})] in order of launch."""
    with open(path, encoding="utf-8", newline="") as f:
        lines = [line for line in f if line.startswith('"')]
    rows = list(csv.reader(lines))
    names, units = rows[0], rows[1]
    kernel = names.index("Kernel Name")
    out = []
    for row in rows[2:]:
        values = {}
        for name, unit, text in zip(names, units, row):
            what, _, kind = name.partition(".")
            if text and kind in KINDS:
                values[what] = float(text.replace(",", "")) * UNITS.get(unit, 1)
        out.append((row[kernel].split("(")[0].split("<")[0].split("::")[-1].strip(), values))
    return out


def steps(launches):
    """Launches cut where a step begins."""
    out = []
    for kernel, values in launches:
        if kernel.startswith(FIRST):
            out.append([])
        if out:
            out[-1].append((kernel, values))
    return out


def mean(calls, name):
    """Weighted by time, so that short calls do not count as much as long ones."""
    known = [(v[name], v["gpu__time_duration"]) for v in calls if name in v]
    return sum(x * t for x, t in known) / sum(t for _, t in known) if known else None


def waits(calls):
    """The one or two reasons for which most warps issue nothing, with their shares."""
    names = {name for v in calls for name in v if STALL.fullmatch(name)}
    stalls = {STALL.fullmatch(name)[1]: mean(calls, name) for name in names}
    for ready in ("selected", "not_selected"):
        stalls.pop(ready, None)
    total = sum(stalls.values())
    most = sorted(stalls.items(), key=lambda s: -s[1])[:2]
    most = [(WAITS.get(name, name), x / total) for name, x in most if total and x / total >= 0.2]
    return ", ".join(f"{what} {x:.0%}" for what, x in most)


def limit(shares, calls):
    """The unit that is busy for most of the time, or else what warps wait for."""
    share, what = max((s for s in shares if s[0] is not None), default=(0, ""))
    reasons = waits(calls)
    if share >= 60:
        return what
    return f"waiting for {reasons}" if reasons else "waiting"


def table(step):
    """Lines of one step, longest first."""
    kernels = {}
    for kernel, values in step:
        kernels.setdefault(kernel, []).append(values)
    total = sum(v["gpu__time_duration"] for _, v in step)
    heads = ("us a call", "of the step", "MB a call", "GB/s", "of a plain read", *(f"{u[0]} %" for u in UNIT_SHARES), "warps %")
    yield "| kernel | calls | " + " | ".join(heads) + " | limit |"
    yield "|---|" + "--:|" * (1 + len(heads)) + "---|"
    for kernel, calls in sorted(kernels.items(), key=lambda k: -sum(v["gpu__time_duration"] for v in k[1])):
        seconds = sum(v["gpu__time_duration"] for v in calls)
        if seconds < 0.005 * total:
            continue
        moved = sum(v.get("dram__bytes_read", 0) + v.get("dram__bytes_write", 0) for v in calls)
        rate = moved / seconds * 1e-9
        shares = [(mean(calls, name), what) for _, what, name in UNIT_SHARES]
        cells = [kernel, len(calls), f"{seconds / len(calls) * 1e6:.1f}", f"{seconds / total:.1%}", f"{moved / len(calls) * 1e-6:.1f}", f"{rate:.0f}", f"{rate / PLAIN_READ:.0%}"]
        cells += ["" if s is None else f"{s:.0f}" for s in (*(s for s, _ in shares), mean(calls, WARPS))]
        cells.append(limit([*shares, (100 * rate / PLAIN_READ, "memory")], calls))
        yield "| " + " | ".join(str(c) for c in cells) + " |"


def main():
    found = steps(read(sys.argv[1]))
    if len(found) != len(STEPS):
        sys.exit(f"{sys.argv[1]}: found {len(found)} steps, expected {len(STEPS)}")
    for name, step in zip(STEPS, found):
        total = sum(v["gpu__time_duration"] for _, v in step)
        print(f"**{name}**: {len(step)} launches, {total * 1e3:.3f} ms in kernels\n")
        print("\n".join(table(step)) + "\n")


if __name__ == "__main__":
    main()
