"""A shape that chooses itself: which shapes an engine may take, what each costs here, what its requests have shown."""

import weakref

from weights.config import Refused

from . import measure
from .chooser import Chooser, Experience
from .shape import PLAIN, Shape

AUTO = "auto"  # in place of a Shape
GRID = tuple(map(Shape.parse, "1-1-2 2-1-3 3-1-4 5-1-6 7-1-8 2-2-5 3-2-7 3-4-8 4-4-16".split()))


class Auto:
    """Makes choosers for the sessions of an engine; what they learn serves the next.

    Args:
        shapes: those it may take besides plain decoding, () for those of GRID that the pair can run; costs:
        engine.cost.CostTable, None to measure one for every batch size when it is first needed.

    origin: {batch: where its costs come from, in words}.
    """

    def __init__(self, engine, shapes=(), costs=None):
        self.engine, self.shapes, self.costs = engine, shapes, costs
        self.named = weakref.ref(engine.drafter) if engine.drafter is not None else None  # what engine.options name
        self.forget()

    def forget(self):
        """Another drafter: its costs and what it keeps are not known yet."""
        self.tables, self.origin, self.experience = {}, {}, None

    def candidates(self):
        """Plain decoding and what else may be taken. Raises Refused where there is no draft."""
        if self.engine.drafter is None:
            raise Refused(f"shape {AUTO}: there is no draft; supported without: {PLAIN}")
        return (PLAIN, *(s for s in self.shapes or GRID if s != PLAIN and (self.shapes or self.engine.fits(s))))

    def table(self, batch):
        """The cost table of so many requests at once."""
        if batch not in self.tables:
            given = self.costs and (self.costs, "given")
            self.tables[batch], self.origin[batch] = given or measure.table(self.engine, self.candidates(), batch)
        return self.tables[batch]

    def said(self):
        """Where the costs come from, a line."""
        return "; ".join(f"at batch {batch} {words}" for batch, words in sorted(self.origin.items()))

    def chooser(self, batch, rule):
        """For one session; sampled tokens shall not depend on the shape, so that a seed gives the same ids however the
        shape is chosen: trees draw as plain decoding does, chains do not. Raises Refused where that leaves nothing."""
        shapes = [s for s in self.candidates() if not rule.drafts or s == PLAIN or s.topk > 1]
        if shapes == [PLAIN]:
            raise Refused(f"shape {AUTO}: sampling takes trees (topk above 1), and there is none among the shapes")
        if self.experience is None or set(self.experience.shapes) != set(self.candidates()):
            self.experience = Experience(self.candidates())
        return Chooser(self.table(batch), shapes, self.experience)
