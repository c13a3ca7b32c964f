"""A plain EAGLE-3 head of the Llama type, written from the published formula and from nothing of ours: no cache, no
pages, one pass over the whole text for every step. Weights under their speculators names."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Head:
    """What a head computes, in sizes and switches."""

    hidden: int = 64
    target: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    vocab: int = 64
    draft_vocab: int = 32
    eps: float = 1e-5
    theta: float = 10000.0
    partial: float = 1.0
    layers: int = 1
    window: int | None = None  # of the first layer
    features: int = 3
    fusion: str = "plain"  # "input_norm", "fc_norm", "none"
    residual_normed: bool = False
    post_norm: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    fc_bias: bool = False
    mlp_bias: bool = False
    scale: float = 1.0

    def shapes(self):
        """{name: shape} of every tensor, id tables left out."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide, out = self.features * self.target, {}
        if self.fusion != "none":
            out["fc.weight"] = (h, wide)
        if self.fc_bias:
            out["fc.bias"] = (h,)
        if self.fusion == "input_norm":
            out["input_norm.weight"] = (wide,)
        if self.fusion == "fc_norm":
            out |= {f"fc_norm.{j}.weight": (self.target,) for j in range(self.features)}
        for i in range(self.layers):
            at, width = f"layers.{i}.", h if i else 2 * h
            out |= {f"{at}self_attn.{n}_proj.weight": (rows, width) for n, rows in zip("qkv", (q, kv, kv), strict=True)}
            out[f"{at}self_attn.o_proj.weight"] = (h, q)
            out |= {f"{at}mlp.{n}_proj.weight": (self.intermediate, h) for n in ("gate", "up")}
            out[f"{at}mlp.down_proj.weight"] = (h, self.intermediate)
            norms = ("input_layernorm", "post_attention_layernorm") + (() if i else ("hidden_norm",))
            out |= {f"{at}{n}.weight": (h,) for n in norms}
            if self.qk_norm:
                out |= {f"{at}self_attn.{n}_norm.weight": (self.head_dim,) for n in "qk"}
            if self.qkv_bias:
                out |= {f"{at}self_attn.{n}_proj.bias": (r,) for n, r in zip("qkv", (q, kv, kv), strict=True)}
            if self.o_bias:
                out[f"{at}self_attn.o_proj.bias"] = (h,)
            if self.mlp_bias:
                out |= {f"{at}mlp.{n}_proj.bias": (self.intermediate,) for n in ("gate", "up")}
                out[f"{at}mlp.down_proj.bias"] = (h,)
        return out | {
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab, h),
            "embed_tokens.weight": (self.vocab, h),
        }

    def tensors(self, seed, dtype):
        """Random tensors of all names, and offsets of an id table spread over the vocabulary."""
        draw, out = torch.Generator().manual_seed(seed), {}
        for name, shape in self.shapes().items():
            x = torch.randn(shape, generator=draw)
            if name.endswith("bias"):
                x = 0.3 * x
            elif "norm" in name:
                x = 1 + 0.4 * x
            else:
                x = x * (8 if name.startswith("embed") else 1.5) * shape[-1] ** -0.5
            out[name] = x.to(dtype)
        if self.draft_vocab < self.vocab:
            known = torch.arange(self.draft_vocab)
            out["d2t"] = known * self.vocab // self.draft_vocab - known
            out["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, known + out["d2t"], True)
        return out


class Reference:
    """`head` with the weights w (any float dtype, computed in fp32)."""

    def __init__(self, head, w):
        self.head, self.w = head, {n: t if n in ("d2t", "t2d") else t.float() for n, t in w.items()}

    def rms(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.head.eps).sqrt() * self.w[name + ".weight"]

    def linear(self, x, name):
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def fuse(self, features):
        h = self.head
        if h.fusion == "none":
            return features
        if h.fusion == "input_norm":
            features = self.rms(features, "input_norm")
        if h.fusion == "fc_norm":
            split = features.view(len(features), h.features, h.target).unbind(1)
            features = torch.cat([self.rms(x, f"fc_norm.{j}") for j, x in enumerate(split)], 1)
        return self.linear(features, "fc")

    def attention(self, x, at, layer):
        h, n = self.head, len(x)
        q, k, v = (self.linear(x, f"{at}self_attn.{p}_proj").view(n, -1, h.head_dim) for p in "qkv")
        if h.qk_norm:
            q, k = (self.rms(y, f"{at}self_attn.{p}_norm") for y, p in ((q, "q"), (k, "k")))
        turned = int(h.head_dim * h.partial)
        pairs = torch.arange(turned // 2).double()
        angle = (torch.arange(n).double()[:, None] * h.theta ** (-2 * pairs / turned)).float()[:, None]

        def rope(y):
            a, b, rest = y.split([turned // 2, turned // 2, h.head_dim - turned], -1)
            cos, sin = angle.cos(), angle.sin()
            return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)

        group = h.heads // h.kv_heads
        k, v = (y.repeat_interleave(group, 1) for y in (rope(k), v))
        score = torch.einsum("ihd,jhd->hij", rope(q), k) / h.head_dim**0.5
        i, j = torch.arange(n)[:, None], torch.arange(n)
        hidden = j > i
        if h.window and layer == 0:
            hidden = hidden | (j <= i - h.window)
        weights = score.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.linear(torch.einsum("hij,jhd->ihd", weights, v).flatten(1), f"{at}self_attn.o_proj")

    def layers(self, tokens, g):
        """Rows of the last layer, before the final norm: tokens [n], the hidden before each [n, h]."""
        h, r = self.head, None
        for i in range(h.layers):
            at = f"layers.{i}."
            if i == 0:
                normed = self.rms(g, at + "hidden_norm")
                x = torch.cat([self.rms(self.w["embed_tokens.weight"][tokens], at + "input_layernorm"), normed], 1)
                r = normed if h.residual_normed else g
            else:
                x = self.rms(r, at + "input_layernorm")
            r = r + self.attention(x, at, i)
            y = self.rms(r, at + "post_attention_layernorm")
            gate, up = self.linear(y, at + "mlp.gate_proj"), self.linear(y, at + "mlp.up_proj")
            r = r + self.linear(F.silu(gate) * up, at + "mlp.down_proj")
        return r

    def draft(self, text, features, steps, path=()):
        """Logits [steps, Vd] of a chain drafted after `text` (n + 1 ids, features [n or more, F] under the first n): it
        follows `path`, then its own best token."""
        tokens, g, out = list(text[1:]), self.fuse(features[: len(text) - 1]), []
        for step in range(steps):
            last = self.layers(torch.tensor(tokens), g)[-1]
            normed = self.rms(last, "norm")
            out.append(F.linear(normed, self.w["lm_head.weight"]) * self.head.scale)
            tokens.append(path[step] if step < len(path) else self.ids[int(out[-1].argmax())])
            g = torch.cat([g, (normed if self.head.post_norm else last)[None]])
        return torch.stack(out)

    @property
    def ids(self):
        """Target id of each draft id."""
        known = torch.arange(self.head.draft_vocab)
        return (known + self.w["d2t"] if "d2t" in self.w else known).tolist()
