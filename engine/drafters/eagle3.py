"""EAGLE-3 head: one Llama layer over norm(embedding) ‖ norm(hidden), trees grown beam by beam.

Row p of the drafter pairs the target's features at position p with the token at p + 1 (formats of the published
heads; SafeAILab and SpecForge layouts).
"""

import torch

from kernels.select import gather_rows
from weights.config import Refused

from ..batch import Batch
from ..cache import Rows
from ..layers import rope
from ..layers.embedding import Embedding, Head
from ..layers.gqa import GQA
from ..layers.linear import Linear
from ..layers.mlp import MLP
from ..layers.norm import Norm


def _borrow(source, name, shape, weight, tp):
    """Note that `name` [rows, columns] comes from the target; Refused where the target's has another shape."""
    has = (weight.shape[0] * tp.size, weight.shape[1])
    if has != shape:
        raise Refused(
            f"{source.checkpoint.where}: no tensor '{name}' {list(shape)} in the draft, and the target's is {list(has)}; "
            "a head may leave it out only where both agree"
        )
    source.borrowed(name, "the target")


class Eagle3:
    """The drafter.

    Args:
        config: weights.config.Eagle3Config; source: weights.Source with canonical names (weights.heads).
        target: a loaded target, whose embedding and head are borrowed where the checkpoint has none.
        length: positions the rotary table covers.
    """

    def __init__(self, config, source, target, length, ops, tp):
        self.config, self.ops = config, ops
        self.cache_rows = Rows(1, 2, config.kv_heads // tp.size, config.head_dim)
        h, eps = config.hidden, config.eps
        self.fc = Linear(source, "fc", h, target.features, ops)
        at = source.prefixed("layers.0.")
        self.embed_norm, self.hidden_norm = (Norm(at, n, h, eps, ops) for n in ("input_layernorm", "hidden_norm"))
        cos_sin = rope.table(config.rope, config.head_dim, config.max_positions, length, source.device)
        attn = at.prefixed("self_attn.")
        bias = config.attention_bias
        self.attention = GQA(attn, None, 2 * h, h, config, cos_sin, ops, tp, qk_norm=False, bias=bias)
        norm = Norm(at, "post_attention_layernorm", h, eps, ops)
        self.mlp = MLP(at.prefixed("mlp."), norm, h, config.intermediate, config.activation, ops, tp)
        self.embedding = self._embedding(source, target, tp)
        self.head = Head(Norm(source, "norm", h, eps, ops), self._head_weight(source, target, tp), ops, tp)
        self.to_target = self._vocabulary_map(source)

    def _embedding(self, source, target, tp):
        name, shape = "embed_tokens.weight", (self.config.vocab, self.config.hidden)
        if source.optional(name):
            return Embedding(source, "embed_tokens", *shape, tp)
        _borrow(source, name, shape, target.embedding.weight, tp)
        return target.embedding

    def _head_weight(self, source, target, tp):
        name, shape = "lm_head.weight", (self.config.draft_vocab, self.config.hidden)
        if source.optional(name):
            return source.take(name, shape, cut=0)
        if self.config.tied and self.config.draft_vocab == self.config.vocab:
            source.borrowed(name, "the draft's own embedding (tied)")
            return self.embedding.weight
        _borrow(source, name, shape, target.head.weight, tp)
        return target.head.weight

    def _vocabulary_map(self, source):
        """[Vd] int64 offsets from draft ids to target ids, or None where the vocabularies are one."""
        source.alias("t2d")
        if self.config.draft_vocab == self.config.vocab and not source.optional("d2t"):
            return None
        return source.take("d2t", (self.config.draft_vocab,), dtype=torch.int64)

    def forward(self, tokens, hidden, batch, cache):
        """One pass: tokens [B*T] and the hidden before each [B*T, h] -> the hidden after it [B*T, h]."""
        x = self.ops.draft_input(
            self.embedding(tokens), self.embed_norm.weight, hidden, self.hidden_norm.weight, self.config.eps
        )
        return self.mlp(self.attention(x, hidden, batch, cache.layer("draft", 0), cache.page_size))

    def extend(self, batch, features, cache):
        """Rows of committed text with the target's features [B*T, F] -> hidden [B*T, h]."""
        return self.forward(batch.tokens.reshape(-1), self.fc(features), batch, cache)

    def best(self, hidden, k):
        """hidden [B, Q, h] -> logits [B, Q, k], target ids [B, Q, k], lse [B, Q]."""
        b, q, h = hidden.shape
        values, ids, lse = self.head(hidden.reshape(b * q, h), k)
        if self.to_target is not None:
            ids = ids + self.to_target[ids]
        return values.view(b, q, k), ids.view(b, q, k), lse.view(b, q)

    def propose(self, state, tree, cache):
        """Extend over the backlog, then grow the tree: steps passes in all, the first one over known tokens."""
        shape, n = tree.shape, state.seq_lens
        width, k = shape.path, shape.topk
        start = n - state.backlog
        batch = Batch.causal(state.backlog_tokens[:, :width], start, state.pages)
        features = state.backlog_features[:, :width].flatten(0, 1)
        hidden = self.extend(batch, features, cache).view(state.batch, width, -1)
        hidden = gather_rows(hidden, (state.backlog - 1).clamp(min=0)[:, None])  # B 1 h

        pool = self._pool(n, shape)
        beam = torch.arange(k, device=n.device)
        scores, nodes = torch.zeros_like(pool[0][:, :1]), torch.full_like(n, -1)[:, None]
        tokens, scores, nodes, source = self.ops.grow(*self.best(hidden, k), scores, nodes, pool, 0)
        bits = torch.zeros_like(tokens)
        for step in range(1, shape.steps):
            hidden, bits = gather_rows(hidden, source), bits.gather(1, source)
            own = (step - 1) * k + beam  # the root has no row here: the extend pass wrote it
            bits = bits | (torch.ones_like(bits) << own)
            position, index = (n + step - 1)[:, None].repeat(1, k), n[:, None] + own
            batch = Batch(tokens, position, index, state.pages, n, bits)
            hidden = self.forward(tokens.reshape(-1), hidden.flatten(0, 1), batch, cache).view(state.batch, k, -1)
            values, ids, lse = self.best(hidden, k)
            offset = k + (step - 1) * k * k
            tokens, scores, nodes, source = self.ops.grow(values, ids, lse, scores, nodes, pool, offset)
        tree.tokens[:, 0] = state.root
        self.ops.choose(pool, tree.tokens, tree.parents)

    def _pool(self, like, shape):
        """Scores, tokens and parents of all candidates, each [B, M]."""
        size = (like.shape[0], shape.candidates)
        return like.new_zeros(size, dtype=torch.float32), like.new_zeros(size), like.new_zeros(size)
