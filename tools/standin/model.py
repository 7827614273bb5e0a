"""The stand-in's model in PyTorch: the training form (whole rows, chunked delta rule) and the
step form (one token at a time, for generation).

Shapes are [rows B, positions T, ...]. Documents packed into one row do not see one another: the
convolution, the rotary positions, the attention and the recurrent state all restart at a document's
first token, so every document is computed exactly as from an empty state.

Experts are computed densely: all of them form one wide gated layer whose inner activations are
multiplied by the routing weights (zero for experts that were not chosen). At this size that costs
less than gathering tokens.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F

import fused
import quant

CHUNK = 64
RESET = -30.0  # added to a first token's log decay: exp(-30) forgets the previous document


@dataclasses.dataclass(frozen=True)
class Shape:
    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 1
    head: int = 256
    rotary: int = 64
    theta: float = 1e7
    k_heads: int = 2
    v_heads: int = 4
    lin: int = 128
    conv: int = 4
    experts: int = 32
    chosen: int = 8
    inner: int = 64
    shared: int = 64

    def full(self, layer):
        return (layer + 1) % 4 == 0


def tensors(s):
    """name -> (shape, class). The class says how a tensor is stored and trained:
    q4 / q8: quantised matrix; norm: zero-centred, stored as bf16(1 + w); plain: bf16."""
    conv = 2 * s.k_heads * s.lin + s.v_heads * s.lin
    wide = s.v_heads * s.lin
    t = {
        "embed_tokens": ((s.vocab, s.hidden), "q4"),
        "lm_head": ((s.vocab, s.hidden), "q4"),
        "norm": ((s.hidden,), "norm"),
    }
    for i in range(s.layers):
        p = f"layers.{i}."
        t[p + "input_layernorm"] = ((s.hidden,), "norm")
        t[p + "post_attention_layernorm"] = ((s.hidden,), "norm")
        if s.full(i):
            a = p + "self_attn."
            t[a + "q_proj"] = ((s.heads * s.head * 2, s.hidden), "q4")
            t[a + "k_proj"] = ((s.kv_heads * s.head, s.hidden), "q4")
            t[a + "v_proj"] = ((s.kv_heads * s.head, s.hidden), "q4")
            t[a + "o_proj"] = ((s.hidden, s.heads * s.head), "q4")
            t[a + "q_norm"] = ((s.head,), "norm")
            t[a + "k_norm"] = ((s.head,), "norm")
        else:
            a = p + "linear_attn."
            t[a + "in_proj_qkv"] = ((conv, s.hidden), "q4")
            t[a + "in_proj_z"] = ((wide, s.hidden), "q4")
            t[a + "in_proj_a"] = ((s.v_heads, s.hidden), "q4")
            t[a + "in_proj_b"] = ((s.v_heads, s.hidden), "q4")
            t[a + "out_proj"] = ((s.hidden, wide), "q4")
            t[a + "conv1d"] = ((conv, s.conv), "plain")
            t[a + "A_log"] = ((s.v_heads,), "plain")
            t[a + "dt_bias"] = ((s.v_heads,), "plain")
            t[a + "norm"] = ((s.lin,), "plain")
        m = p + "mlp."
        t[m + "gate"] = ((s.experts, s.hidden), "q8")
        t[m + "shared_expert_gate"] = ((1, s.hidden), "q8")
        t[m + "shared_expert.gate_proj"] = ((s.shared, s.hidden), "q4")
        t[m + "shared_expert.up_proj"] = ((s.shared, s.hidden), "q4")
        t[m + "shared_expert.down_proj"] = ((s.hidden, s.shared), "q4")
        t[m + "switch_mlp.gate_proj"] = ((s.experts, s.inner, s.hidden), "q4")
        t[m + "switch_mlp.up_proj"] = ((s.experts, s.inner, s.hidden), "q4")
        t[m + "switch_mlp.down_proj"] = ((s.experts, s.hidden, s.inner), "q4")
    return t


def initial(s, seed):
    """Random start values, float32, by name."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for name, (shape, kind) in tensors(s).items():
        if kind == "norm":
            w = torch.zeros(shape)
        elif name.endswith("A_log"):
            w = torch.log(torch.rand(shape, generator=gen) * 15 + 1)
        elif name.endswith("dt_bias"):  # softplus(dt_bias) spread log-uniformly over [0.001, 0.1]
            dt = torch.exp(torch.rand(shape, generator=gen) * math.log(100) + math.log(1e-3))
            w = dt + torch.log(-torch.expm1(-dt))
        elif name.endswith("linear_attn.norm"):
            w = torch.ones(shape)
        elif name.endswith("conv1d"):
            w = torch.randn(shape, generator=gen) * 0.3
        else:
            std = 0.02 if "embed" not in name and "lm_head" not in name else (0.5 if "embed" in name else 0.005)
            w = torch.randn(shape, generator=gen) * (std if std != 0.02 else shape[-1] ** -0.5 * 0.7)
            if name.endswith(("o_proj", "out_proj", "down_proj")):
                w = w * 0.3
        out[name] = w
    return out


def stored(w, kind):
    """A parameter as a reader of the exported checkpoint sees it (straight-through gradient)."""
    if kind == "q4":
        return quant.straight_through(w, 4)
    if kind == "q8":
        return quant.straight_through(w, 8)
    one = 1.0 if kind == "norm" else 0.0
    return w + ((w.detach() + one).bfloat16().float() - one - w).detach()


# ------------------------------------------------------------------ pieces shared by both forms


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def l2(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rotate(x, pos, s):
    """Rotary position on the first s.rotary dimensions of x [..., heads, head], pos [...]."""
    half = s.rotary // 2
    freq = s.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = pos.float().unsqueeze(-1) * freq
    co, si = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    a, b, rest = x[..., :half], x[..., half : s.rotary], x[..., s.rotary :]
    return torch.cat([a * co - b * si, b * co + a * si, rest], -1)


def qkv_heads(x, w, pos, s, dt):
    """Queries, output gates, keys and values of a full-attention layer; x is normed, type dt."""
    qg = (x @ w["q_proj"].T).unflatten(-1, (s.heads, 2, s.head))
    q, gate = qg[..., 0, :].float(), qg[..., 1, :]
    k = (x @ w["k_proj"].T).unflatten(-1, (s.kv_heads, s.head)).float()
    v = (x @ w["v_proj"].T).unflatten(-1, (s.kv_heads, s.head))
    q = rotate(rms(q) * (1 + w["q_norm"]), pos, s)
    k = rotate(rms(k) * (1 + w["k_norm"]), pos, s)
    return q.to(dt), gate, k.to(dt), v


def routing(x, gate_w, s):
    """Routing weights [..., experts], zero where not chosen, and the plain softmax. Ties go to
    the lower index. x float32."""
    z = x @ gate_w.T
    i = torch.arange(s.experts, device=z.device)
    zi, zj = z.unsqueeze(-1), z.unsqueeze(-2)
    ahead = (zj > zi) | ((zj == zi) & (i[None, :] < i[:, None]))
    mask = ahead.sum(-1) < s.chosen
    p = torch.softmax(z, -1)
    chosen = p * mask
    return chosen / chosen.sum(-1, keepdim=True), p, mask


def moe(h, w, s, dt):
    """h + experts(norm(h)); also the load-balance term of this layer."""
    x = rms(h) * (1 + w["post_attention_layernorm"])
    route, p, mask = routing(x, w["gate"], s)
    share = torch.sigmoid(x @ w["shared_expert_gate"].T)
    xb = x.to(dt)
    gate = torch.cat([w["switch_mlp.gate_proj"].flatten(0, 1), w["shared_expert.gate_proj"]])
    up = torch.cat([w["switch_mlp.up_proj"].flatten(0, 1), w["shared_expert.up_proj"]])
    down = torch.cat([w["switch_mlp.down_proj"].transpose(1, 2).flatten(0, 1), w["shared_expert.down_proj"].T])
    inner = (F.silu((xb @ gate.T).float()) * (xb @ up.T).float()).unflatten(-1, (s.experts + s.shared // s.inner, s.inner))
    weight = torch.cat([route, share.expand(*share.shape[:-1], s.shared // s.inner)], -1)
    inner = (inner * weight.unsqueeze(-1)).flatten(-2).to(dt)
    axes = tuple(range(p.dim() - 1))
    balance = (mask.float().mean(axes) * p.mean(axes)).sum() * s.experts / s.chosen
    return h + (inner @ down).float(), balance


# ------------------------------------------------------------------ the training form


class Inverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C], by forward substitution. (The product
    of powers (I - A)(I + A^2)(I + A^4)... is shorter, but when many keys of a chunk are alike its
    terms grow like binomials and float32 loses everything.)"""

    @staticmethod
    def forward(ctx, a):
        if a.is_cuda and Scan.kernel:
            out = fused.inverse(a)
        else:
            eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype).expand_as(a)
            out = torch.linalg.solve_triangular(eye + a, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return -(t.mT @ grad @ t.mT)


class Scan(torch.autograd.Function):
    """The serial part of the chunked delta rule over chunks n = 0..N-1, leading axis N:
        Vn = U - W S;   S' = e S + K^T Vn.
    Returns Vn and the state entering each chunk. Everything else is done for all chunks at once."""

    kernel = True  # the fused kernel where there is a GPU

    @staticmethod
    def forward(ctx, u, w, k, e):
        n, b, _, dk = k.shape
        if u.is_cuda and Scan.kernel:
            vn, states = fused.scan(u, w, k, e)
            ctx.save_for_backward(w, k, e, vn, states)
            return vn, states
        states = torch.empty(n, b, dk, u.shape[-1], device=u.device, dtype=u.dtype)
        states[0].zero_()
        vn = torch.empty_like(u)
        for i in range(n):
            torch.baddbmm(u[i], w[i], states[i], alpha=-1, out=vn[i])
            if i + 1 < n:
                torch.baddbmm(e[i] * states[i], k[i].mT, vn[i], out=states[i + 1])
        ctx.save_for_backward(w, k, e, vn, states)
        return vn, states

    @staticmethod
    def backward(ctx, dvn, dstates):
        w, k, e, vn, states = ctx.saved_tensors
        n = k.shape[0]
        # ahead[i]: gradient of the state leaving chunk i
        if k.is_cuda and Scan.kernel:
            dvn, ahead = fused.scan_back(dvn.contiguous(), dstates.contiguous(), w, k, e)
        else:
            dvn, ahead = dvn.clone(), torch.zeros_like(states)
            for i in range(n - 2, -1, -1):
                d = torch.addcmul(dstates[i + 1], e[i + 1], ahead[i + 1])
                torch.baddbmm(d, w[i + 1].mT, dvn[i + 1], alpha=-1, out=ahead[i])
                dvn[i].baddbmm_(k[i], ahead[i])
        dk = vn @ ahead.mT
        de = (states * ahead).sum((-1, -2), keepdim=True)
        return dvn, -(dvn @ states.mT), dk, de


def chunks(x):
    """[B, T, heads, D] -> [N, B * heads, CHUNK, D]"""
    b, t, h, d = x.shape
    return x.view(b, t // CHUNK, CHUNK, h, d).permute(1, 0, 3, 2, 4).reshape(t // CHUNK, b * h, CHUNK, d)


def delta_before(h, pos, w, s, dt):
    """Projections, convolution and everything inside the chunks of a delta-rule layer, but for the
    triangular systems."""
    x = rms(h) * (1 + w["input_layernorm"])
    xb = x.to(dt)
    u = xb @ w["in_proj_qkv"].T
    z = xb @ w["in_proj_z"].T
    beta = torch.sigmoid(x @ w["in_proj_b"].T)
    g = -torch.exp(w["A_log"]) * F.softplus(x @ w["in_proj_a"].T + w["dt_bias"])
    g = torch.where(pos.unsqueeze(-1) == 0, g + RESET, g)
    acc = u.float() * w["conv1d"][:, s.conv - 1]
    for back in range(1, s.conv):  # tap s.conv-1-back meets the token `back` places earlier
        past = F.pad(u[:, :-back].float(), (0, 0, back, 0))
        acc = acc + torch.where((pos >= back).unsqueeze(-1), past, 0.0) * w["conv1d"][:, s.conv - 1 - back]
    c = F.silu(acc)
    kd = s.k_heads * s.lin
    group = s.v_heads // s.k_heads
    q = l2(c[..., :kd].unflatten(-1, (s.k_heads, s.lin))) * s.lin**-0.5
    k = l2(c[..., kd : 2 * kd].unflatten(-1, (s.k_heads, s.lin)))
    v = c[..., 2 * kd :].unflatten(-1, (s.v_heads, s.lin))
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    q, k, v = chunks(q), chunks(k), chunks(v)
    beta, g = chunks(beta.unsqueeze(-1)), chunks(g.unsqueeze(-1)).squeeze(-1)
    cum = g.cumsum(-1)
    low = torch.tril(torch.ones(CHUNK, CHUNK, device=h.device, dtype=torch.bool))
    diff = cum.unsqueeze(-1) - cum.unsqueeze(-2)
    decay = torch.exp(torch.where(low, diff, -torch.inf))
    kb = beta * k
    a = torch.tril(kb @ k.mT * decay, -1)
    grow = torch.exp(cum).unsqueeze(-1)
    p = q @ k.mT * decay
    last = cum[..., -1:]
    e = torch.exp(last).unsqueeze(-1)
    return a, beta * v, kb * grow, k * torch.exp(last - cum).unsqueeze(-1), e, q * grow, p, z


def delta_after(h, qd, p, vn, states, z, w, s, dt):
    """Outputs of the chunks, gated norm, output projection, then the experts."""
    o = qd @ states + p @ vn  # [N, B * heads, CHUNK, lin]
    b, t = h.shape[:2]
    o = o.view(t // CHUNK, b, s.v_heads, CHUNK, s.lin).permute(1, 0, 3, 2, 4).reshape(b, t, s.v_heads, s.lin)
    y = rms(o) * w["norm"] * F.silu(z.float().unflatten(-1, (s.v_heads, s.lin)))
    h = h + (y.flatten(-2).to(dt) @ w["out_proj"].T).float()
    return moe(h, w, s, dt)


def attention_before(h, pos, w, s, dt):
    x = (rms(h) * (1 + w["input_layernorm"])).to(dt)
    return qkv_heads(x, w, pos, s, dt)


def attention_after(h, o, gate, w, s, dt):
    o = (o.float() * torch.sigmoid(gate.float())).flatten(-2).to(dt)
    h = h + (o @ w["o_proj"].T).float()
    return moe(h, w, s, dt)


def attend_masked(q, k, v, pos, cuts, s):
    """Causal attention within documents by an explicit mask (any device)."""
    t = q.shape[1]
    first = torch.arange(t, device=q.device) - pos  # index of the document's first token
    i = torch.arange(t, device=q.device)
    mask = (first.unsqueeze(-1) == first.unsqueeze(-2)) & (i[:, None] >= i[None, :])
    k, v = (x.expand(-1, -1, s.heads, -1) if s.kv_heads == 1 else x.repeat_interleave(s.heads // s.kv_heads, 2) for x in (k, v))
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.unsqueeze(1))
    return o.transpose(1, 2)


def attend_varlen(q, k, v, pos, cuts, s):
    """The same through the variable-length flash kernel; cuts are the document bounds."""
    from torch.nn.attention.varlen import varlen_attn

    b, t = q.shape[:2]
    k, v = (x.expand(-1, -1, s.heads, -1).reshape(b * t, s.heads, s.head) for x in (k, v))
    o = varlen_attn(q.reshape(b * t, s.heads, s.head), k, v, cuts, cuts, t, t, window_size=(-1, 0))
    return o.view(b, t, s.heads, s.head)


def loss_of(h, targets, weights, w, dt):
    x = (rms(h) * (1 + w["norm"])).to(dt)
    logits = (x @ w["lm_head"].T).float()
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (ce * weights.flatten()).sum(), ce


def logits_of(h, w, dt):
    return ((rms(h) * (1 + w["norm"])).to(dt) @ w["lm_head"].T).float()


class Mini(torch.nn.Module):
    def __init__(self, s=Shape(), seed=0, dt=torch.bfloat16, compiled=False, varlen=False):
        super().__init__()
        self.s, self.dt = s, dt
        self.kinds = {n: k for n, (_, k) in tensors(s).items()}
        self.names = list(self.kinds)
        self.p = torch.nn.ParameterDict({n.replace(".", "/"): torch.nn.Parameter(w) for n, w in initial(s, seed).items()})
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.f = {f.__name__: wrap(f) for f in (delta_before, delta_after, attention_before, attention_after, loss_of)}
        self.attend = attend_varlen if varlen else attend_masked

    def named(self):
        return {n: self.p[n.replace(".", "/")] for n in self.names}

    # Kept in float32 for the delta rule's gates and the router.
    FLOAT = ("in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "embed_tokens")

    def prepare(self, quantised):
        """Parameters -> the weights of one forward pass: rounded as stored, then cast. Tensors of
        one class are handled as one flat buffer, which keeps the number of kernels small."""
        named, out = self.named(), {}
        for kind in ("q4", "q8", "norm", "plain"):
            names = [n for n in self.names if self.kinds[n] == kind]
            flat = torch.cat([named[n].reshape(-1) for n in names])
            if quantised:
                flat = stored(flat.view(-1, quant.GROUP) if kind[0] == "q" else flat, kind).view(-1)
            low = flat.to(self.dt) if kind == "q4" else flat
            sizes = [named[n].numel() for n in names]
            for n, x, y in zip(names, flat.split(sizes), low.split(sizes)):
                out[n] = (x if n.endswith(self.FLOAT) else y).view(named[n].shape)
        return out

    def weights(self, quantised):
        flat = self.prepare(quantised)
        layers = []
        for i in range(self.s.layers):
            p = f"layers.{i}."
            cut = ("self_attn.", "linear_attn.", "mlp.")
            layers.append({_short(n[len(p) :], cut): w for n, w in flat.items() if n.startswith(p)})
        return {"embed_tokens": flat["embed_tokens"], "top": {"norm": flat["norm"], "lm_head": flat["lm_head"]}, "layers": layers}

    def hidden(self, ids, pos, cuts, w, states=None):
        h = F.embedding(ids, w["embed_tokens"])
        balance = 0.0
        for i, lw in enumerate(w["layers"]):
            if self.s.full(i):
                q, gate, k, v = self.f["attention_before"](h, pos, lw, self.s, self.dt)
                o = self.attend(q, k, v, pos, cuts, self.s)
                h, b = self.f["attention_after"](h, o, gate, lw, self.s, self.dt)
            else:
                a, bv, bk, k, e, qd, p, z = self.f["delta_before"](h, pos, lw, self.s, self.dt)
                t = Inverse.apply(a)
                vn, st = Scan.apply(t @ bv, t @ bk, k, e)
                h, b = self.f["delta_after"](h, qd, p, vn, st, z, lw, self.s, self.dt)
            if states is not None:
                states.append(h)
            balance = balance + b
        return h, balance / self.s.layers

    def loss(self, ids, targets, weights, pos, cuts, quantised):
        w = self.weights(quantised)
        h, balance = self.hidden(ids, pos, cuts, w)
        total, ce = self.f["loss_of"](h, targets, weights, w["top"], self.dt)
        return total / weights.sum().clamp_min(1), balance, ce


def _short(name, cut):
    for c in cut:
        name = name.removeprefix(c)
    return name


# ------------------------------------------------------------------ the step form


class Stepper:
    """Generation for a batch of rows, one token per row and step, each row from an empty state."""

    def __init__(self, w, s, rows, limit, device):
        self.w, self.s, self.rows = w, s, rows
        kv, cw = (rows, limit, s.kv_heads, s.head), 2 * s.k_heads * s.lin + s.v_heads * s.lin
        self.state = []
        for i in range(s.layers):
            if s.full(i):
                self.state.append([torch.zeros(kv, device=device), torch.zeros(kv, device=device)])
            else:
                st = torch.zeros(rows, s.v_heads, s.lin, s.lin, device=device)
                self.state.append([torch.zeros(rows, s.conv - 1, cw, device=device), st])
        self.n = 0

    def keep(self, rows):
        """Drop finished rows."""
        self.state = [[x[rows] for x in pair] for pair in self.state]
        self.rows = len(rows)

    def step(self, ids):
        """ids [rows] -> logits [rows, vocab], float32 throughout."""
        s, dt = self.s, torch.float32
        h = F.embedding(ids, self.w["embed_tokens"])
        pos = torch.full((self.rows,), self.n, device=ids.device)
        for i, w in enumerate(self.w["layers"]):
            x = rms(h) * (1 + w["input_layernorm"])
            if s.full(i):
                h = h + self.attention(x, w, pos, self.state[i])
            else:
                h = h + self.delta(x, w, self.state[i])
            h, _ = moe(h, w, s, dt)
        self.n += 1
        return logits_of(h, self.w["top"], dt)

    def attention(self, x, w, pos, cache):
        s, n = self.s, self.n + 1
        q, gate, k, v = qkv_heads(x, w, pos, s, torch.float32)
        cache[0][:, self.n], cache[1][:, self.n] = k, v
        group = s.heads // s.kv_heads
        k, v = (c[:, :n].repeat_interleave(group, 2) for c in cache) if s.kv_heads > 1 else (c[:, :n] for c in cache)
        if s.kv_heads == 1:
            score = torch.softmax(torch.einsum("bhd,btd->bht", q, k[:, :, 0]) * s.head**-0.5, -1)
            o = torch.einsum("bht,btd->bhd", score, v[:, :, 0])
        else:
            score = torch.softmax(torch.einsum("bhd,bthd->bht", q, k) * s.head**-0.5, -1)
            o = torch.einsum("bht,bthd->bhd", score, v)
        return (o * torch.sigmoid(gate)).flatten(-2) @ w["o_proj"].T

    def delta(self, x, w, st):
        s = self.s
        u = x @ w["in_proj_qkv"].T
        z = (x @ w["in_proj_z"].T).unflatten(-1, (s.v_heads, s.lin))
        beta = torch.sigmoid(x @ w["in_proj_b"].T)
        decay = torch.exp(-torch.exp(w["A_log"]) * F.softplus(x @ w["in_proj_a"].T + w["dt_bias"]))
        past = torch.cat([st[0], u.unsqueeze(1)], 1)
        c = F.silu((past * w["conv1d"].T).sum(1))
        st[0] = past[:, 1:]
        kd, group = s.k_heads * s.lin, s.v_heads // s.k_heads
        q = (l2(c[:, :kd].unflatten(-1, (s.k_heads, s.lin))) * s.lin**-0.5).repeat_interleave(group, 1)
        k = l2(c[:, kd : 2 * kd].unflatten(-1, (s.k_heads, s.lin))).repeat_interleave(group, 1)
        v = c[:, 2 * kd :].unflatten(-1, (s.v_heads, s.lin))
        state = st[1].mul_(decay[..., None, None])
        d = beta.unsqueeze(-1) * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state += k.unsqueeze(-1) * d.unsqueeze(-2)
        o = torch.einsum("bhk,bhkv->bhv", q, state)
        return (rms(o) * w["norm"] * F.silu(z)).flatten(-2) @ w["out_proj"].T
