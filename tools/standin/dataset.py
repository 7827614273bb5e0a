"""The mixture: dialogues and plain text, tokenised and packed into rows.

A batch is four arrays: ids and loss weights [rows, length], positions within the document
[rows, length], and the bounds of all documents in the flattened batch.
"""

import json
import lzma
import pathlib
import random
import re
import zlib

import numpy as np
from tokenizers import Tokenizer

import chat
import pools
import task_edit
import task_json
import task_math
import task_talk
import task_tool

HERE = pathlib.Path(__file__).parent
PAD = "<|endoftext|>"
PROMPT_WEIGHT, TEXT_WEIGHT = 0.05, 0.4

# Shares of documents. Plain text is one document of up to a row.
MIXTURE = {"edit": 45, "tool": 24, "json": 14, "math": 18, "engine": 14, "talk": 6, "chain": 9, "text": 4, "tale": 3, "long": 1.5}
SINGLE = {"edit": task_edit.dialogue, "tool": task_tool.dialogue, "json": task_json.dialogue, "math": task_math.dialogue, "engine": task_talk.engine, "talk": task_talk.dialogue}


def read_corpus(path):
    with lzma.open(path, "rt", encoding="utf-8") as f:
        return f.read().split("\n\f\n")[:-1]


def is_held(document):
    """One document in fifty is kept for the held-out perplexity."""
    return zlib.crc32(document[:200].encode()) % 50 == 0


def sentences(documents, limit=60000, seed=5):
    """Short plain lines to copy and edit."""
    out, rng = [], random.Random(seed)
    for d in rng.sample(documents, min(len(documents), 6000)):
        for s in re.split(r"(?<=[.!?])\s+|\n+", d):
            s = s.strip()
            if 15 <= len(s) <= 120 and s[0].isupper() and s[-1] in ".!?" and s.isprintable() and "<" not in s and "|" not in s:
                out.append(s)
                if len(out) == limit:
                    return out
    return out


def single(p, kind):
    d = SINGLE[kind](p)
    d.setdefault("thinking", p.chance(0.5))
    if p.chance(0.25) and d["messages"][0]["role"] != "system":
        d["messages"] = [{"role": "system", "content": p.one(task_talk.SYSTEM)}] + d["messages"]
    return d


def chain(p, turns):
    """Several exchanges in one conversation; only the last is answered anew."""
    out, tools = [], None
    kinds = p.rng.choices(["edit", "json", "math", "engine", "talk"], [4, 2, 3, 3, 4], k=turns)
    recall = task_talk.memory(p) if p.chance(0.3) else None
    if recall and len(recall["messages"]) == 4:
        out += recall["messages"][:2]
    for k in kinds:
        out += SINGLE[k](p)["messages"]
    if p.chance(0.2):
        d = task_tool.dialogue(p)
        tools, out = d["tools"], out + d["messages"]
    if recall and len(recall["messages"]) == 4:
        out += recall["messages"][2:]
    if p.chance(0.3):
        out = [{"role": "system", "content": p.one(task_talk.SYSTEM)}] + out
    return {"task": "chain", "messages": out, "tools": tools, "thinking": p.chance(0.5)}


class Source:
    """An endless stream of tokenised documents: (ids, weights)."""

    def __init__(self, tokenizer, corpus, seed):
        self.tok = Tokenizer.from_file(str(tokenizer))
        self.end = self.tok.token_to_id(PAD)
        self.documents = [d for d in corpus if not is_held(d)]
        self.p = pools.make(seed, lines=sentences(self.documents))

    def draw(self, length):
        """[(text, weight)] of one document."""
        p = self.p
        kind = p.rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
        if kind == "text":
            d = p.one(self.documents)
            size = p.one([1000, 3000, length * 3])
            at = p.n(0, max(0, len(d) - size))
            if at:  # start at a line or sentence
                at = min(x for x in (d.find("\n", at) + 1 or at, d.find(". ", at) + 2 if d.find(". ", at) > 0 else at) if x >= at)
            return [(d[at : at + size], TEXT_WEIGHT)] + ([(PAD, TEXT_WEIGHT)] if at + size >= len(d) else [])
        if kind == "tale":
            return [(" ".join(task_talk.tale(p)), 1.0), (PAD, 1.0)]
        d = chain(p, p.n(1, 4)) if kind == "chain" else chain(p, p.n(8, 30)) if kind == "long" else single(p, kind)
        parts = chat.pieces(d["messages"], d.get("tools"), d["thinking"])
        return [(t, 1.0 if own else PROMPT_WEIGHT) for t, own in parts]

    def documents_of(self, count, length):
        drawn = [self.draw(length) for _ in range(count)]
        flat = self.tok.encode_batch_fast([t for d in drawn for t, _ in d], add_special_tokens=False)
        at = 0
        for d in drawn:
            ids, w = [], []
            for _, weight in d:
                x = flat[at].ids
                at += 1
                ids += x
                w += [weight] * len(x)
            if len(ids) > length:
                ids, w = ids[:length], w[:length]
            yield np.array(ids, np.int32), np.array(w, np.float32)

    def batches(self, rows, length, bounds):
        """Packs documents into rows, first fit over a few open rows, and yields batches."""
        waiting = []
        while True:
            ids = np.full((rows, length), self.end, np.int32)
            weights = np.zeros((rows, length), np.float32)
            pos = np.zeros((rows, length), np.int32)
            fill = [0] * rows
            starts = []
            full = 0
            while full < 40:  # forty documents found no room: the batch is full enough
                if not waiting:
                    waiting = list(self.documents_of(256, length))[::-1]
                x, w = waiting.pop()
                row = next((r for r in range(rows) if fill[r] + len(x) <= length), None)
                if row is None:
                    full += 1
                    if len(x) > length // 2 and full > 20:
                        waiting.insert(0, (x, w))
                    continue
                a, n = fill[row], len(x)
                ids[row, a : a + n] = x
                weights[row, a : a + n - 1] = w[1:]  # weight of predicting the next token
                pos[row, a : a + n] = np.arange(n)
                starts.append(row * length + a)
                fill[row] += n
            for r in range(rows):
                if fill[r] < length:
                    pos[r, fill[r] :] = np.arange(length - fill[r])
                    starts.append(r * length + fill[r])
            starts.sort()
            if len(starts) >= bounds:
                raise ValueError(f"batch: {len(starts)} documents, bounds hold {bounds}; raise --bounds")
            cuts = np.full(bounds, rows * length, np.int32)
            cuts[: len(starts)] = starts
            yield ids, weights, pos, cuts


def worker(queue, tokenizer, corpus_path, seed, rows, length, bounds, mixture=""):
    """Body of a generator process."""
    for share in mixture.split(",") if mixture else []:
        kind, value = share.split("=")
        MIXTURE[kind] = float(value)
    source = Source(tokenizer, read_corpus(corpus_path), seed)
    for batch in source.batches(rows, length, bounds):
        queue.put(batch)


# ------------------------------------------------------------------ held-out tasks


def heldout(corpus, per_task, seed=990001):
    """Held-out tasks from held-out values, paraphrases and documents: what is asked, what the
    model must write. One entry per answer to be generated; earlier answers are given."""
    p = pools.make(seed, test=True, lines=sentences([d for d in corpus if is_held(d)], 5000))
    out, seen = [], set()
    kinds = {"edit": task_edit.dialogue, "json": task_json.dialogue, "tool": task_tool.call, "notool": lambda p: task_tool.without(p) if p.chance(0.6) else task_tool.missing(p),
             "math": lambda p: task_math.dialogue(p, True), "talk": task_talk.dialogue}
    for kind, draw in kinds.items():
        count = 0
        while count < (per_task if kind not in ("talk", "notool") else per_task // 2):
            d = draw(p)
            if d["sub"] == "story":
                continue
            key = json.dumps(d["messages"][0])
            if key in seen:
                continue
            seen.add(key)
            d["thinking"] = d.get("thinking", count % 2 == 0)
            count += 1
            answers = [i for i, m in enumerate(d["messages"]) if m["role"] == "assistant"]
            last_user = max(i for i, m in enumerate(d["messages"]) if m["role"] == "user")
            for i in (i for i in answers if i > last_user):
                task = kind if i == last_user + 1 or kind != "tool" else "tool result"
                out.append({"task": task, "sub": d["sub"], "thinking": d["thinking"], "messages": d["messages"][:i], "tools": d.get("tools"), "want": d["messages"][i]})
    for i, (answer, _, tests) in enumerate(task_talk.FACTS):
        for j, q in enumerate(tests):
            out.append({"task": "engine", "sub": str(i), "thinking": (i + j) % 2 == 0, "messages": [{"role": "user", "content": q}], "tools": None, "want": {"role": "assistant", "content": answer}})
    return out
