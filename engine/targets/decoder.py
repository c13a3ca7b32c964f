"""What targets of grouped-query attention share: embedding, layers, head, and the features they hand out."""

from weights.capture import FINAL

from ..cache import Rows
from ..layers import rope
from ..layers.block import block
from ..layers.embedding import Embedding, Head
from ..layers.norm import Norm


class Decoder:
    """A target; a subclass says what a layer's MLP is: `mlp(number, source of the layer's names, norm, ops, tp)`.

    Args:
        config: a weights.targets.DecoderConfig; source: weights.Source.
        boundaries: B_k handed out, ascending, weights.capture.FINAL last; length: positions the rotary table covers.
        experts_format: an object of weights.formats.
    """

    def __init__(self, config, source, boundaries, length, experts_format, ops, tp):
        self.config, self.boundaries, self.experts_format = config, boundaries, experts_format
        self.cache_rows = self.rows(tp)
        self.embedding = Embedding(source, "model.embed_tokens", config.vocab, config.hidden, ops, tp)
        cos_sin = rope.table(config.rope, config.head_dim, config.max_positions, length, source.device)
        self.layers = [self._layer(source, i, cos_sin, ops, tp) for i in range(config.layers)]
        norm = Norm(source, "model.norm", config.hidden, config.eps, ops)
        if config.tied:
            source.alias("lm_head.weight")
            weight, name = self.embedding.weight, None
        else:
            name = source.prefix + "lm_head.weight"
            weight = source.take("lm_head.weight", (config.vocab, config.hidden), cut=0)
        self.head = Head(norm, weight, ops, tp, name=name)

    @property
    def features(self):
        """Width of the boundaries handed out, side by side."""
        return len(self.boundaries) * self.config.hidden

    def rows(self, tp):
        """What the cache keeps for a position on this rank."""
        return Rows(self.config.layers, 2, tp.share(self.config.kv_heads), self.config.head_dim)

    def _layer(self, source, number, cos_sin, ops, tp):
        at = source.prefixed(f"model.layers.{number}.")
        norm = Norm(at, "input_layernorm", self.config.hidden, self.config.eps, ops)
        return self.layer(number, at, norm, cos_sin, ops, tp)

    def layer(self, number, source, norm, cos_sin, ops, tp):
        """layers.block.Block of names below `source`; norm: before its attention."""
        config = self.config

        def mlp(source, norm):
            return self.mlp(number, source, norm, ops, tp)

        kind = {"out_bias": config.out_bias, "window": config.windows[number], "sinks": config.sinks}
        return block(source, norm, config.hidden, config, cos_sin, mlp, ops, tp, **kind)

    def forward(self, batch, cache):
        """-> residual stream after the last layer [B*T, D], of each boundary [B*T, D] in ascending order.

        Of that layer nothing but keys and values and the row batch.wanted [1, D] is computed where a row is named and
        no feature needs more."""
        x = self.embedding(batch.tokens.reshape(-1))
        aux = [x] if 0 in self.boundaries else []
        whole, last = batch.whole, len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            rows = batch if i == last and not {last + 1, FINAL} & set(self.boundaries) else whole
            x = layer(x, x, rows, cache.layer("target", i), cache.page_size)
            if i + 1 in self.boundaries:
                aux.append(x)
        if FINAL in self.boundaries:
            aux.append(self.head.norm(x))
        return x, tuple(aux)
