"""Prefill's own promises: a prompt's rows do not depend on the batch, and FlashInfer is asked for the right thing."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from test_law import same
from test_twins import RUNS, TOLERANCE
from toys import one_line, pair
from twin_cases import Make, fill

import kernels
from engine import Engine, Sampling
from kernels.attend import composed
from kernels.prefill import FlashInfer
from weights.config import Refused


def passes(make, starts, t, page, window=None):
    """Arguments of causal attention over t rows after `starts`."""
    pages = make.pages(len(starts), -(-(max(starts) + t) // page))
    planes = make.planes(2, pages, page, 2, 64)
    fill(make, planes, pages, page, [start + t for start in starts])
    q = make.floats(len(starts) * t, 4, 64)
    return q, *planes, pages, make.ints(starts), None, page, 0.125, window


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


class Wrapper:
    """What the package's wrapper is asked for, computed plainly from the plan (causal, aligned at the end)."""

    def __init__(self, workspace, layout):
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, queries, bounds, indices, last, heads, groups, width, page_size, **options):
        self.lists = [x.tolist() for x in (queries, bounds, last)]
        self.indices, self.page, self.options = indices.long(), page_size, options
        assert not any(x.is_cuda for x in (queries, bounds, last)) and options["causal"]

    def run(self, q, paged):
        queries, bounds, last = self.lists
        out = torch.empty_like(q)
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


@pytest.mark.parametrize("window", [None, 20])
def test_flashinfer_is_asked_for_the_same_attention(monkeypatch, window):
    """Kills: lengths off by a page, pages in table order only, a window off by one, a plan a layer."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for starts, t, page in (([30, 7], 45, 16), ([0], 16, 16), ([15], 1, 4)):
        arguments = passes(Make(torch.float32, "cpu", 23), starts, t, page, window)
        op = FlashInfer("cpu")
        op.begin(starts)
        expected = kernels.REFERENCE.attention(*arguments)
        for _ in range(2):
            torch.testing.assert_close(op(*arguments), expected)
        assert len(op.plans) == 1


def test_an_engine_announces_each_piece(toys, monkeypatch):
    """Kills: a piece whose plan is the one before's, the drafter's rows under the target's plan."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    prompts = [[(7 * i) % 64 for i in range(n)] for n in (70, 33, 5)]
    want = pair(toys.history(), toys.random_draft()).generate(prompts, Sampling(max_new_tokens=9))
    op = FlashInfer("cpu")
    attend = composed(kernels.REFERENCE.qkv, op)
    table = dataclasses.replace(kernels.REFERENCE, attention=op, attend=attend)
    engine = pair(toys.history(), toys.random_draft(), ops=kernels.REFERENCE, prompt_ops=table)
    got = engine.generate(prompts, Sampling(max_new_tokens=9))
    assert [(r.token_ids, r.cycles) for r in got] == [(r.token_ids, r.cycles) for r in want]


def test_refusals():
    """FlashInfer where it is not, or cannot serve; a name nobody knows."""
    for name, words in (("flashinfer", ["CUDA"]), ("cutlass", ["triton", "flashinfer"])):
        with pytest.raises(Refused) as error:
            Engine.load(random="qwen3-30b-a3b", layers=1, device="cpu", prompt_attention=name)
        one_line(error, "prompt_attention", name, *words)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flashinfer_itself(dtype):
    pytest.importorskip("flashinfer")
    atol, rtol = TOLERANCE[dtype]
    for starts in ([300], [30, 7]):
        arguments = passes(Make(dtype, "cuda", 29), starts, 45, 16)
        op = FlashInfer("cuda")
        op.begin(starts)
        got, want = op(*arguments), kernels.REFERENCE.attention(*arguments)
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
