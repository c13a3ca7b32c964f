"""Each fused op against its reference: in Triton's interpreter on the CPU, compiled on a GPU.

What each case kills: tests/twin_cases.py, cycle_cases.py, latent_cases.py and packed_cases.py. Fresh memory is NaN,
cache rows nobody may read are NaN.
"""

import contextlib
import dataclasses

import pytest
import torch
from latent_cases import CASES as LATENT
from latent_cases import REAL_QKV, mla_qkv
from oracles import Replay
from packed_cases import CASES as OTHERS
from toys import V, pair

import kernels
from engine import Sampling, Shape
from engine.shape import PLAIN
from kernels import mla_prefill, prefill, prefill_packed, rope

CPU = pytest.mark.interpreter
GPU = pytest.mark.gpu
RUNS = [
    pytest.param(device, dtype, marks=mark, id=f"{device}-{str(dtype)[6:]}")
    for device, dtype, mark in (
        ("cpu", torch.float32, CPU),
        ("cpu", torch.float16, CPU),
        ("cuda", torch.float32, GPU),
        ("cuda", torch.float16, GPU),
        ("cuda", torch.bfloat16, GPU),
    )
]
CASES = OTHERS | LATENT
OPERATIONS = prefill.OPERATIONS | prefill_packed.OPERATIONS | mla_prefill.OPERATIONS
TOLERANCE = {torch.float32: (2e-5, 1e-4), torch.float16: (4e-3, 1e-2), torch.bfloat16: (3e-2, 3e-2)}
# what nobody reads, cut off the last two arguments: the cache's slot 0, the backlog's last row
SCRATCH = {
    "qkv": lambda plane: plane[1:],
    "mla_qkv": lambda plane: plane[1:],
    "follow": lambda backlog: backlog[:, :-1],
}


@contextlib.contextmanager
def fresh_memory_is_nan():
    """torch.empty fills with NaN, integers with their greatest value."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def copies(value):
    """Deep copy that keeps views of one storage (State's report) views of one storage."""
    bases = {}

    def copy(x):
        if isinstance(x, tuple):
            return tuple(copy(y) for y in x)
        if not isinstance(x, torch.Tensor):
            return x
        base = x._base if x._base is not None else x
        if id(base) not in bases:
            bases[id(base)] = base.clone().pin_memory() if base.is_pinned() else base.clone()
        return torch.as_strided(bases[id(base)], x.size(), x.stride(), x.storage_offset())

    return copy(value)


def tensors(value):
    """All tensors in a nest of tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for x in value:
            yield from tensors(x)


def test_every_op_has_cases():
    assert set(CASES) == {f.name for f in dataclasses.fields(kernels.Ops)}


def test_the_fused_table_is_whole():
    names = [f.name for f in dataclasses.fields(kernels.Ops)]
    same = [n for n in names if getattr(kernels.FUSED, n) is getattr(kernels.REFERENCE, n)]
    assert same == []


def compare(table, op, name, arguments, dtype):
    """Run one case through a table and through REFERENCE; compare all that either returned or wrote."""
    atol, rtol = TOLERANCE[dtype]
    ours, theirs = copies(arguments), copies(arguments)
    expected = getattr(kernels.REFERENCE, op)(*theirs)
    with fresh_memory_is_nan():
        got = getattr(table, op)(*ours)
    pairs = list(zip(tensors((got, *ours)), tensors((expected, *theirs)), strict=True))
    assert pairs
    for number, (a, b) in enumerate(pairs):
        if op in SCRATCH and number >= len(pairs) - 2:
            a, b = SCRATCH[op](a), SCRATCH[op](b)
        if a.dtype == torch.float8_e4m3fn:  # compared by its bits alone
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        torch.testing.assert_close(
            a, b, atol=atol, rtol=rtol, equal_nan=True, msg=lambda m, n=number: f"{op} {name}, tensor {n}: {m}"
        )


@pytest.mark.parametrize("device, dtype", RUNS)
@pytest.mark.parametrize("op", [c for c in CASES if c != "stamp"])
def test_twin(op, device, dtype):
    for name, arguments in CASES[op](dtype, device):
        compare(kernels.FUSED, op, name, arguments, dtype)


@pytest.mark.parametrize("device, dtype", RUNS)
@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_prefill_twin(op, device, dtype):
    for name, arguments in CASES[op](dtype, device):
        if op in ("attention", "attend", "mla_attention") and not name.startswith("causal"):
            with pytest.raises(ValueError, match="causal"):
                getattr(kernels.PREFILL, op)(*arguments)
        else:
            compare(kernels.PREFILL, op, name, arguments, dtype)


def test_real_sizes_leave_room_for_a_norm_that_rounds_elsewhere():
    """Queries whose norms' factors come after the sums, as csrc's projections have it, in half the tolerance. Kills
    tables of angles that are none: they magnify a rounding."""
    atol, rtol = TOLERANCE[torch.bfloat16]

    def project(x, gain, eps, weight):
        if gain is None:
            return (x.float() @ weight.float().T).to(x.dtype)
        factor = torch.rsqrt(x.float().square().mean(1, keepdim=True) + eps)
        return (factor * ((x * gain).float() @ weight.float().T)).to(x.dtype)

    for name, arguments in mla_qkv(torch.bfloat16, "cpu", REAL_QKV):
        x, gain, eps, down, q_gain, q_up, _, k_up, table, at, *_ = arguments
        (heads, plain, latent), turned = k_up.shape, table.shape[1]
        own = project(x, gain, eps, down)[:, : -latent - turned]
        own = own if q_up is None else project(own, q_gain, eps, q_up)
        first, last = own.view(len(x), heads, -1).split([plain, turned], -1)
        absorbed = torch.einsum("nhd,hdr->nhr", first.float(), k_up.float()).to(x.dtype)
        got = torch.cat([absorbed, rope.pairs(last, table, at.view(-1))], -1)
        expected = kernels.REFERENCE.mla_qkv(*copies(arguments))
        torch.testing.assert_close(got, expected, atol=atol / 2, rtol=rtol / 2, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.gpu
def test_stamps_ascend():
    stamps = torch.zeros(3, dtype=torch.int64, device="cuda")
    for number in range(3):
        kernels.FUSED.stamp(stamps, number)
    first, second, third = stamps.tolist()
    assert 0 < first <= second <= third < first + 60 * 10**9


@pytest.mark.parametrize("drafter", [None, "head", "oracle"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=CPU), pytest.param("cuda", marks=GPU)])
def test_a_whole_engine(toys, device, drafter):
    """Prompts of different lengths in a batch, plain, a head's tree or an oracle's: the ids of the reference table.

    On the CPU the page table of a pass is columns of a wider one. Kills: its rows taken to be adjacent.
    """
    prompts, longer = [[1, 4, 1, 5, 9, 2, 6], [(7 * i) % V for i in range(20)]], 3 if device == "cpu" else 40
    found, tree = [], Shape(3, 3, 9)
    runs = [(kernels.REFERENCE, PLAIN), (kernels.FUSED, tree if drafter else PLAIN)]
    if drafter == "head":
        runs.append((kernels.REFERENCE, tree))
    for table, shape in runs:
        sizes = dict(page_size=16, device=device, dtype="float32")  # ties of bf16 would part the two tables
        engine = pair(toys.history(), toys.random_draft(), ops=table, **sizes)
        if found and drafter == "oracle":
            engine.drafter = Replay([p + t for p, t in zip(prompts, found[0], strict=True)], V, 0.8, device=device)
        results = engine.generate(prompts, Sampling(max_new_tokens=longer), shape=shape)
        found.append([r.token_ids for r in results])
    assert all(ids == found[0] for ids in found)
