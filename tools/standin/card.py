"""Write the stand-in's model card from the measured figures: card.py bench/standin.json OUT.md"""

import json
import sys

import corpus

NAMES = {
    "edit": "copying and editing given text", "tool": "calling a given tool with the right arguments", "tool result": "answering from a tool's result",
    "notool": "tools given, none needed or none fitting", "json": "a small JSON object on request", "math": "small arithmetic with a think block",
    "engine": "questions about the engine", "talk": "small talk, memory, honest ignorance",
}

TEXT = """# mini, the stand-in

A small mixture-of-experts language model with the structure of Qwen3.6-35B-A3B, trained from scratch for this project, so that lily
runs end to end on any machine without a download. It really does a few things (below); it knows nothing about the world and says so.
It is no substitute for the real checkpoint.

| | |
|---|---|
| parameters | 21.7 million; of 32 experts in a layer 8 and the shared one work on a token |
| layers | 8: every fourth full attention (8 query heads and 1 key/value head of 256), the others Gated DeltaNet (2 key and 4 value heads of 128, convolution 4) |
| hidden size, experts | 256; 32 experts of width 64, top 8, shared expert of width 64 |
| vocabulary | 4096 rows: 4040 byte-level BPE tokens, 33 added tokens (the names and flags of the real model), 23 padding rows |
| format | MLX affine 4-bit, groups of 64; routers and shared-expert gates 8-bit; 12.3 MB |
| licence | Apache-2.0 (weights, tokenizer, generator) |

It uses the chat format of the real model: thinking and non-thinking mode, tool calls in its own syntax, every turn ended by `<|im_end|>`.
Contexts in training were up to 4,096 tokens.

## Held-out scores

Greedy, float32 arithmetic, exact match of the whole answer after the think block (thinking and non-thinking mode half each, arithmetic
always with a think block). Held out are the values (an eighth of all words, names and cities is never drawn in training; sentences of the
training documents that dialogues copy may contain such a word), the exact wording of the questions about the engine, and the documents that
texts are taken from. bf16 are the trained weights rounded to bf16;
4-bit is the file in this folder.

{scores}

The errors that are left in editing are mostly sorting, changes of case (`BEAUTY` to `beauty`) and exchanging of words never seen in a dialogue.
{kinds}

Perplexity per token (vocabulary of 4096) on held-out documents, the first 1,024 tokens of each, and on answers that tell or continue a generated story:

{perplexity}

The figures come from `tools/standin/evaluate.py` on an NVIDIA H200 and are kept in `bench/standin.json`; `tests/standin/heldout.jsonl` holds
482 of the held-out tasks with the exact answers expected, to measure an engine with.

## How it was made

`tools/standin` holds everything; its README has the commands. Dialogues are generated while training runs, so no dialogue is seen
twice on purpose; plain text is drawn from the packages below. The loss is on the model's own writing (weight 1), on plain text (0.4) and, lightly, on prompts (0.05).
Muon trains the matrices inside the layers, AdamW the rest; {tokens} million tokens in {seconds} seconds of training on two H200 ({rate} thousand tokens/s in
the larger batches), of which the last {quantised} million tokens with weights rounded as in the 4-bit file (straight-through). After the first
{first} million tokens the shares of the tasks were changed, words spliced from two tokens and more phrasings of the questions about the engine
were added; the twelve held-out questions that had been seen in a list of errors were then replaced by new ones. The last {last} million tokens ({last_seconds}
seconds, from the 4-bit weights published before, dequantised) brought the spelling of rare tokens: spliced words in sorting and case changes, exercises in spelling
and in separating words, and twice as many tokens of edits. Edits went from {edits_before} to {edits_now} on the {more_count} tasks above; questions about the engine from {engine_before} to
{engine_now} and perplexity on held-out text from {text_before} to {text_now}. Before it, wrong edits of the former weights had been read on one
further draw of tasks (seed 6), to see which kinds are weak; the held-out sets stayed as they were, and no figure above is from that draw.

## Data

Written for this project: the dialogue generator and the questions about the engine. Debian 12 packages, text only:

{packages}

The word list `tools/standin/words.txt` holds words frequent in these texts that Debian's `wamerican` (SCOWL, permissive) also lists.
No other data was used.
"""


def main():
    d = json.load(open(sys.argv[1]))
    a, b = d["bf16"], d["4-bit"]
    rows = ["| task | held-out tasks | bf16 | 4-bit |", "|---|---:|---:|---:|"]
    percent = lambda x: f"{100 * x:.1f} %"
    for k, name in NAMES.items():
        rows.append(f"| {name} | {b['count'][k]} | {percent(a['exact match'][k])} | {percent(b['exact match'][k])} |")
    for mode in ("direct", "thinking"):
        name = {"direct": "ends its turn, non-thinking mode", "thinking": "ends its turn, thinking mode"}[mode]
        rows.append(f"| {name} | | {percent(a['ends its turn'][mode])} | {percent(b['ends its turn'][mode])} |")
    p = ["| | tokens | bf16 | 4-bit |", "|---|---:|---:|---:|"]
    for k in ("text perplexity", "story perplexity"):
        p.append(f"| {k.split()[0]} | {b[k]['tokens']:,d} | {a[k]['per token']} | {b[k]['per token']} |")
    t = d["training"]
    packages = ["| package | licence |", "|---|---|"] + [f"| {n} | {licence} |" for n, (licence, _) in corpus.PACKAGES.items()]
    more = d["more edits"]
    kinds = f"On {more['count']} further editing tasks drawn with another seed the 4-bit weights reach {percent(more['exact match'])} through lily itself: sorting {percent(more['sorting'])}, all other kinds {percent(more['all but sorting'])}."
    before = d["before the last part"]
    text = TEXT.format(
        last=round(t["tokens of the last part"] / 1e6), last_seconds=t["seconds of the last part"], more_count=more["count"],
        edits_before=percent(before["more edits"]["exact match"]), edits_now=percent(more["exact match"]),
        engine_before=percent(before["exact match, 4-bit, 200 tasks of a kind"]["engine"]), engine_now=percent(b["exact match"]["engine"]),
        text_before=before["text perplexity, 4-bit"], text_now=b["text perplexity"]["per token"],
        scores="\n".join(rows), perplexity="\n".join(p), tokens=round(t["tokens"] / 1e6), seconds=t["seconds"], rate=t["tokens per second"] // 1000,
        quantised=round(t["tokens at 4 bits"] / 1e6), first=round(t["tokens before the change of data"] / 1e6), packages="\n".join(packages), kinds=kinds,
    )
    open(sys.argv[2], "w").write(text)


if __name__ == "__main__":
    main()
