"""What steps cost on a card of compute capability 9.0, as the CUDA backend's own code queues them,
against the committed table bench/cuda-plan.json and the goals: more kernels, barriers, waits or
bytes than before is a failure, fewer asks for a new table (its documents are the outputs of
`COMMANDS`, in their order)."""

import json
import sys

import pytest

from conftest import ROOT

TOKENS = ("plan", "--backend", "cuda", "--depth", "0,4096,32768,131072", "--tokens",
          "1,2,64,65,512,2048,4096", "--json")
SESSIONS = ("plan", "--backend", "cuda", "--depth", "0,4096", "--sessions", "2,8,32", "--json")
COMMANDS = (TOKENS, SESSIONS)
TABLE = ROOT / "bench" / "cuda-plan.json"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is part of Linux builds")


def table():
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("which", range(len(COMMANDS)))
def test_steps_cost_what_the_table_says(lily, which):
    done = lily(*COMMANDS[which])
    assert done.returncode == 0, done.stderr
    now, then = json.loads(done.stdout), table()[which]
    for new, old in zip(now["steps"], then["steps"], strict=True):
        grown = {k: (old[k], new[k]) for k in old if new[k] > old[k]}
        assert not grown, f"{old['tokens']} tokens at depth {old['depth']} cost more: {grown}"
    assert now == then, f"fewer than before: write `lily {' '.join(COMMANDS[which])}` to {TABLE.name}"


def test_goals():
    tokens, sessions = table()
    for step in tokens["steps"]:
        assert step["host_syncs"] <= (0 if step["tokens"] == 1 else 2)
        if step["tokens"] == 1:
            assert step["kernels"] == 1 and step["of_least"] <= 1.03
        elif step["tokens"] <= 3:  # one by one, as if decoded
            assert step["kernels"] == step["tokens"]
        else:  # a chunk of any other length queues the same kernels
            assert step["kernels"] <= 16 * tokens["layers"]
            assert step["barriers"] == 0 or step["tokens"] % 64 in (1, 2, 3)  # the last few likewise
    for step in sessions["steps"]:
        assert step["host_syncs"] == 0 and step["kernels"] <= 8 * sessions["layers"]


@pytest.mark.parametrize("words, text", [
    (("--depth", "262144"), "found 1 tokens at depth 262144"),
    (("--tokens", "4097"), "expected 1 to 4096 tokens"),
    (("--tokens", "4096", "--depth", "1"), "expected at most 4095"),
    (("--sessions", "2", "--tokens", "2"), "found 2 sessions of 2 tokens"),
])
def test_impossible_questions_are_refused(lily, words, text):
    done = lily("plan", "--backend", "cuda", *words)
    assert done.returncode == 1 and text in done.stderr and done.stdout == ""
