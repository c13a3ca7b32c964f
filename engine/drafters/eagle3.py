"""EAGLE-3 head of the Llama type: a layer over norm(embedding) ‖ norm(hidden), perhaps ordinary layers after it, and
trees grown beam by beam.

Row p pairs the target's features at position p with the token at p + 1. Of that row

    g = fusion(features)                                  first pass over a row: fc, perhaps with norms before it
    g = recycled hidden of row p - 1                      later steps: before or after the final norm
    x = input_layernorm(embedding) ‖ hidden_norm(g)       r = g, or hidden_norm(g) (norm_before_residual)
    r = r + attention(x); r = r + MLP(post_attention_layernorm(r)); further layers over r
    logits = lm_head(norm(r))

as in the published heads' own loaders (EAGLE cnets.py; SGLang and vLLM llama_eagle3.py; TensorRT-LLM
modeling_speculative.py); weights.eagle3 reads the switches.
"""

import copy
import dataclasses

import torch

from weights.config import Refused

from ..batch import Batch
from ..cache import Rows
from ..layers import rope
from ..layers.block import block
from ..layers.embedding import Embedding, Head
from ..layers.mlp import dense
from ..layers.norm import Norm
from .fusion import FUSIONS, Identity, Reordered


def _borrow(source, name, shape, weight, tp):
    """Note that `name` [rows, columns] comes from the target; Refused where the target's has another shape."""
    has = (weight.shape[0] * tp.size, weight.shape[1])
    if has != shape:
        raise Refused(
            f"{source.where}: no tensor '{name}' {list(shape)} in the draft, and the target's is {list(has)}; "
            "a head may leave it out only where both agree"
        )
    source.borrowed(name, "the target")


def _own_norm(source, number):
    """Name of the norm before the attention of a layer after the first: `input_layernorm` (speculators, vLLM) or
    `hidden_norm` (SGLang, TensorRT-LLM, ModelOpt). Refused: both, or neither."""
    names = ("input_layernorm", "hidden_norm")
    stored = [name for name in names if source.optional(f"{name}.weight")]
    if len(stored) != 1:
        raise Refused(
            f"{source.where}: layer {number} of the head has {'both' if stored else 'neither'} of the tensors "
            f"{' and '.join(f'{name}.weight' for name in names)}, expected exactly one"
        )
    return stored[0]


class Eagle3:
    """The drafter.

    Args:
        config: weights.config.Eagle3Config; source: weights.Source with canonical names (weights.heads).
        target: a loaded target, whose embedding and head are borrowed where the checkpoint has none.
        length: positions the rotary table covers.
    """

    def __init__(self, config, source, target, length, ops, tp):
        self.config, self.ops = config, ops
        self.in_step = tp.size > 1  # what it proposes comes of numbers gathered from all ranks
        self.cache_rows = self.rows(tp)
        h, eps = config.hidden, config.eps
        source.ignore("verifier_*")  # speculators keeps the target's norm and head beside its own while training
        for _, guess in config.guesses:
            source.guess(guess)
        self.fusion = FUSIONS[config.fusion](source, config, target.features, ops)
        at = source.prefixed("layers.0.")
        self.embed_norm, self.hidden_norm = (Norm(at, n, h, eps, ops) for n in ("input_layernorm", "hidden_norm"))
        self.normed = config.norm_before_residual
        cos_sin = rope.table(config.rope, config.head_dim, config.max_positions, length, source.device)
        self.layers = [self._layer(source, i, cos_sin, ops, tp) for i in range(config.layers)]
        self.embedding = self._embedding(source, target, tp)
        norm = Norm(source, "norm", h, eps, ops, gain=config.logit_scale)
        self.head = Head(norm, self._head_weight(source, target, tp), ops, tp)
        # the final norm itself, unless that scales logits too
        self.recycled = norm if config.logit_scale == 1 else Norm(source, "norm", h, eps, ops)
        self.recycle = self._recycle(config.recycle)
        self.to_target = self._vocabulary_map(source)

    def rows(self, tp):
        """What the cache keeps for a position on this rank."""
        return Rows(self.config.layers, 2, tp.share(self.config.kv_heads), self.config.head_dim)

    def _layer(self, source, number, cos_sin, ops, tp):
        """Layer 0 takes the joined input, normed; a later one the residual stream, which it norms itself."""
        hidden, at = self.config.hidden, source.prefixed(f"layers.{number}.")
        norm = Norm(at, _own_norm(at, number), hidden, self.config.eps, ops) if number else None
        return self.layer(number, at, norm, hidden if number else 2 * hidden, cos_sin, ops, tp)

    def layer(self, number, at, norm, width, cos_sin, ops, tp):
        """layers.block.Block of names below `at`; norm, width: of its attention's input, norm None: it comes normed."""
        config = self.config
        # not every trainer of heads with biases of q, k and v has one here: the file decides
        out_bias = config.attention_bias and at.optional("self_attn.o_proj.bias")

        def mlp(source, norm):
            return dense(source.prefixed("mlp."), norm, config, ops, tp)

        window = config.windows[number]
        return block(at, norm, width, config, cos_sin, mlp, ops, tp, out_bias=out_bias, window=window)

    def _recycle(self, kind):
        """What the next step's hidden goes through."""
        return {"pre-norm": Identity(), "post-norm": self.recycled}[kind]

    def read_as(self, order, norm_before_residual, recycle):
        """The same weights under another reading of what a head's file may leave open, nothing copied.

        Args:
            order: for each feature that the head joins, its place among those handed in.
        """
        twin = copy.copy(self)
        twin.config = dataclasses.replace(self.config, norm_before_residual=norm_before_residual, recycle=recycle)
        twin.normed, twin.recycle = norm_before_residual, self._recycle(recycle)
        if list(order) != sorted(order):
            twin.fusion = Reordered(self.fusion, order)
        return twin

    def _embedding(self, source, target, tp):
        name, shape = "embed_tokens.weight", (self.config.vocab, self.config.hidden)
        if source.optional(name):
            return Embedding(source, "embed_tokens", *shape, self.ops, tp)
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

    def forward(self, tokens, hidden, batch, cache, source=None):
        """One pass: tokens [B*T] and the hidden before each -> the hidden after it [B*T, h], before the final norm.

        hidden: [B*T, h]; with source [B, T], [B*Q, h]: row t of a sequence goes on from its row source[t]. Where
        batch.wanted names a row, the last layer keeps keys and values of all and hands out that row alone [1, h].
        """
        x, hidden = self.ops.draft_input(
            *self.embedding.deferred(tokens),
            self.embed_norm.weight,
            hidden,
            source,
            self.hidden_norm.weight,
            self.config.eps,
            self.normed,
        )
        whole, last = batch.whole, len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = hidden = layer(x, hidden, batch if i == last else whole, cache.layer("draft", i), cache.page_size)
        return hidden

    def extend(self, batch, features, cache):
        """Rows of committed text with the target's features [B*T, F] -> hidden [B*T, h]."""
        return self.forward(batch.tokens.reshape(-1), self.fusion(features), batch, cache)

    def foresee(self, batch, features, cache):
        """`extend`, and the token it proposes after each row [B, T]."""
        hidden = self.extend(batch, features, cache).view(*batch.tokens.shape, -1)
        return self.in_target(self.best(hidden, 1)[1][..., 0])

    def best(self, hidden, k):
        """hidden [B, Q, h] -> logits [B, Q, k], ids of the draft's vocabulary [B, Q, k], lse [B, Q]."""
        b, q, h = hidden.shape
        values, ids, lse = self.head(hidden.reshape(b * q, h), k)
        return values.view(b, q, k), ids.view(b, q, k), lse.view(b, q)

    def in_target(self, ids):
        """Ids of the draft's vocabulary as the target's."""
        return ids if self.to_target is None else ids + self.to_target[ids]

    def candidates(self, hidden, k, step, state, tree):
        """Children of each beam as `best` gives them; of a sampled chain the one drawn, its distribution in tree.q.

        All drawn children score the same, so that a chain that is cut keeps its beginning.
        """
        if tree.q is None:
            return self.best(hidden, k)
        logits = hidden.new_empty(hidden.shape[0], self.head.vocabulary, dtype=torch.float32)
        _, ids, lse = self.head(hidden[:, 0], 1, logits)
        position = state.seq_lens + step + 1
        ids, q = tree.rule.propose(self.ops, ids[:, 0], logits, lse, position, state.draws)
        if step < tree.shape.draft_tokens - 1:
            tree.q[:, step].index_add_(1, self.in_target(torch.arange(q.shape[1], device=q.device)), q)
        return lse[:, None, None], ids[:, None, None], lse[:, None]

    def propose(self, state, tree, cache):
        """Extend over the backlog, then grow the tree: steps passes in all, the first one over known tokens."""
        shape, n, ops = tree.shape, state.seq_lens, self.ops
        width, k = shape.path, shape.topk
        start, at = ops.behind(n, state.backlog, width)
        batch = Batch(state.backlog_tokens[:, :width], at, at, state.pages, start, None)
        features = state.backlog_features[:, :width].flatten(0, 1)
        hidden = self.extend(batch, features, cache).view(state.batch, width, -1)
        hidden, beam = ops.last(hidden, state.backlog), None  # of the root, which has no row of its own in later passes

        pool = self._pool(n, shape)
        for step in range(shape.steps):
            found = self.candidates(hidden.view(state.batch, -1, hidden.shape[1]), k, step, state, tree)
            tokens, source, position, index, beam = ops.grow(*found, self.to_target, n, beam, pool, step)
            if step + 1 < shape.steps:
                batch = Batch(tokens, position, index, state.pages, n, beam[2])
                hidden = self.forward(tokens.reshape(-1), self.recycle(hidden), batch, cache, source)
        ops.choose(pool, state.root, tree.tokens, tree.parents)

    def _pool(self, like, shape):
        """Scores, tokens and parents of all candidates, each [B, M], written as they are drafted."""
        size = (like.shape[0], shape.candidates)
        return like.new_empty(size, dtype=torch.float32), like.new_empty(size), like.new_empty(size)
