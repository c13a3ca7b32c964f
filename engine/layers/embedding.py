"""Token embedding and output head, both cut over the vocabulary."""


class Embedding:
    """Token ids [N] -> rows [N, D]. Each rank holds V/size rows; foreign ids contribute zero to the sum."""

    def __init__(self, source, name, vocabulary, hidden, ops, tp):
        self.weight, self.ops, self.tp = source.take(f"{name}.weight", (vocabulary, hidden), cut=0), ops, tp
        self.name, self.vocabulary = source.prefix + name, vocabulary

    def __call__(self, tokens):
        """Ids below zero (no proposal) read row 0."""
        return self.ops.embed(tokens, self.weight) if self.tp.size == 1 else self._summed(tokens)

    def deferred(self, tokens):
        """(ids [N], table [V, D]) for an operation that looks rows up itself; (None, the rows) where ranks add up."""
        return (tokens, self.weight) if self.tp.size == 1 else (None, self._summed(tokens))

    def _summed(self, tokens):
        rows = self.weight.shape[0]
        return self.tp.all_reduce(self.ops.embed_share(self.tp.known(tokens, rows), self.weight, self.tp.rank * rows))


class Head:
    """Final norm, projection and the best k ids; ranks exchange (value, id) pairs, never logits."""

    def __init__(self, norm, weight, ops, tp, *, name=None):
        """norm: layers.norm.Norm; weight: [V/size, D] this rank's rows, e.g. an Embedding's where they are tied; name:
        its full name in the checkpoint, None where it is another module's."""
        self.norm, self.weight, self.ops, self.tp, self.name = norm, weight, ops, tp, name

    @property
    def vocabulary(self):
        """V over all ranks."""
        return self.weight.shape[0] * self.tp.size

    def __call__(self, x, k=1, logits=None):
        """x [N, D] -> values [N, k], ids [N, k], lse [N]; logits [N, V] fp32 written where given (kernels.head)."""
        rows = self.weight.shape[0]
        if self.tp.size == 1:
            return self.ops.head(x, self.norm.weight, self.norm.eps, self.weight, k, logits)
        share = None if logits is None else logits.new_empty(x.shape[0], rows)
        values, ids, lse = self.ops.head(x, self.norm.weight, self.norm.eps, self.weight, min(k, rows), share)
        if logits is not None:
            logits.copy_(self.tp.all_gather(share))
        found = self.ops.pack_bests(values, ids, lse, self.tp.rank * rows)
        return self.ops.merge_bests(self.tp.gather(found), k)
