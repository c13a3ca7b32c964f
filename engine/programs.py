"""The programs of an engine: states, trees and cycles that are built once and captured on first use."""

import itertools
import weakref

import torch

from kernels.native import SHORT

from .buffers import State, Tree
from .cycle import CATCH_UP, CatchUp, Cycle
from .layers.view import view
from .pieces import Pieces
from .profile import Stamped
from .rules import Greedy
from .shape import PLAIN

GREEDY = Greedy()
NARROW = 128  # positions of the narrowest page table on the CPU


def widths(columns, page_size, device):
    """Columns of the page tables that programs come for, ascending, the last one all.

    On CUDA kernels stop at the prefix whatever the table, but those of short tables are faster (kernels.native.SHORT);
    on the CPU a pass reads every row of its table, so each is twice as wide as the one before.
    """
    if device.type == "cuda":
        narrower = [positions // page_size for positions in SHORT]
    else:
        narrower = (max(1, NARROW // page_size) << n for n in itertools.count())
    return (*itertools.takewhile(lambda width: 0 < width < columns, narrower), columns)


class Programs:
    """States, trees and cycles by (batch, shape, columns of the page table, rule and what is kept), allocated on first
    use. A session takes, cycle by cycle, the programs of the narrowest table that holds its rows.

    Args:
        parts: engine.loading.Parts; columns: width of the page table; graphs: engine.graph.Graphs.
    """

    def __init__(self, parts, columns, graphs):
        self.parts, self.columns, self.graphs = parts, columns, graphs
        self.widths = widths(columns, parts.cache.page_size, parts.device)
        self.states, self.cycles, self.catch_ups, self.views, self.pieces = {}, {}, {}, {}, None
        self.trees = weakref.WeakValueDictionary()  # those of the cycles there are; only one of them runs at a time

    def width(self, rows):
        """Columns of the narrowest page table that programs come for and that holds so many rows."""
        return next((n for n in self.widths if n * self.parts.cache.page_size >= rows), self.columns)

    def state(self, batch):
        """The State of `batch` slots."""
        if batch not in self.states:
            p = self.parts
            self.states[batch] = State.allocate(batch, self.columns, p.target.features, p.dtype, p.device)
        return self.states[batch]

    def cycle(self, batch, shape, drafter, *, detail, stamped, rule=GREEDY, columns=None):
        """The cycle of one shape over so many columns of the page table (None: all); `drafter` None remembers nothing
        for a drafter, `detail` keeps all logits, `stamped` times its stages."""
        detail, columns = detail or rule.logits, columns or self.columns
        key = (batch, shape, id(drafter), columns, rule, detail, stamped)
        if key not in self.cycles:
            p, state = self.parts, self.state(batch).seen(columns)
            cycle = Cycle(p.target, drafter, p.cache, state, self._tree(batch, shape, rule, detail), p.ops, p.tp)
            self.cycles[key] = Stamped(cycle, p.ops.stamp) if stamped else cycle
        return self.cycles[key]

    def _tree(self, batch, shape, rule, detail):
        """The Tree of such cycles, whatever table they see."""
        key = (batch, shape, rule, detail)
        if (tree := self.trees.get(key)) is None:
            p = self.parts
            vocabulary = p.target.head.vocabulary if detail else None
            tree = Tree.allocate(batch, shape, p.target.features, p.dtype, p.device, vocabulary, rule)
            self.trees[key] = tree
        return tree

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

    def prompt_columns(self, pages):
        """Columns of the page table of a prompt's passes, whose request has so many pages: on CUDA all, whatever they
        were captured for."""
        return self.columns if self.parts.device.type == "cuda" else pages

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

    def prepare(self, batch, shapes, rows=None, *, detail=False, stamped=False, rule=GREEDY):
        """Capture the cycles of shapes that one session may take, ahead of their first use; rows: (fewest, most) of
        the cache that one of its cycles sees or writes, None: any."""
        drafter = self.parts.drafter if any(shape != PLAIN for shape in shapes) else None
        least, most = (self.widths[0], self.columns) if rows is None else map(self.width, rows)
        programs = []
        for columns in [n for n in self.widths if least <= n <= most]:
            for shape in shapes:
                cycle = self.cycle(batch, shape, drafter, detail=detail, stamped=stamped, rule=rule, columns=columns)
                programs.append((cycle, batch, shape, Cycle.stages))
            for width in CATCH_UP if len(shapes) > 1 else ():
                catch_up = self.catch_up(batch, drafter, width, columns)
                programs.append((catch_up, batch, "catch-up", catch_up.stages))
        self.graphs.prepare_all(programs)

    def catch_up(self, batch, drafter, rows, columns=None):
        """The pass that extends the drafter over a backlog of up to `rows` rows before the last, over so many columns
        of the page table (None: all)."""
        width, columns = min(w for w in CATCH_UP if w >= rows), columns or self.columns
        key = (batch, id(drafter), columns, width)
        if key not in self.catch_ups:
            state = self.state(batch).seen(columns)
            self.catch_ups[key] = CatchUp(drafter, self.parts.cache, state, width, self.parts.tp)
        return self.catch_ups[key]
