"""The shape of a speculative cycle: how deep, how wide and how many nodes the draft tree has."""

from dataclasses import dataclass

from weights.config import Refused

MAX_NODES = 64  # one 64-bit ancestor set a node


@dataclass(frozen=True, order=True)
class Shape:
    """`steps` draft passes of `topk` candidates, `draft_tokens` nodes verified, the root among them.

    Shape(0, 1, 1) is plain decoding. Raises Refused when the nodes asked for are more than the passes can offer.
    """

    steps: int
    topk: int
    draft_tokens: int

    def __post_init__(self):
        for name in ("steps", "topk", "draft_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < (0 if name == "steps" else 1):
                least = 0 if name == "steps" else 1
                raise Refused(f"shape: {name} is {value!r}; supported: whole numbers from {least}")
        if self.steps == 0:
            if (self.topk, self.draft_tokens) != (1, 1):
                raise Refused(f"shape {self}: steps 0 is plain decoding; supported: topk 1, draft_tokens 1")
            return
        candidates = self.topk + (self.steps - 1) * self.topk**2
        most = min(MAX_NODES, 1 + candidates)
        if not 1 < self.draft_tokens <= most:
            raise Refused(
                f"shape {self}: draft_tokens is {self.draft_tokens}; supported: 2 to {most} "
                f"(the root and {candidates} candidates, {MAX_NODES} nodes at the most)"
            )
        if (self.steps - 1) * self.topk > MAX_NODES:
            raise Refused(f"shape {self}: (steps - 1) * topk is {(self.steps - 1) * self.topk}; at most {MAX_NODES}")

    @classmethod
    def parse(cls, text):
        """'3-1-4' or '3,1,4' -> Shape(3, 1, 4)."""
        parts = text.replace(",", "-").split("-")
        if len(parts) != 3 or not all(p.strip().isdigit() for p in parts):
            raise Refused(f"shape {text!r}: supported: STEPS-TOPK-DRAFT_TOKENS, e.g. 3-1-4")
        return cls(*(int(p) for p in parts))

    @property
    def path(self):
        """Most tokens one cycle can emit: the accepted path and the bonus token."""
        return min(self.steps + 1, self.draft_tokens)

    @property
    def candidates(self):
        """Size of the pool that the drafted nodes are chosen from."""
        return self.topk + (self.steps - 1) * self.topk**2 if self.steps else 0

    @property
    def rows_past_prefix(self):
        """Cache rows a cycle may write past the committed prefix."""
        return max(self.draft_tokens, (self.steps - 1) * self.topk)

    def __str__(self):
        return f"{self.steps}-{self.topk}-{self.draft_tokens}"


PLAIN = Shape(0, 1, 1)
