"""A profiler's list of kernels as a table: what each stage of a step takes, and what limits it.

    kernel_table.py NCU.csv

NCU.csv is what `ncu --csv --page raw` writes about `cuda-check steps` (tests/cuda/run.sh). Kernels of
one name in one step are one line. Standard library alone.
"""

import csv
import sys

# In the order of steps_for_profiler (checks_speed.c).
STEPS = ("prompt of 4,096", "decode of 1", "decode of 8", "decode of 32")
FIRST = ("embed", "decode_step")  # kernels that begin a step
PLAIN_READ = 4642  # GB/s, a plain read of 20 GB on an H200
COUNTERS = (
    ("tensor", "tensor cores", ("sm__pipe_tensor_cycles_active",)),
    ("issue", "instructions issued", ("sm__issue_active",)),
    ("L1", "first cache and shared memory", ("l1tex__throughput",)),
    ("L2", "second cache", ("lts__throughput",)),
    ("memory", "memory", ("dram__throughput",)),
)
UNITS = {"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


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
            if text and kind in ("sum", "avg.pct_of_peak_sustained_elapsed"):
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


def first_of(values, candidates):
    return next((values[c] for c in candidates if c in values), None)


def limit(shares):
    """The unit that is busiest, where any is busy at all."""
    known = [(share, what) for share, what in shares if share is not None]
    share, what = max(known, default=(0, ""))
    if share >= 60:
        return what
    return f"waiting; {what} {share:.0f} %" if share >= 30 else "waiting"


def table(step):
    """Lines of one step, longest first."""
    kernels = {}
    for kernel, values in step:
        kernels.setdefault(kernel, []).append(values)
    total = sum(v["gpu__time_duration"] for _, v in step)
    yield "| kernel | calls | us a call | of the step | MB a call | GB/s | of a plain read | " + " | ".join(f"{c[0]} %" for c in COUNTERS[:4]) + " | limit |"
    yield "|---|--:|--:|--:|--:|--:|--:|" + "--:|" * 4 + "---|"
    for kernel, calls in sorted(kernels.items(), key=lambda k: -sum(v["gpu__time_duration"] for v in k[1])):
        seconds = sum(v["gpu__time_duration"] for v in calls)
        moved = sum(v.get("dram__bytes_read", 0) + v.get("dram__bytes_write", 0) for v in calls)
        shares = []
        for _, what, candidates in COUNTERS:
            # Weighted by time, so that short calls do not count as much as long ones.
            parts = [(first_of(v, candidates), v["gpu__time_duration"]) for v in calls]
            known = [(s, t) for s, t in parts if s is not None]
            shares.append((sum(s * t for s, t in known) / sum(t for _, t in known) if known else None, what))
        if seconds < 0.005 * total:
            continue
        rate = moved / seconds * 1e-9
        cells = [kernel, len(calls), f"{seconds / len(calls) * 1e6:.1f}", f"{seconds / total:.1%}", f"{moved / len(calls) * 1e-6:.1f}", f"{rate:.0f}", f"{rate / PLAIN_READ:.0%}"]
        cells += ["" if s is None else f"{s:.0f}" for s, _ in shares[:4]] + [limit(shares)]
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
