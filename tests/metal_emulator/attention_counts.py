"""What both forms of a prompt's attention do for a chunk, counted from their layouts; the emulator
confirms it in test_prefill_mix.py and test_prefill_attn_tensor.py. `python3 attention_counts.py`
prints the tables of docs/metal-attention.md."""

from __future__ import annotations

import re
from dataclasses import dataclass

from library_text import ROOT, enumerators, shape

E = enumerators("prefill_mix_args.h")
DIM, GROUP, TOKENS = (E[f"PREFILL_ATTN_{name}"] for name in ("DIM", "GROUP", "TOKENS"))
BLOCK, SPAN = E["PREFILL_ATTN_BLOCK"], E["PREFILL_ATTN_SPAN"]
PRODUCTS = 2 * BLOCK * DIM // 64  # of 8 x 8 x 8, for a token's 8 rows and a block: q k^T, then p v
EXCHANGES = 2 * BLOCK // 8 + 3  # between lanes: scores turned, maximum of a row, whether one grew


@dataclass
class Counts:
    """Of one attention layer by simdgroup_matrix. Bytes are what threadgroups load and store, cached
    or not."""

    pairs: int = 0  # of query token and position, each for all heads
    products: int = 0  # of 8 x 8 x 8
    exchanges: int = 0
    kv: int = 0
    kv_once: int = 0  # if each chunk loaded every row it sees once
    query: int = 0
    totals: int = 0
    staged: int = 0  # written to threadgroup memory and read there

    def __add__(self, other: Counts) -> Counts:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def needed(self, kv_heads: int) -> int:  # multiply-adds
        return self.pairs * kv_heads * GROUP * 2 * DIM

    def done(self) -> int:
        return self.products * 512


KV_BLOCK = 2 * BLOCK * DIM * 2


def chunk(n: int, pos: int, kv_heads: int) -> Counts:
    c = Counts(kv_once=(pos + n) * kv_heads * 2 * DIM * 2)
    for token in range(n):
        seen = pos + token + 1
        blocks, spans = -(-seen // BLOCK), -(-seen // SPAN)
        c.pairs += seen
        c.products += blocks * PRODUCTS * kv_heads
        c.exchanges += (blocks * EXCHANGES + spans * 2) * kv_heads
        c.query += blocks * DIM * GROUP * 2 * kv_heads
        c.totals += 2 * (spans - 1) * GROUP * DIM * 4 * kv_heads
        c.staged += blocks * KV_BLOCK * kv_heads  # a simdgroup reads all of it
        if token % TOKENS == TOKENS - 1 or token == n - 1:
            c.kv += seen * 2 * DIM * 2 * kv_heads
            c.staged += blocks * KV_BLOCK * kv_heads
    return c


# ---- by tensor operations: a tile of all tokens walks over all blocks that one of them sees

ROWS = TOKENS * GROUP
BARRIERS = 3  # of a threadgroup, for a block
TENSOR_EXCHANGES = 3  # maximum of a row, whether one grew
STAGE_ROW = 4 * (BLOCK + 4)
STAGED = 2 * ROWS * BLOCK * (4 + 2)  # scores and weights, each written once and read once
TENSOR_MEMORY = ROWS * (STAGE_ROW + 4 + 16) + TOKENS * 4  # stage, keep, close, lifted


@dataclass
class TensorCounts(Counts):
    blocks: int = 0  # of a tile of 64 rows
    barriers: int = 0

    def done(self) -> int:
        return self.blocks * ROWS * BLOCK * 2 * DIM


def tensor_chunk(n: int, pos: int, kv_heads: int) -> TensorCounts:
    c = TensorCounts(kv_once=(pos + n) * kv_heads * 2 * DIM * 2)
    for first in range(0, n, TOKENS):
        tokens = min(TOKENS, n - first)
        seen = [pos + first + t + 1 for t in range(tokens)]
        blocks = -(-seen[-1] // BLOCK)
        spans = [-(-s // SPAN) for s in seen]
        c.pairs += sum(seen)
        c.blocks += blocks * kv_heads
        c.barriers += blocks * BARRIERS * kv_heads
        c.staged += blocks * STAGED * kv_heads
        c.exchanges += (blocks * TOKENS * TENSOR_EXCHANGES + sum(spans) * 2) * kv_heads
        c.kv += seen[-1] * 2 * DIM * 2 * kv_heads
        c.query += blocks * tokens * GROUP * DIM * 2 * kv_heads
        c.totals += sum(2 * (s - 1) * GROUP * DIM * 4 for s in spans) * kv_heads
    return c


def prompt(tokens: int, kv_heads: int, count: type = Counts, rows: int = 2048) -> Counts:
    of_chunk, total = {Counts: chunk, TensorCounts: tensor_chunk}[count], count()
    for pos in range(0, tokens, rows):
        total += of_chunk(min(rows, tokens - pos), pos, kv_heads)
    return total


DEPTHS = {"4K": 4096, "32K": 32768, "128K": 131072, "256K": 262144}


def _giga(x: int) -> str:
    return f"{x / 1e9:,.2f}" if x < 1e11 else f"{x / 1e9:,.0f}"


def _table(title: list[str], rows: list[list[str]]) -> str:
    lines = [title, ["---"] * len(title), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LAYERS = 10


def published() -> dict[str, int]:
    """MLX's tokens per second of a long prompt on an M5 Max, from the table of `lily bench`."""
    text = (ROOT / "src/cli/published.h").read_text(encoding="utf-8")
    rows = re.findall(r"\{(\d+), +[\d.]+, +(\d+), ", text)
    return {f"{int(n) // 1024}K": int(speed) for n, speed in rows if int(n) >= 32768}


def prompt_table(kv_heads: int) -> str:
    title = ["prompt", "multiply-adds needed, 10^9", "done / needed", "exponentials needed, 10^9",
             "KV loaded, GB", "KV once per chunk, GB", "queries loaded, GB", "span totals, GB",
             "multiply-adds per byte loaded", "threadgroup memory, GB: matrix form",
             "tensor form"]  # fmt: skip
    rows = []
    for name, tokens in DEPTHS.items():
        c, tensor = (prompt(tokens, kv_heads, form) for form in (Counts, TensorCounts))
        needed, loaded = c.needed(kv_heads), c.kv + c.query + c.totals
        # Tiles begin at multiples of 8 here, so that no token sits beside one of another block.
        assert (c.done(), c.kv, c.query) == (tensor.done(), tensor.kv, tensor.query)
        rows.append([name, _giga(needed), f"{c.done() / needed:.4f}", _giga(needed // (2 * DIM)),
                     _giga(c.kv), _giga(c.kv_once), _giga(c.query), _giga(c.totals),
                     f"{c.done() / loaded:.1f}", _giga(c.staged), _giga(tensor.staged)])  # fmt: skip
    return _table(title, rows)


def speed_table(kv_heads: int) -> str:
    title = ["prompt", "published tok/s", "seconds", "TFLOPS of attention", "KV loaded, GB/s"]
    rows = []
    for name, speed in published().items():
        c, seconds = prompt(1024 * int(name[:-1]), kv_heads), 1024 * int(name[:-1]) / speed
        rows.append([name, f"{speed:,}", f"{seconds:.1f}",
                     f"{2 * LAYERS * c.needed(kv_heads) / seconds / 1e12:.1f}",
                     f"{LAYERS * c.kv / seconds / 1e9:,.0f}"])  # fmt: skip
    return _table(title, rows)


def split_table(kv_heads: int, n: int = 8) -> str:
    title = ["depth", "threadgroups whole", "threadgroups split", "KV loaded, MB",
             "partial results written and read, MB"]  # fmt: skip
    rows = []
    for name, depth in DEPTHS.items():
        c, spans = chunk(n, depth - n, kv_heads), -(-depth // SPAN)
        tiles = -(-n // TOKENS) * kv_heads
        partial = 2 * spans * n * kv_heads * GROUP * (DIM + 2) * 4
        rows.append([name, str(tiles), str(tiles * spans), f"{c.kv / 1e6:,.1f}",
                     f"{partial / 1e6:,.2f}"])  # fmt: skip
    return _table(title, rows)


if __name__ == "__main__":
    heads = shape("real")["KV_HEADS"]
    print("\n\n".join(table(heads) for table in (prompt_table, speed_table, split_table)))
