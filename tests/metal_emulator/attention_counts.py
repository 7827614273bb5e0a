"""What prefill_attn does for a chunk, counted from its layout; the emulator confirms it in
test_prefill_mix.py. `python3 attention_counts.py` prints the tables of docs/metal-attention.md."""

from __future__ import annotations

from dataclasses import dataclass

from library_text import enumerators, shape

E = enumerators("prefill_mix_args.h")
DIM, GROUP, TOKENS = (E[f"PREFILL_ATTN_{name}"] for name in ("DIM", "GROUP", "TOKENS"))
BLOCK, SPAN = E["PREFILL_ATTN_BLOCK"], E["PREFILL_ATTN_SPAN"]
PRODUCTS = 2 * BLOCK * DIM // 64  # of 8 x 8 x 8, for a token's 8 rows and a block: q k^T, then p v
EXCHANGES = 2 * BLOCK // 8 + 3  # between lanes: scores turned, maximum of a row, whether one grew


@dataclass
class Counts:
    """Of one attention layer. Bytes are what threadgroups load and store, cached or not."""

    pairs: int = 0  # of query token and position, each for all heads
    products: int = 0  # of 8 x 8 x 8
    exchanges: int = 0
    kv: int = 0
    kv_once: int = 0  # if each chunk loaded every row it sees once
    query: int = 0
    totals: int = 0

    def __add__(self, other: Counts) -> Counts:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def needed(self, kv_heads: int) -> int:  # multiply-adds
        return self.pairs * kv_heads * GROUP * 2 * DIM

    def done(self) -> int:
        return self.products * 512


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
        if token % TOKENS == TOKENS - 1 or token == n - 1:
            c.kv += seen * 2 * DIM * 2 * kv_heads
    return c


# ---- by tensor operations: a tile of all tokens walks over all blocks that one of them sees

ROWS = TOKENS * GROUP
BARRIERS = 3  # of a threadgroup, for a block
TENSOR_EXCHANGES = 3  # maximum of a row, whether one grew
STAGE_ROW = 4 * (BLOCK + 4)
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


def prompt_table(kv_heads: int) -> str:
    title = ["prompt", "multiply-adds needed, 10^9", "done", "done / needed", "KV loaded, GB",
             "queries loaded, GB", "span totals, GB", "KV once per chunk, GB",
             "multiply-adds per byte loaded"]  # fmt: skip
    rows = []
    for name, tokens in DEPTHS.items():
        c = prompt(tokens, kv_heads)
        loaded = c.kv + c.query + c.totals
        rows.append([name, _giga(c.needed(kv_heads)), _giga(c.done()),
                     f"{c.done() / c.needed(kv_heads):.4f}", _giga(c.kv), _giga(c.query),
                     _giga(c.totals), _giga(c.kv_once), f"{c.done() / loaded:.1f}"])  # fmt: skip
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
    print(prompt_table(heads) + "\n\n" + split_table(heads))
