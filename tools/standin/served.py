"""Ask a running `lily serve` held-out tasks, greedily, and count exact matches.

    served.py --corpus C.xz --url http://127.0.0.1:8080 [--task edit] [--per-task N] [--seed S] [--json OUT]

The same tasks as evaluate.py draws, asked as a chat client would ask them.
"""

import argparse
import collections
import json
import pathlib
import urllib.request

import dataset
import heldout


def answer(url, task, room):
    """(content, calls, finish reason) of the server's answer."""
    body = {"model": "mini", "messages": heldout.conversation(task["messages"], task["thinking"]), "temperature": 0, "max_tokens": room,
            "chat_template_kwargs": {"enable_thinking": task["thinking"]}}
    if task["tools"]:
        body["tools"] = task["tools"]
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        choice = json.load(reply)["choices"][0]
    said = choice["message"]
    calls = [{"name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])} for c in said.get("tool_calls") or []]
    return said.get("content") or "", calls, choice["finish_reason"]


def score(url, tasks, room):
    """(figures, what went wrong) over the tasks."""
    right, kinds = (collections.defaultdict(lambda: [0, 0]) for _ in range(2))
    ended, wrong = 0, []
    for t in tasks:
        content, calls, finish = answer(url, t, room)
        want = t["want"]
        good = (content.strip(), calls) == (want["content"].strip(), want.get("calls") or [])
        for count in [right[t["task"]]] + ([] if t["task"] == "engine" else [kinds[f"{t['task']}/{t['sub']}"]]):
            count[0] += good
            count[1] += 1
        ended += finish in ("stop", "tool_calls")
        if not good:
            wrong.append({"task": t["task"], "sub": t["sub"], "asked": t["messages"][-1]["content"], "want": want["content"], "got": content, "calls": calls})
    figures = {"exact match": {k: round(g / n, 4) for k, (g, n) in sorted(right.items())}, "right and asked": dict(sorted(right.items())),
               "ends its turn": round(ended / len(tasks), 4), "right and asked, by kind": dict(sorted(kinds.items()))}
    return figures, wrong


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--url", default="http://127.0.0.1:8080")
    ap.add_argument("--per-task", type=int, default=200)
    ap.add_argument("--seed", type=int, default=990001, help="of the held-out tasks")
    ap.add_argument("--task", help="this task alone")
    ap.add_argument("--room", type=int, default=400, help="tokens an answer may have")
    ap.add_argument("--json")
    ap.add_argument("--wrong", help="write the wrong answers here")
    args = ap.parse_args()
    tasks = [t for t in dataset.heldout(dataset.read_corpus(args.corpus), args.per_task, args.seed) if args.task in (None, t["task"])]
    figures, wrong = score(args.url.rstrip("/"), tasks, args.room)
    print(json.dumps(figures), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    if args.wrong:
        pathlib.Path(args.wrong).write_text(json.dumps(wrong, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
