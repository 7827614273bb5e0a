"""The document of tests/cuda/run.sh as tables.

    report.py cuda.json [kernels.md] >report.md

Standard library alone.
"""

import json
import sys

PARTS = (
    ("mini", "the stand-in against ref"),
    ("real", "4 layers of the real shape against the CPU backend"),
    ("stages", "stages of 4 layers of the real shape against ref"),
    ("full", "a card that is full"),
    ("memcheck", "memcheck, the stand-in"),
    ("memcheck-real", "memcheck, 4 layers of the real shape"),
    ("synccheck", "synccheck, the stand-in"),
    ("racecheck", "racecheck, the stand-in"),
    ("older", "the stand-in as on a card of 8.0, from PTX"),
    ("older-real", "4 layers of the real shape as on a card of 8.0, from PTX"),
    ("long", "many tokens, the stand-in"),
    ("long-real", "many tokens, 4 layers of the real shape"),
    ("sweep", "time over prompt length, 40 layers"),
    ("speed", "speed, 40 layers"),
    ("program", "the program as a user starts it, 40 layers"),
)
# The sweep has a table of its own; a card that stands for another one tells nothing by its times.
UNTIMED = ("sweep", "older", "older-real")


def number(v):
    if v is None:
        return "none"
    return f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.4g}"


def is_check(row):
    return "limit" in row


def checks(name, rows):
    """One line for a part: how many checks, how many failed, and the one nearest its limit."""
    held = [r for r in rows if is_check(r)]
    failed = [r for r in held if not r["good"]]
    near = [r for r in held if r["limit"] > 0 and r.get("value") is not None]
    nearest = max(near, key=lambda r: r["value"] / r["limit"], default=None)
    text = f"{nearest['what']}: {number(nearest['value'])} of {number(nearest['limit'])}" if nearest else "-"
    return f"| {name} | {len(held)} | {len(failed)} | {text} |"


def main():
    with open(sys.argv[1], encoding="utf-8") as f:
        doc = json.load(f)
    print(f"# The CUDA backend on {doc['device']}\n")
    print(f"Made by `tests/cuda/report.py` from `tests/cuda/run.sh` on {doc['date']}, commit {doc['commit']}, {doc['machine']}.\n")
    if "tools" in doc:
        print(f"Tools: {doc['tools']}.\n")
    if "note" in doc:
        print(doc["note"] + "\n")
    titles = dict(PARTS)
    # A part of another run names its commit.
    names = {key: name + (f" ({doc[key]['commit']})" if "commit" in doc[key] else "") for key, name in PARTS if key in doc}
    parts = [(key, names[key], doc[key]["rows"]) for key, name in PARTS if key in doc and doc[key].get("rows")]
    print("| checks | of them | failed | nearest to its limit |\n|---|--:|--:|---|")
    for _, name, rows in parts:
        if any(is_check(r) for r in rows):
            print(checks(name, rows))
    for _, name, rows in parts:
        bad = [r for r in rows if is_check(r) and not r["good"]]
        for r in bad:
            print(f"\nFailed: {name}: {r['what']}: {number(r.get('value'))}, at most {number(r['limit'])}")
    print("\n| measured | | goal |\n|---|--:|--:|")
    for key, _, rows in parts:
        for r in rows:
            if key in UNTIMED or "unit" not in r or r["unit"] in ("of_1", "rows"):
                continue
            goal = f"at least {number(r['goal'])}" if "goal" in r else f"at most {number(r['limit'])}" if "limit" in r else ""
            missed = ", missed" if "good" in r and not r["good"] else ""
            where = "" if key in ("speed", "program") else f"{titles[key]}: "
            print(f"| {where}{r['what']} | {number(r.get('value'))} {r['unit']} | {goal}{missed} |")
    sweep = [r for r in doc.get("sweep", {}).get("rows", []) if r.get("unit") == "ms"]
    if sweep:
        print("\n| prompt of | " + " | ".join(r["what"].split()[-1] for r in sweep) + " |")
        print("|---|" + "--:|" * len(sweep))
        print("| ms | " + " | ".join(f"{r['value']:.1f}" for r in sweep) + " |")
    if len(sys.argv) > 2:
        with open(sys.argv[2], encoding="utf-8") as f:
            print("\n## Kernels of one step, 4 layers, by ncu\n\n" + f.read().rstrip())


if __name__ == "__main__":
    main()
