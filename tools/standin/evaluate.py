"""Held-out scores of the stand-in: exact match of greedy answers, and perplexity.

    evaluate.py --corpus C.xz (--state STATE.pt | --folder DIR) [--per-task N] [--json OUT]

--state scores the trained weights rounded to bf16 and as 4-bit weights; --folder scores an exported
checkpoint. All arithmetic is float32, one token at a time from an empty state. An answer counts
when its whole text after the think block equals the expected one and it ends its turn.
"""

import argparse
import collections
import json
import math
import pathlib

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import chat
import dataset
import export
import model
import pools
import task_talk

CLOSE = "</think>\n\n"


def nested(params, shape, device):
    """Flat parameters -> the nested form the model functions take."""
    net = model.Mini(shape, dt=torch.float32)
    with torch.no_grad():
        for n, p in net.named().items():
            p.copy_(params[n])
    net.to(device)
    with torch.no_grad():
        return net.weights(False)


def prompts(tasks, tok):
    out = []
    for t in tasks:
        text = chat.render(t["messages"], t["tools"], t["thinking"], prompt=True)
        body = t["want"]["content"] + chat.calls_text(t["want"]["content"], t["want"].get("calls") or [])
        ids = tok.encode(text, add_special_tokens=False).ids
        room = len(tok.encode(body, add_special_tokens=False).ids) + 24 + (170 if t["thinking"] else 0)
        out.append((ids, body, room))
    return out


@torch.no_grad()
def generate(w, shape, asked, stops, device, group=1400):
    """Greedy answers (ids without the stop, whether it stopped) of [(prompt ids, limit)]."""
    order = sorted(range(len(asked)), key=lambda i: len(asked[i][0]) + asked[i][1])
    answers = [None] * len(asked)
    for at in range(0, len(order), group):
        rows = order[at : at + group]
        limit = max(len(asked[i][0]) + asked[i][1] for i in rows)
        run = model.Stepper(w, shape, len(rows), limit, device)
        given = torch.zeros(len(rows), limit, dtype=torch.long, device=device)
        length = torch.tensor([len(asked[i][0]) for i in rows], device=device)
        for r, i in enumerate(rows):
            given[r, : len(asked[i][0])] = torch.tensor(asked[i][0])
        room = torch.tensor([len(asked[i][0]) + asked[i][1] for i in rows], device=device)
        stop = torch.tensor(stops, device=device)
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        for n in range(limit - 1):
            logits = run.step(given[:, n])
            best = logits.argmax(-1)
            fresh = n + 1 >= length
            given[:, n + 1] = torch.where(fresh, best, given[:, n + 1])
            done |= fresh & torch.isin(best, stop)
            if n % 16 == 0 and bool((done | (n + 2 >= room)).all()):
                break
        given = given.cpu()
        for r, i in enumerate(rows):
            ids = given[r, len(asked[i][0]) : len(asked[i][0]) + asked[i][1]].tolist()
            cut = next((k for k, x in enumerate(ids) if x in stops), None)
            answers[i] = (ids if cut is None else ids[:cut], cut is not None)
    return answers


@torch.no_grad()
def perplexity(w, shape, rows, device):
    """(mean negative log likelihood, tokens) of the weighted positions of [(ids, weights)]."""
    limit = max(len(i) for i, _ in rows)
    ids = torch.zeros(len(rows), limit, dtype=torch.long)
    mask = torch.zeros(len(rows), limit)
    for r, (x, m) in enumerate(rows):
        ids[r, : len(x)] = torch.tensor(x)
        mask[r, : len(x)] = torch.tensor(m)
    ids, mask = ids.to(device), mask.to(device)
    run, total = model.Stepper(w, shape, len(rows), limit, device), 0.0
    for n in range(limit - 1):
        ce = F.cross_entropy(run.step(ids[:, n]), ids[:, n + 1], reduction="none")
        total += (ce * mask[:, n + 1]).sum().double()
    return float(total / mask[:, 1:].sum()), int(mask[:, 1:].sum())


def text_rows(corpus, tok, count, length):
    held = sorted((d for d in corpus if dataset.is_held(d)), key=lambda d: hash_of(d))
    rows = [tok.encode(d[: length * 6], add_special_tokens=False).ids[:length] for d in held[:count]]
    return [(x, [1.0] * len(x)) for x in rows]


def hash_of(d):
    return dataset.zlib.crc32(d[:400].encode())


def story_rows(tok, count):
    p, out = pools.make(990002, test=True), []
    for i in range(count):
        d = task_talk.story(p)
        ids, weights = [], []
        for text, own in chat.pieces(d["messages"], None, False):
            x = tok.encode(text, add_special_tokens=False).ids
            ids += x
            weights += [float(own)] * len(x)
        out.append((ids, weights))
    return out


def score(w, shape, tasks, tok, corpus, device, texts):
    stops = [tok.token_to_id("<|im_end|>"), tok.token_to_id("<|endoftext|>")]
    asked = prompts(tasks, tok)
    answers = generate(w, shape, [(ids, room) for ids, _, room in asked], stops, device)
    by_task, by_sub, ended, wrong = (collections.defaultdict(list) for _ in range(4))
    for t, (_, body, _), (ids, stopped) in zip(tasks, asked, answers):
        text = tok.decode(ids, skip_special_tokens=False)
        said = text.split(CLOSE, 1)[1] if t["thinking"] and CLOSE in text else text
        good = stopped and said == body and (not t["thinking"] or CLOSE in text)
        mode = "thinking" if t["thinking"] else "direct"
        by_task[t["task"]].append(good)
        by_task[t["task"] + ", " + mode].append(good)
        by_sub[t["task"] + "/" + t["sub"]].append(good)
        ended[mode].append(stopped)
        if not good and len(wrong[t["task"]]) < 12:
            wrong[t["task"]].append({"asked": t["messages"][-1]["content"][-300:], "want": body, "got": text})
    kinds = {k: [sum(v), len(v)] for k, v in sorted(by_sub.items()) if not k.startswith("engine/")}
    mean = lambda d: {k: round(sum(v) / len(v), 4) for k, v in sorted(d.items())}
    out = {"exact match": mean(by_task), "count": {k: len(v) for k, v in sorted(by_task.items())}, "ends its turn": mean(ended)}
    if texts:
        nll, n = perplexity(w, shape, text_rows(corpus, tok, texts, 1024), device)
        out["text perplexity"] = {"per token": round(math.exp(nll), 3), "tokens": n}
        nll, n = perplexity(w, shape, story_rows(tok, texts), device)
        out["story perplexity"] = {"per token": round(math.exp(nll), 3), "tokens": n}
    out["right and asked, by kind"] = kinds
    return out, dict(wrong)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--corpus", required=True)
    ap.add_argument("--tokenizer", default=str(dataset.HERE.parent.parent / "models/mini/tokenizer.json"))
    ap.add_argument("--state")
    ap.add_argument("--folder")
    ap.add_argument("--per-task", type=int, default=200)
    ap.add_argument("--seed", type=int, default=990001, help="of the held-out tasks")
    ap.add_argument("--task", help="this task alone")
    ap.add_argument("--texts", type=int, default=128, help="held-out documents for the perplexity")
    ap.add_argument("--only", choices=["bf16", "4-bit"])
    ap.add_argument("--json")
    ap.add_argument("--wrong", help="write some wrong answers here")
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, tok, corpus = model.Shape(), Tokenizer.from_file(args.tokenizer), dataset.read_corpus(args.corpus)
    tasks = [t for t in dataset.heldout(corpus, args.per_task, args.seed) if args.task in (None, t["task"])]
    sets = {}
    if args.state:
        params = export.from_state(args.state)
        sets = {"bf16": export.rounded(params, shape, False), "4-bit": export.rounded(params, shape, True)}
        sets = {k: v for k, v in sets.items() if args.only in (None, k)}
    if args.folder:
        sets["4-bit"] = export.unpacked(args.folder, shape)
    result, wrong = {}, {}
    for name, params in sets.items():
        w = nested(params, shape, device)
        out, bad = score(w, shape, tasks, tok, corpus, device, args.texts)
        result[name], wrong[name] = out, bad
        print(name, json.dumps(out), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    if args.wrong:
        pathlib.Path(args.wrong).write_text(json.dumps(wrong, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
