"""Log-probabilities of emitted tokens: log-softmax of the target's logits, before temperature and filters."""

import torch

from kernels.select import gather_rows, largest

LOWEST = torch.finfo(torch.float32).min  # what JSON can hold of -inf


def wanted(samplings):
    """Most log-probabilities that any of these engine.request.Sampling asks for a token, None where none does."""
    return max((s.logprobs for s in samplings if s.logprobs is not None), default=None)


class Logprobs:
    """The numbers of one pass on their way to the host, computed where the logits are.

    Args:
        logits: [B, P, V] fp32 rows under emitted tokens; lse: [B, P] of them; ids: [B, P] the tokens; most: how many of
        the greatest are wanted of any row.
    """

    def __init__(self, logits, lse, ids, most):
        chosen = (logits.gather(2, ids[..., None])[..., 0] - lse).clamp(min=LOWEST)
        values, top = logits[..., :0], ids[..., None][..., :0]
        if most:
            values, top = largest(logits.nan_to_num(nan=LOWEST), most)
        self.event, found = None, (chosen, (values - lse[..., None]).clamp(min=LOWEST), top)
        if not logits.is_cuda:
            self.blocks = found
            return
        self.blocks = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in found)
        for block, x in zip(self.blocks, found, strict=True):
            block.copy_(x, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    @classmethod
    def of(cls, tree, emitted, most):
        """Those of a cycle's path; emitted: [B, P] or wider."""
        width = tree.path.shape[1]
        return cls(gather_rows(tree.logits, tree.path), tree.lse.gather(1, tree.path), emitted[:, :width], most)

    def entries(self, slot, tokens, most):
        """One {token_id, logprob, top: [[id, logprob], ...]} a token, `most` of the greatest each."""
        if self.event is not None:
            self.event.synchronize()
        chosen, values, top = (x[slot, : len(tokens)].tolist() for x in self.blocks)
        rows = zip(tokens, chosen, values, top, strict=True)
        return [
            {"token_id": token, "logprob": own, "top": [[i, v] for i, v in zip(ids[:most], best[:most], strict=True)]}
            for token, own, best, ids in rows
        ]
