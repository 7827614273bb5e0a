"""Write a part of the held-out tasks as JSON lines, for tests of the engine on the stand-in.

    heldout.py --corpus C.xz OUT.jsonl

Each line: task, thinking, messages and tools as a chat request has them, and the expected content
and tool calls of the answer (greedy).
"""

import argparse
import collections
import json

import dataset

SHARE = {"edit": 100, "json": 50, "tool": 40, "tool result": 24, "math": 40, "engine": 192, "notool": 16, "talk": 20}


def turn(m, ident):
    """A message as a chat request has it."""
    out = {"role": m["role"], "content": m["content"]}
    if m["role"] == "assistant" and m.get("reasoning"):
        out["reasoning_content"] = m["reasoning"]
    if m.get("calls"):
        out["tool_calls"] = [
            {"id": f"call_{ident}_{i}", "type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)}}
            for i, c in enumerate(m["calls"])
        ]
    return out


def conversation(messages, thinking):
    out, open_calls = [], []
    for i, m in enumerate(messages):
        t = turn(m if thinking else {**m, "reasoning": ""}, i)
        if m["role"] == "tool":
            t["tool_call_id"] = open_calls.pop(0)
        open_calls += [c["id"] for c in t.get("tool_calls", [])]
        out.append(t)
    return out


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("out")
    ap.add_argument("--corpus", required=True)
    args = ap.parse_args()
    seen = collections.Counter()
    with open(args.out, "w", encoding="utf-8") as f:
        for t in dataset.heldout(dataset.read_corpus(args.corpus), 200):
            seen[t["task"]] += 1
            if seen[t["task"]] > SHARE[t["task"]]:
                continue
            line = {"task": t["task"], "thinking": t["thinking"], "messages": conversation(t["messages"], t["thinking"])}
            if t["tools"]:
                line["tools"] = t["tools"]
            line["content"] = t["want"]["content"]
            line["tool_calls"] = t["want"].get("calls") or []
            f.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
