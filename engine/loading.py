"""From checkpoints to a target, a drafter and their cache: all is checked and counted before a weight is read."""

import math
import time
from dataclasses import dataclass, field, replace

import torch

from kernels import FUSED, PREFILL, REFERENCE, Ops, native
from kernels.prefill import ATTENTIONS, with_attention
from weights import Refused
from weights.capture import Capture, boundaries
from weights.heads import check_table

from . import memory, wiring
from .buffers import MAX_NODES
from .cache import Cache
from .device import device_of, dtype_of
from .links import REDUCTIONS, fastened
from .opening import config_of, open_draft, open_target
from .plan import DRAFT_TP, Plan, divided, faster
from .slice import Slice
from .text import Text
from .tp import TP, join, ranks_here

SHORT, LONG, ROOM = 512, 8192, 16 << 30  # prompt rows a pass by default, bytes that must be free for long ones


@dataclass(frozen=True)
class Options:
    """How to load, in the command line's words; None means the default named there."""

    target: str | None = None
    draft: str | None = None  # a directory, a hub id, random:NAME, none
    random: str | None = None  # random weights of this config in place of a target checkpoint
    layers: int | None = None
    device: str | None = None
    dtype: str | None = None
    max_context: int | None = None
    max_batch: int = 8
    pages: int | None = None
    page_size: int = 64
    prefill_chunk: int | None = None  # prompt rows a pass; None: `_pieces`
    capture_layers: str | None = None
    tp: int = 1  # ranks, one a process (engine.tp.join)
    tp_slice: int | None = None  # of random weights: the share of one rank of so many, alone (engine.slice)
    expert_parallel: bool = False  # whole experts to each rank; else every rank has its width of all
    reduction: str = "auto"  # over peer memory where that works; library: NCCL whatever else there is
    draft_tp: str = "auto"  # cut, replicated (no collectives in it), auto: the faster one
    check: bool = True  # measure which reading of an ambiguous head is right
    prompt_attention: str = "triton"  # flashinfer: its paged prefill, where that package is installed
    prefix_cache: bool = True  # prompts read the rows of an earlier one that begins alike
    reserve: int = MAX_NODES  # rows past the prefix that a cycle may write
    ops: Ops | None = None  # the table of operations; None: `operations` chooses
    prompt_ops: Ops | None = None  # of a prompt's passes; None: `ops` where that is given, else `operations` chooses


@dataclass
class Parts:
    """A loaded pair and what was said while loading it."""

    target: object
    drafter: object | None
    cache: Cache
    ops: Ops
    prompt_ops: Ops  # of a prompt's passes
    kernels: str  # which kernels these are, and why not others
    tp: TP
    dtype: torch.dtype
    device: torch.device
    text: Text | None
    end_ids: tuple[int, ...]
    max_context: int
    prefill_chunk: int  # prompt rows a pass
    prefix_unit: int  # prompt rows that later prompts may reuse
    capture: Capture | None
    memory: str
    draft_tp: str | None = None  # with several ranks and a draft: which, and why
    rank_bytes: list = field(default_factory=list)  # of each rank: (weights, cache)
    reports: list = field(default_factory=list)
    measured: list[str] = field(default_factory=list)  # switches of the head that its files leave open, a line each
    load_ms: float = 0.0

    @property
    def begin_prompt(self):
        """What has to be told before each pass over a prompt (kernels.prefill.FlashInfer.begin), or None."""
        return getattr(self.prompt_ops.attention, "begin", None)


def operations(options, device, dtype, announce=None):
    """-> the table of cycles, the table of a prompt's passes, and what they are in one line.

    Raises Refused for FlashInfer where it is not installed or does not serve the device or the dtype.
    """
    _prompt_attention(options, device, dtype)
    if options.ops is not None:
        return options.ops, options.prompt_ops or options.ops, "given"
    if device.type != "cuda":
        return REFERENCE, options.prompt_ops or REFERENCE, "torch reference"
    ops, line = FUSED, "Triton"
    if dtype == torch.bfloat16:
        try:
            ops, line = native.table(FUSED, device, announce), "CUDA C++ for few rows, Triton"
        except native.Unavailable as reason:
            line = f"Triton (no CUDA C++: {reason})"
    else:
        line = "Triton (CUDA C++ serves bfloat16)"
    prompts, make = options.prompt_ops or PREFILL, ATTENTIONS[options.prompt_attention]
    if make is not None:
        prompts, line = with_attention(prompts, make(device)), f"{line}; prompts: {options.prompt_attention}"
    return ops, prompts, line


def _prompt_attention(options, device, dtype):
    name, plain = options.prompt_attention, Options.prompt_attention
    if name not in ATTENTIONS:
        raise Refused(f"prompt_attention: {name!r} is unknown; supported: {', '.join(ATTENTIONS)}")
    if name == plain:
        return
    if device.type != "cuda" or dtype == torch.float32 or options.ops is not None:
        raise Refused(f"prompt_attention: {name!r} serves bfloat16 and float16 on CUDA; supported here: {plain}")
    if not ATTENTIONS[name].installed():
        raise Refused(f"prompt_attention: {name!r} is not installed; supported here: {plain}")


@dataclass(frozen=True)
class Judged:
    """What is known once headers have been read: how to build the pair, its dry build, and what it may then hold."""

    plan: Plan
    dry: tuple  # Plan.build on "meta"
    max_context: int
    prompt_ops: Ops
    kernels: str  # what the tables of operations are
    why: str | None = None  # the draft is cut or replicated


def _judge(options, device, dtype, tp, announce):
    """Open, check and count on "meta"; what it says is the same on every rank."""
    target, draft = open_target(options), open_draft(options)
    max_context = _context(options, target.config)
    capture = None
    if draft is not None:
        draft.config.fits(target.config.hidden, target.config.vocab, config_of(draft.checkpoint))
        draft.config.reaches(max_context, config_of(draft.checkpoint))
        capture = boundaries(draft.config, target.config.layers, options.capture_layers)
    elif options.capture_layers is not None:
        capture = boundaries(None, target.config.layers, options.capture_layers)  # for a drafter assigned later
    if options.expert_parallel and not getattr(target.config, "experts", 0):
        raise Refused("expert_parallel: this target has no experts; supported: False")
    own = TP() if options.draft_tp == "replicated" else tp
    ops, prompt_ops, kernels = operations(options, device, dtype, announce)
    length = max_context + options.reserve
    plan = Plan(target, draft, capture, length, ops, tp, dtype, own, options.expert_parallel)
    plan, dry, why = divided(plan, options.draft_tp)
    for source in (dry[1], dry[3]):
        if source is not None:
            source.check()
    if draft is not None:
        check_table(draft.checkpoint, target.config.vocab)
    return Judged(plan, dry, max_context, prompt_ops, kernels, why)


def load(options, progress=None, announce=None):
    """Open, check, count, allocate, read. Raises Refused before memory is filled, on all ranks alike; see Options.

    Args:
        progress: callable(bytes done, bytes in all) or None; announce: callable(line) or None, told what memory is
        needed and there before a weight is read.
    """
    began = time.perf_counter()
    _sizes(options)
    device = device_of(options.device, options.tp)
    dtype, table = dtype_of(options.dtype, device), options.ops or (FUSED if device.type == "cuda" else REFERENCE)
    tp = join(options.tp, device, table.total) if options.tp_slice is None else Slice.of(options.tp_slice)
    judged = tp.together(lambda: _judge(options, device, dtype, tp, announce))
    if options.tp_slice is None:
        tp = fastened(tp, device, dtype, _widest(judged.plan), options.reduction, announce)
    own = tp if judged.plan.draft_tp.size > 1 else judged.plan.draft_tp
    judged = replace(judged, plan=replace(judged.plan, tp=tp, draft_tp=own))
    if judged.why is None and judged.plan.draft is not None and tp.size > 1:  # auto, and both ways are open
        plan, dry, why = faster(judged.plan, judged.dry, device)
        judged = replace(judged, plan=plan, dry=dry, why=why)
    plan, dry, max_context = judged.plan, judged.dry, judged.max_context
    kinds = {"target": dry[0].cache_rows} | ({"draft": dry[2].cache_rows} if plan.draft else {})
    columns = -(-(max_context + options.reserve) // options.page_size)
    pages = options.pages or columns * options.max_batch + 1
    need = sum(source.nbytes for source in (dry[1], dry[3]) if source is not None)
    cache_need, has = Cache.nbytes(kinds, pages, options.page_size, dtype), memory.free_bytes(device, ranks_here())
    stated = memory.statement(need, cache_need, has, tp.size)
    if announce:
        announce(stated)
    tp.together(lambda: memory.demand(need, cache_need, has))
    chunk, unit = _pieces(options, device, tp, has - need - cache_need)

    model, source, drafter, head = plan.build(device)
    reports = _fill([part for part in (source, head) if part is not None], progress)
    target, draft = plan.target, plan.draft
    parts = Parts(
        target=model,
        drafter=drafter,
        cache=Cache(kinds, pages, options.page_size, dtype, device),
        ops=plan.ops,
        prompt_ops=judged.prompt_ops,
        kernels=judged.kernels,
        tp=tp,
        dtype=dtype,
        device=device,
        text=None if target.folder is None else Text.find(target.folder),
        end_ids=target.config.eos_ids,
        max_context=max_context,
        prefill_chunk=chunk,
        prefix_unit=unit,
        capture=plan.capture,
        memory=stated,
        draft_tp=judged.why,
        rank_bytes=tp.every((need, cache_need)),
        reports=reports,
    )
    if options.check and target.folder and draft and draft.folder:  # random weights have nothing to measure
        wiring.settle(parts, announce)
    parts.load_ms = (time.perf_counter() - began) * 1e3
    return parts


def _fill(sources, progress):
    """Read them one after the other, `progress` told of all together -> what each load did."""
    reports, before, need = [], 0, sum(source.nbytes for source in sources)
    for source in sources:
        reports.append(source.fill(progress and (lambda done, _, before=before: progress(before + done, need))))
        before += source.nbytes
    return reports


def _pieces(options, device, tp, spare):
    """-> prompt rows a pass, prompt rows a block that later prompts may reuse.

    A block must be written as a fresh prefill would write it: by whole passes, or by kernels that make a row's bits of
    the row alone, as the Triton ones of one GPU do (kernels.prefill; libraries and sums over ranks do not). Those take
    long passes, which read the experts less often, where `spare` bytes leave room for their activations.
    """
    alone = device.type == "cuda" and tp.size == 1 and options.ops is None and options.prompt_attention == "triton"
    chunk = options.prefill_chunk or (LONG if alone and spare > ROOM else SHORT)
    return chunk, math.lcm(options.page_size, min(chunk, SHORT) if alone else chunk)


def _widest(plan):
    """Columns of the widest rows that ranks add up."""
    return max(plan.target.config.hidden, 0 if plan.draft is None else plan.draft.config.hidden)


def _sizes(options):
    if options.reduction not in REDUCTIONS:
        raise Refused(f"reduction: {options.reduction!r}; supported: {', '.join(REDUCTIONS)}")
    if options.draft_tp not in DRAFT_TP:
        raise Refused(f"draft_tp: {options.draft_tp!r}; supported: {', '.join(DRAFT_TP)}")
    if options.tp_slice is not None and (options.tp > 1 or options.random is None):
        raise Refused(f"tp_slice: {options.tp_slice}; supported: with random weights, on one device (tp 1)")
    for name, only in (("expert_parallel", False), ("draft_tp", "auto")):
        if options.tp == 1 and options.tp_slice is None and getattr(options, name) != only:
            raise Refused(f"{name}: {getattr(options, name)!r} with one rank; supported: {only!r}, or tp above 1")
    if options.draft_tp != "auto" and options.draft in (None, "none"):
        raise Refused(f"draft_tp: {options.draft_tp!r} without a draft; supported: 'auto', or with a draft")
    if options.tp == 1 and options.reduction != "auto":
        raise Refused(f"reduction: {options.reduction!r} with one rank; supported: 'auto', or tp above 1")
    least = {"tp": 1, "tp_slice": 2, "max_batch": 1, "page_size": 1, "prefill_chunk": 1, "pages": 2}
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < bound):
            raise Refused(f"{name}: {value!r}; supported: whole numbers from {bound}")


def _context(options, config):
    most = config.max_positions
    if options.max_context is None:
        return min(most, 8192)
    if not 1 < options.max_context <= most:
        raise Refused(f"max_context: {options.max_context}; supported: 2 to {most} (max_position_embeddings)")
    return options.max_context
