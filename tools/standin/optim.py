"""Muon for the matrices inside the layers, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix, found with five steps of
a Newton-Schulz iteration. Matrices of one shape are handled as one batch.
"""

import torch


def orthogonal(g):
    """g [n, rows, columns], rows <= columns."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        y = x @ x.mT
        x = a * x + (b * y + c * y @ y) @ x
    return x.to(g.dtype)


class Muon:
    def __init__(self, params, momentum=0.95, decay=0.05):
        self.groups, self.momentum, self.decay = {}, momentum, decay
        for p in params:
            r, c = p.shape[-2:]
            self.groups.setdefault((min(r, c), max(r, c)), []).append(p)
        self.buffers = {k: torch.zeros(sum(p.numel() for p in ps) // (k[0] * k[1]), *k, device=ps[0].device) for k, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr):
        for (rows, columns), ps in self.groups.items():
            flip = [p.shape[-2] > p.shape[-1] for p in ps]
            counts = [p.numel() // (rows * columns) for p in ps]
            g = torch.cat([(p.grad.mT if f else p.grad).reshape(-1, rows, columns) for p, f in zip(ps, flip)])
            m = self.buffers[rows, columns]
            m.lerp_(g, 1 - self.momentum)
            u = orthogonal(torch.lerp(g, m, self.momentum))
            # tall matrices (more outputs than inputs) take larger steps
            scale = [max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 for p in ps]
            moves = [((d.mT if f else d) * -s * lr).reshape(p.shape) for p, d, f, s in zip(ps, u.split(counts), flip, scale)]
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_add_(ps, moves)

    def state(self):
        return self.buffers

    def load(self, state):
        for k, v in state.items():
            self.buffers[k].copy_(v)


def split(model):
    """(matrices for Muon, embeddings, the rest)"""
    matrices, tables, rest = [], [], []
    for n, p in model.named().items():
        if n in ("embed_tokens", "lm_head"):
            tables.append(p)
        elif model.kinds[n] == "q4" and not n.endswith(("in_proj_a", "in_proj_b")):
            matrices.append(p)
        else:
            rest.append(p)
    return matrices, tables, rest
