"""What the tests of the Metal host measured on the emulated device, as one document, and the table
of docs/metal.md that is made of it.

    figures.py <figures.jsonl> <metal-emulated.json> <metal.md>   writes both
    figures.py --table <metal-emulated.json>                      prints the table
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

BEGIN, END = "<!-- figures of bench/metal-emulated.json -->", "<!-- end of figures -->"


def collect(lines: list[str]) -> dict:
    """Values of one name become their number, least and most."""
    tests: dict[str, dict] = {}
    for line in lines:
        row = json.loads(line)
        test = tests.setdefault(row["test"], {"figures": {}})
        if "seconds" in row:
            test["passed"], test["seconds"] = row["passed"], row["seconds"]
            continue
        value = row["value"]
        f = test["figures"].setdefault(row["name"], {"n": 0, "least": value, "most": value})
        f["n"] += 1
        f["least"], f["most"] = min(f["least"], value), max(f["most"], value)
    return tests


def machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return model


def document(lines: list[str]) -> dict:
    compiler = subprocess.run(["clang++-19", "--version"], capture_output=True, text=True,
                              check=True).stdout.splitlines()[0]
    source = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"],
                            capture_output=True, text=True, check=False).stdout.strip()
    tests = collect(lines)
    ended = [t for t in tests.values() if "seconds" in t]
    return {
        "command": "make metal-full",
        "complete": len(ended) == len(list(Path(__file__).parent.glob("test_*.c")))
                    and all(t["passed"] for t in ended),
        "commit": source or "unknown",
        "machine": machine(),
        "compiler": compiler,
        "seconds": sum(t["seconds"] for t in ended),
        "tests": tests,
    }


def table(doc: dict) -> str:
    def of(test: str, name: str) -> dict:
        return doc["tests"][test]["figures"][name]

    def span(test: str, name: str) -> str:
        f = of(test, name)
        return f"{f['least']:.0e} to {f['most']:.0e}"

    def most(test: str, *names: str) -> str:
        return ", ".join(str(round(of(test, name)["most"])) for name in names)

    def selftest(shape: str) -> str:
        passed = of("test_selftest", f"selftest passed, {shape}")
        worst = of("test_selftest", f"selftest worst of its limit, {shape}")["most"]
        return (f"{round(passed['least'])} items passed in each of {passed['n']} runs, the worst "
                f"at {worst:.2f} of its limit")

    rows = [
        ("KL of decoded tokens from ref", lambda: span("test_decode", "kl decoded")),
        ("KL after prompts of random tokens from ref", lambda: span("test_decode", "kl prompt")),
        ("KL behind random keys and values, 300 to 33,000 deep",
         lambda: span("test_depth", "kl at depth")),
        ("largest error of a stage in the first layers: decoded, prompt",
         lambda: f"{of('test_trace', 'stage error decoded')['most']:.0e}, "
                 f"{of('test_trace', 'stage error prompt')['most']:.0e}"),
        ("greedy text of held-out prompts: asked, parting at a near-tie, tokens of the longest",
         lambda: most("test_text", "text prompts", "text parted", "text longest")),
        ("the same with contraction: asked, parting",
         lambda: most("test_text", "text prompts contracted", "text parted contracted")),
        ("checked runs of three prompts: runs, findings",
         lambda: f"{of('test_checked', 'checked runs')['n']}, "
                 f"{most('test_checked', 'checked findings')}"),
        ("barriers of a token: all, left out one by one and found",
         lambda: most("test_checked", "barriers", "barriers left out and found")),
        ("self-test of `lily doctor`, stand-in", lambda: selftest("stand-in")),
        ("self-test, real shape, with and without contraction", lambda: selftest("real shape")),
    ]
    lines = ["| on the emulated device (`make metal-full`) | |", "|---|---|"]
    for label, value in rows:
        try:
            lines.append(f"| {label} | {value()} |")
        except KeyError:  # its program had not ended when the figures were taken
            lines.append(f"| {label} | not run to its end |")
    return "\n".join(lines)


def put_table(text: str, new: str) -> str:
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:begin]}\n{new}\n{text[end:]}"


def main() -> int:
    if sys.argv[1] == "--table":
        print(table(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))))
        return 0
    lines, bench, docs = (Path(a) for a in sys.argv[1:4])
    doc = document(lines.read_text(encoding="utf-8").splitlines())
    bench.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")
    docs.write_text(put_table(docs.read_text(encoding="utf-8"), table(doc)), encoding="utf-8")
    print(table(doc))
    return 0


if __name__ == "__main__":
    sys.exit(main())
