"""The MLX affine quantiser (groups of 64 inputs of one row), for training and for export."""

import torch

GROUP = 64


def codes(w, bits):
    """Codes, scales and biases of w [..., inputs]: value = scale * code + bias.

    The weight is rounded to bf16 first, so that quantising a bf16 copy gives the same codes.
    The edge with the larger magnitude is represented exactly, which is why scales can be
    negative; scales and biases are stored in bf16, the codes come from the unrounded ones.
    """
    top = 2**bits - 1
    g = w.detach().bfloat16().float().unflatten(-1, (-1, GROUP))
    low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = ((high - low) / top).clamp_min(1e-7)
    side = low.abs() > high.abs()
    scale = torch.where(side, scale, -scale)
    edge = torch.where(side, low, high)
    steps = torch.round(edge / scale)
    scale = torch.where(steps != 0, edge / torch.where(steps != 0, steps, 1), scale)
    bias = torch.where(steps != 0, edge, 0.0)
    q = torch.round((g - bias) / scale).clamp(0, top)
    return q, scale.bfloat16(), bias.bfloat16()


def rounded(w, bits):
    """w as a reader of the quantised file sees it, in float32."""
    q, scale, bias = codes(w, bits)
    return (q * scale.float() + bias.float()).flatten(-2)


def straight_through(w, bits):
    """Quantised forward, identity backward."""
    return w + (rounded(w, bits) - w).detach()


def pack(w, bits):
    """(weight U32, scales, biases) as MLX stores them: little end first within a word."""
    q, scale, bias = codes(w, bits)
    per = 32 // bits
    q = q.flatten(-2).to(torch.int64).unflatten(-1, (-1, per))
    word = (q << (torch.arange(per, device=q.device) * bits)).sum(-1)
    return word.to(torch.uint32), scale.squeeze(-1), bias.squeeze(-1)


def unpack(word, scale, bias, bits):
    """The inverse of pack: float32 values."""
    per = 32 // bits
    q = (word.to(torch.int64).unsqueeze(-1) >> (torch.arange(per) * bits)) & (2**bits - 1)
    q = q.flatten(-2).float().unflatten(-1, (-1, GROUP))
    return (q * scale.float().unsqueeze(-1) + bias.float().unsqueeze(-1)).flatten(-2)
