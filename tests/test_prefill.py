"""Prefill's own promises: a prompt's rows do not depend on the batch, and FlashInfer is asked for the right thing."""

import dataclasses
import sys
import weakref
from types import ModuleType

import pytest
import torch
from test_law import same
from test_twins import RUNS, TOLERANCE
from toys import one_line, pair
from twin_cases import Make, fill

import kernels
from engine import Engine, Sampling
from kernels import wide
from kernels.attend import composed
from kernels.prefill import FlashInfer
from weights.config import Refused


def passes(make, starts, t, page, window=None, width=64, values=None):
    """Arguments of causal attention over t rows after `starts`: 4 heads, 2 of keys and values."""
    pages = make.pages(len(starts), -(-(max(starts) + t) // page))
    planes = [make.planes(1, pages, page, 2, wide)[0] for wide in (width, values or width)]
    fill(make, planes, pages, page, [start + t for start in starts])
    q = make.floats(len(starts) * t, 4, width)
    return q, *planes, pages, make.ints(starts), None, page, width**-0.5, window


@pytest.mark.parametrize("device, dtype", RUNS)
def test_a_prompt_is_alone(device, dtype):
    """Attention of a sequence in a batch and by itself. Kills: tiles that reach into the next sequence."""
    make = Make(dtype, device, 19)
    q, k, v, pages, prefix, *rest = passes(make, [30, 7], 45, 16)
    whole = kernels.PREFILL.attention(q, k, v, pages, prefix, *rest)
    for b in range(2):
        rows = slice(45 * b, 45 * b + 45)
        alone = kernels.PREFILL.attention(q[rows], k, v, pages[b : b + 1], prefix[b : b + 1], *rest)
        assert same(alone, whole[rows])


@pytest.mark.parametrize("device, dtype", [run for run in RUNS if run.values[1] != torch.float32])
@pytest.mark.parametrize("page, window", [(64, None), (128, None), (64, 70), (32, None)])
def test_long_prompts(device, dtype, page, window):
    """Several tiles and blocks of keys, before the diagonal and on it; pages of one block, of two and of half. Kills: a
    page of the block before; the diagonal's blocks without a mask; blocks left out between the two."""
    atol, rtol = TOLERANCE[dtype]
    for starts, t in (([130, 7], 150), ([0], 65)):
        arguments = passes(Make(dtype, device, 31), starts, t, page, window)
        got, want = (table.attention(*arguments) for table in (kernels.PREFILL, kernels.REFERENCE))
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("device, dtype", [run for run in RUNS if run.values[1] != torch.float32])
@pytest.mark.parametrize("sizes", wide.DENSE, ids=lambda sizes: f"{sizes.rows}x{sizes.outputs}")
def test_every_tile(device, dtype, sizes, monkeypatch):
    """Kills: rows, outputs or columns past a tile's last; halves of a gated product taken from one another."""
    monkeypatch.setattr(wide, "DENSE", {sizes: 1.0})
    make, (atol, rtol) = Make(dtype, device, 37), TOLERANCE[dtype]
    for columns in (72, 128):
        x, extra = make.floats(150, columns), make.floats(150, 270)
        case = x, make.weight(270, columns), make.floats(270), extra
        torch.testing.assert_close(kernels.PREFILL.linear(*case), kernels.REFERENCE.linear(*case), atol=atol, rtol=rtol)
        case = x, make.gain(columns), 1e-6, make.weight(2 * 140, columns), make.weight(columns, 140), "silu", x
        torch.testing.assert_close(kernels.PREFILL.mlp(*case), kernels.REFERENCE.mlp(*case), atol=atol, rtol=rtol)


@pytest.mark.parametrize("device, dtype", [run for run in RUNS if run.values[1] != torch.float32])
def test_many_rows_an_expert(device, dtype):
    """The wide tiles of experts, one of them with a few pairs alone. Kills: tables made for other tiles."""
    make, (atol, rtol) = Make(dtype, device, 41), TOLERANCE[dtype]
    ids = torch.randint(0, 2, (300, 1), generator=make.generator) * 2
    ids[7] = 1
    ids, weights = ids.to(device), torch.rand(300, 1, generator=make.generator).to(device)
    assert wide.of_experts(dtype, 300, 3) is wide.MANY
    case = make.floats(300, 72), ids, weights, make.weight(3, 2 * 40, 72), make.weight(3, 72, 40), "silu"
    got, want = (table.experts(*case) for table in (kernels.PREFILL, kernels.REFERENCE))
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


class Wrapper:
    """What the package's wrapper is asked for, computed plainly from the plan (causal, aligned at the end)."""

    def __init__(self, workspace, layout):
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, queries, bounds, indices, last, heads, groups, width, page_size, **options):
        self.lists = [x.tolist() for x in (queries, bounds, last)]
        self.indices, self.page, self.options = indices.long(), page_size, options
        assert not any(x.is_cuda for x in (queries, bounds, last)) and options["causal"]

    def run(self, q, paged, *, out):
        queries, bounds, last = self.lists
        assert paged[0].shape == paged[1].shape and out.shape == q.shape
        for b in range(len(last)):
            pages = self.indices[bounds[b] : bounds[b + 1]]
            length = (len(pages) - 1) * self.page + last[b]
            k, v = (x[pages].flatten(0, 1)[:length].float().repeat_interleave(2, 1) for x in paged)
            own = q[queries[b] : queries[b + 1]].float()
            at = torch.arange(length - len(own), length)[:, None]
            seen = torch.arange(length) <= at
            if self.options["window_left"] >= 0:
                seen &= torch.arange(length) >= at - self.options["window_left"]
            scores = torch.einsum("thd,lhd->htl", own, k) * self.options["sm_scale"]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[queries[b] : queries[b + 1]] = torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)
        return out


class Event:
    """An event on a GPU that is never done before somebody waits."""

    recorded = done = False

    def record(self):
        self.recorded = True

    def synchronize(self):
        assert self.recorded
        self.done = True


@pytest.fixture
def package(monkeypatch):
    """The package, with the stand-in for its wrapper."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return package


def refuse(*_):
    raise AssertionError("not FlashInfer")


@pytest.mark.parametrize("window", [None, 20])
def test_flashinfer_is_asked_for_the_same_attention(package, window):
    """Kills: lengths off by a page, pages in table order only, a window off by one, a plan a layer."""
    for starts, t, page in (([30, 7], 45, 16), ([0], 16, 16), ([15], 1, 4)):
        arguments = passes(Make(torch.float32, "cpu", 23), starts, t, page, window)
        op = FlashInfer("cpu", refuse, Event)
        op.begin(starts)
        expected = kernels.REFERENCE.attention(*arguments)
        for _ in range(2):
            torch.testing.assert_close(op(*arguments), expected)
        assert len(op.plans) == 1


@pytest.mark.parametrize("width, values, sinks", [(80, 80, 0), (32, 32, 0), (192, 192, 0), (128, 64, 0), (64, 64, 4)])
def test_what_flashinfer_does_not_serve(package, width, values, sinks):
    """Kills: widths whose numbers are wrong there, values as wide as keys whatever they are, sinks left out."""
    make = Make(torch.float32, "cpu", 23)
    arguments = (*passes(make, [30], 5, 16, None, width, values), make.floats(sinks) if sinks else None)
    op = FlashInfer("cpu", kernels.REFERENCE.attention, Event)
    op.begin([30])
    torch.testing.assert_close(op(*arguments), kernels.REFERENCE.attention(*arguments))
    assert not op.plans


def test_a_plan_outlives_its_copy(package, monkeypatch):
    """Kills: plans dropped with their copies still queued (their pinned memory is lent to the next plan at once), an
    event recorded before its plan, a host that waits for the pass it has just launched."""
    order, made = [], []
    plan = Wrapper.plan
    monkeypatch.setattr(Wrapper, "plan", lambda *given, **options: (order.append("plan"), plan(*given, **options)))
    monkeypatch.setattr(Event, "record", lambda event: (order.append("record"), setattr(event, "recorded", True)))
    op = FlashInfer("cpu", refuse, Event)
    for start in range(0, 80, 16):
        op.begin([start])
        assert all(event.done or wrapper() is not None for wrapper, event in made)
        op(*passes(Make(torch.float32, "cpu", 23), [start], 16, 16))
        ((wrapper, event),) = op.plans.values()
        made.append((weakref.ref(wrapper), event))
        del wrapper
    assert order == ["plan", "record"] * 5
    assert [event.done for _, event in made] == [True, True, True, False, False]


def test_an_engine_announces_each_piece(toys, package):
    """Kills: a piece whose plan is the one before's, the drafter's rows under the target's plan."""
    prompts = [[(7 * i) % 64 for i in range(n)] for n in (70, 33, 5)]
    models = toys.history(head_dim=64), toys.random_draft(head_dim=64)
    want = pair(*models).generate(prompts, Sampling(max_new_tokens=9))
    op = FlashInfer("cpu", refuse, Event)
    attend = composed(kernels.REFERENCE.qkv, op)
    table = dataclasses.replace(kernels.REFERENCE, attention=op, attend=attend)
    engine = pair(*models, ops=kernels.REFERENCE, prompt_ops=table)
    got = engine.generate(prompts, Sampling(max_new_tokens=9))
    assert [(r.token_ids, r.cycles) for r in got] == [(r.token_ids, r.cycles) for r in want]


def test_refusals():
    """FlashInfer where it is not, or cannot serve; a name nobody knows."""
    for name, words in (("flashinfer", ["CUDA"]), ("cutlass", ["triton", "flashinfer"])):
        with pytest.raises(Refused) as error:
            Engine.load(random="qwen3-30b-a3b", layers=1, device="cpu", prompt_attention=name)
        one_line(error, "prompt_attention", name, *words)


HEADS = [(torch.float16, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, width", HEADS)
def test_flashinfer_itself(dtype, width):
    """Both of the package's kernels: on Hopper it takes another one for more than 64 rows a sequence."""
    pytest.importorskip("flashinfer")
    atol, rtol = TOLERANCE[dtype]
    for starts, t in (([300], 45), ([30, 7], 45), ([0], 512), ([700, 13], 300)):
        arguments = passes(Make(dtype, "cuda", 29), starts, t, 16, None, width)
        op = FlashInfer("cuda", refuse)
        op.begin(starts)
        got, want = op(*arguments), kernels.REFERENCE.attention(*arguments)
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
        ((wrapper, _),) = op.plans.values()
        if torch.cuda.get_device_capability() == (9, 0):
            assert wrapper._backend == ("fa3" if t > 64 else "fa2")


@pytest.mark.gpu
@pytest.mark.parametrize("t", [48, 128])
def test_pieces_launched_behind_a_busy_gpu(t):
    """Kills: a plan whose pinned memory the next one overwrites before its copy to the device has run; a host that
    waits for the pass it has just launched."""
    pytest.importorskip("flashinfer")
    make, starts = Make(torch.bfloat16, "cuda", 31), range(0, 6 * t, t)
    _, *planes, pages, _, tree, page, scale, window = passes(make, [0], 6 * t, 16, None, 128)
    pieces = [(make.floats(t, 4, 128), *planes, pages, make.ints([s]), tree, page, scale, window) for s in starts]
    want, op, busy = [kernels.REFERENCE.attention(*p) for p in pieces], FlashInfer("cuda", refuse), torch.cuda.Event()
    for queued in (False, True):  # the first time the package loads its kernels
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(2_000_000_000)
            busy.record()
        got = []
        for start, arguments in zip(starts, pieces, strict=True):
            op.begin([start])
            got.append(op(*arguments))
            assert not queued or len(got) > 2 or not busy.query()
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=3e-2, rtol=3e-2)
