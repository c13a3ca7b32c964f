"""The programs of an engine: states, trees and cycles that are built once and captured on first use."""

import torch

from .buffers import State, Tree
from .cycle import CATCH_UP, CatchUp, Cycle
from .layers.view import view
from .pieces import Pieces
from .profile import Stamped
from .rules import Greedy
from .shape import PLAIN

GREEDY = Greedy()


class Programs:
    """States, trees and cycles by (batch, shape, rule and what is kept), allocated on first use.

    Args:
        parts: engine.loading.Parts; columns: width of the page table; graphs: engine.graph.Graphs.
    """

    def __init__(self, parts, columns, graphs):
        self.parts, self.columns, self.graphs = parts, columns, graphs
        self.states, self.cycles, self.catch_ups, self.views, self.pieces = {}, {}, {}, {}, None

    def state(self, batch):
        """The State of `batch` slots."""
        if batch not in self.states:
            p = self.parts
            self.states[batch] = State.allocate(batch, self.columns, p.target.features, p.dtype, p.device)
        return self.states[batch]

    def cycle(self, batch, shape, drafter, *, detail, stamped, rule=GREEDY):
        """The cycle of one shape; `drafter` None remembers nothing for a drafter, `detail` keeps all logits, `stamped`
        times its stages."""
        detail = detail or rule.logits
        key = (batch, shape, id(drafter), rule, detail, stamped)
        if key not in self.cycles:
            p = self.parts
            vocabulary = p.target.head.vocabulary if detail else None
            tree = Tree.allocate(batch, shape, p.target.features, p.dtype, p.device, vocabulary, rule)
            cycle = Cycle(p.target, drafter, p.cache, self.state(batch), tree, p.ops, p.tp)
            self.cycles[key] = Stamped(cycle, p.ops.stamp) if stamped else cycle
        return self.cycles[key]

    def drop_stamped(self):
        """Let go of cycles that time their stages."""
        self.graphs.forget([self.cycles.pop(key) for key in list(self.cycles) if key[-1]])

    def drop(self, drafter):
        """Let go of a drafter: its cycles and their captures."""
        own = [(programs, key, at) for programs, at in ((self.cycles, 2), (self.catch_ups, 1)) for key in programs]
        gone = [programs.pop(key) for programs, key, at in own if drafter is not None and key[at] == id(drafter)]
        self.graphs.forget(gone)
        self.views.pop(id(drafter), None)

    def forget(self):
        """Drop captures and views: tensors of the models have been replaced."""
        self.graphs.forget()
        self.views.clear()
        self.pieces = None

    def for_prompts(self, drafter):
        """The target and a drafter (or None) as a prompt's passes call them: the same weights, maybe other kernels."""
        return tuple(self._view(model) for model in (self.parts.target, drafter))

    def _view(self, model):
        if self.parts.prompt_ops is self.parts.ops:
            return model
        if id(model) not in self.views or self.views[id(model)][0] is not model:
            self.views[id(model)] = model, view(model, self.parts.prompt_ops)
        return self.views[id(model)][1]

    def forward(self, target):
        """`forward` of a target of `for_prompts`: captured in pieces of few rows where nothing speaks against it.

        Sums over ranks and kernels that are told of each pass are launched by the host; and rows beside a piece's own
        could leave the range of fp16 where these do not.
        """
        p = self.parts
        if self.graphs.reason or p.tp.size > 1 or p.begin_prompt is not None or p.dtype == torch.float16:
            return target.forward
        if self.pieces is None or self.pieces.target is not target:
            self.graphs.forget([] if self.pieces is None else self.pieces.pieces.values())
            self.pieces = Pieces(target, self.graphs, self.columns, p.max_context)
        return self.pieces

    def prepare(self, batch, shapes, *, detail=False, stamped=False, rule=GREEDY):
        """Capture the cycles of shapes that one session may take, ahead of their first use."""
        drafter = self.parts.drafter if any(shape != PLAIN for shape in shapes) else None
        for shape in shapes:
            cycle = self.cycle(batch, shape, drafter, detail=detail, stamped=stamped, rule=rule)
            self.graphs.prepare(cycle, batch, shape, Cycle.stages)
        for width in CATCH_UP if len(shapes) > 1 else ():
            catch_up = self.catch_up(batch, drafter, width)
            self.graphs.prepare(catch_up, batch, "catch-up", catch_up.stages)

    def catch_up(self, batch, drafter, rows):
        """The pass that extends the drafter over a backlog of up to `rows` rows before the last."""
        width = min(w for w in CATCH_UP if w >= rows)
        key = (batch, id(drafter), width)
        if key not in self.catch_ups:
            self.catch_ups[key] = CatchUp(drafter, self.parts.cache, self.state(batch), width, self.parts.tp)
        return self.catch_ups[key]
