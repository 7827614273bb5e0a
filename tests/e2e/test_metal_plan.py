"""The Metal backend's recorded steps against the committed table bench/metal-plan.json and the
goals: more kernels, stages, barriers or bytes than before is a failure, fewer asks for a new table
(the command is in `COMMAND`, its output is the file)."""

import json
import subprocess
import sys

from conftest import ROOT

COMMAND = ("plan", "--backend", "metal", "--depth", "0,4096,32768,131072", "--tokens",
           "1,2,64,512,2048", "--json")
TABLE = ROOT / "bench" / "metal-plan.json"


def test_steps_cost_what_the_table_says(lily):
    done = lily(*COMMAND)
    assert done.returncode == 0, done.stderr
    now, then = json.loads(done.stdout), json.loads(TABLE.read_text(encoding="utf-8"))
    for new, old in zip(now["steps"], then["steps"], strict=True):
        grown = {k: (old[k], new[k]) for k in old if new[k] > old[k]}
        assert not grown, f"{old['tokens']} tokens at depth {old['depth']} cost more: {grown}"
    assert now == then, f"fewer than before: write `lily {' '.join(COMMAND)}` to {TABLE.name}"


def test_documentation_shows_what_was_measured():
    bench, docs = ROOT / "bench" / "metal-emulated.json", ROOT / "docs" / "metal.md"
    script = ROOT / "tests" / "metal_host" / "figures.py"
    table = subprocess.run([sys.executable, script, "--table", bench], capture_output=True,
                           text=True, check=True).stdout.strip()
    assert table in docs.read_text(encoding="utf-8"), "run `make metal-full`, which writes both"


def test_goals():
    steps = json.loads(TABLE.read_text(encoding="utf-8"))["steps"]
    tokens = [s for s in steps if s["tokens"] == 1]
    assert len(tokens) == 4
    for step in tokens:
        assert step["kernels"] <= 350 and step["stages"] <= 260
        assert step["of_least"] <= 1.03
    for step in steps:
        assert step["command_buffers"] == 1 and step["host_syncs"] == 0
