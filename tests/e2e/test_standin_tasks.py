"""The stand-in's held-out tasks, asked through the server as a client would: exact match, greedy,
4-bit weights. models/mini/README.md has its scores on more prompts."""

import collections
import json

import pytest

from conftest import ROOT
from server_fixtures import Server

# What the model was trained for.
GOALS = {"edit": 0.95, "tool": 0.90, "tool result": 0.90, "json": 0.90, "math": 0.80, "engine": 0.80}
TASKS = ROOT / "tests/standin/heldout.jsonl"


def answer(client, task):
    """What the model says to a task: (content, calls, finish reason)."""
    body = {"model": "mini", "messages": task["messages"], "temperature": 0, "max_tokens": 400}
    if "tools" in task:
        body["tools"] = task["tools"]
    choice = client.chat.completions.create(
        **body, extra_body={"chat_template_kwargs": {"enable_thinking": task["thinking"]}}).choices[0]
    calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments)}
             for c in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


@pytest.fixture(scope="module")
def scores(lily, trained):
    """Task -> [right, asked], and how many answers ended their turn, over all held-out tasks."""
    right = collections.defaultdict(lambda: [0, 0])
    server = Server([lily.path, "serve", "--port", "0", "--quiet"], r"127\.0\.0\.1:(\d+)")
    ended = []
    with server.client() as client, TASKS.open(encoding="utf-8") as lines:
        for line in lines:
            task = json.loads(line)
            content, calls, finish = answer(client, task)
            score = right[task["task"]]
            score[0] += (content.strip(), calls) == (task["content"].strip(), task["tool_calls"])
            score[1] += 1
            ended.append(finish in ("stop", "tool_calls"))
    server.end()
    print(f"\n{'task':12} right asked")
    for name, (n, asked) in sorted(right.items()):
        print(f"{name:12} {n:5} {asked:5}  {n / asked:.3f}")
    return right, ended


@pytest.mark.parametrize("task", GOALS)
def test_task(scores, task):
    right, asked = scores[0][task]
    assert right / asked >= GOALS[task], f"{right} of {asked}"


def test_ends_its_turns(scores):
    ended = scores[1]
    assert sum(ended) / len(ended) >= 0.99
