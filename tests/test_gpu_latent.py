"""Latent attention on a GPU: law 1 to the bit in a whole engine, fused operations against other code, high pages."""

import pytest
import torch
from latent_cases import REAL_QKV, mla_attention, mla_qkv
from latent_toys import KIMI, V2_LITE, DeepSeek, deepseek
from oracles import Replay
from test_gpu import SHAPES, decoded, lossless, prompts_of
from test_heads_latent import HEADS, LatentReference
from test_heads_layouts import LAYERS, features_of, follows
from test_twins import compare
from toys import V, pair
from twin_cases import Make

import kernels
from engine import Engine, Sampling, Shape
from engine.shape import PLAIN
from kernels import native, native_latent

pytestmark = pytest.mark.gpu
SIZES = dict(max_context=1024, max_batch=4, page_size=16, prefill_chunk=128)
MODELS = {
    "kimi-k2.5": dict(random="kimi-k2.5", draft="random:kimi-k2.5-eagle3-mla"),  # 64 heads, experts in INT4
    "deepseek-v3": dict(random="deepseek-v3", draft="random:deepseek-v3-eagle3"),  # 128 heads, groups, FP8
}


@pytest.fixture(scope="module", params=MODELS)
def served(request):
    """Whole-width layers of a published model, and its plain ids and logits."""
    layers = 4 if request.param == "deepseek-v3" else 3
    engine = Engine.load(layers=layers, capture_layers=f"boundary:1,2,{layers}", **SIZES, **MODELS[request.param])
    ids, logits, _ = decoded(engine, prompts_of(engine), PLAIN)
    return engine, (ids, logits)


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES], ids=str)
def test_its_own_head_is_lossless_to_the_bit(served, shape):
    """Kills any row arithmetic that depends on the rows beside it."""
    engine, plain = served
    lossless(engine, prompts_of(engine), shape, plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scattered_paths_are_lossless_to_the_bit(served, shape):
    """The standing test of law 1. Kills keys of path nodes in node order, commits that move part of a latent row."""
    engine, (ids, logits) = served
    texts = [prompt + out for prompt, out in zip(prompts_of(engine), ids, strict=True)]
    real, engine.drafter = engine.drafter, Replay(texts, engine.target.head.vocabulary, 0.7, batch=4, device="cuda")
    for every in SHAPES:
        engine.drafter.prepare(every)
    accepted = lossless(engine, prompts_of(engine), shape, (ids, logits))
    engine.drafter = real
    assert shape.steps < 4 or accepted > 2.5


@pytest.mark.parametrize("name, changes", [("V3", {}), ("Kimi", KIMI), ("V2-Lite", V2_LITE)])
def test_fused_operations_give_the_ids_of_transformers(toys, name, changes):
    """fp32, a prompt across chunks, chain and tree. Kills a fused operation that is wrong for odd sizes."""
    path, prompt = deepseek(toys, **changes), [(7 * i) % V for i in range(40)]
    engine = pair(path, toys.random_draft(layers=3), device="cuda", dtype="float32")
    sampling = Sampling(max_new_tokens=60, ignore_eos=True)
    text = engine.generate(prompt, sampling, shape=PLAIN).token_ids
    logits = DeepSeek(toys, path)(prompt + text[:-1])[0][len(prompt) - 1 :]
    best = logits.topk(2).values
    sure = best[:, 0] - best[:, 1] > 1e-3
    assert sure.sum() > 50 and (logits.argmax(-1) == torch.tensor(text))[sure].all()
    for shape in (Shape(3, 1, 4), Shape(4, 4, 16)):
        assert engine.generate(prompt, sampling, shape=shape).token_ids == text


@pytest.mark.parametrize("name", HEADS)
def test_latent_head_on_cuda(toys, name):
    """The numbers of the plain reference from the fused operations."""
    path = deepseek(toys, layers=LAYERS)
    model = features_of(DeepSeek(toys, path))
    cuda = dict(device="cuda", dtype="float32", graphs="off")
    follows(toys, model, HEADS[name], target=path, plain=LatentReference, **cuda)


def test_high_pages_read_the_same(toys):
    """B49: rows past 2^31 elements of a layer's plane. Kills slot times row in 32 bits."""
    own = deepseek(toys), toys.random_draft()
    sizes = dict(max_context=256, page_size=16, max_batch=1, check=False, device="cuda", dtype="float32")
    low, high = (Engine.load(*own, pages=pages, **sizes) for pages in (None, 2**31 // 48 // 16 + 64))
    high.pool._free.reverse()
    prompt, sampling = [(7 * i) % V for i in range(40)], Sampling(max_new_tokens=40, ignore_eos=True)
    for shape in (PLAIN, Shape(4, 4, 16)):
        assert (
            high.generate(prompt, sampling, shape=shape).token_ids
            == low.generate(prompt, sampling, shape=shape).token_ids
        )


ATTENTION = (
    (1, 1, 8, 512, 64, 128, 64, [512], "tree"),
    (2, 4, 64, 512, 64, 128, 16, [4100, 60], "chain"),
    (1, 64, 16, 512, 64, 128, 64, [700], "tree"),
    (1, 200, 8, 512, 64, 128, 64, [300], "causal"),
    (1, 3, 8, 512, 64, 128, 16, [9000], "tree"),  # lanes with several tiles
)


@pytest.mark.parametrize("name", ["fused", "native", "prefill"])
def test_twins_at_real_sizes(name):
    """Kimi-K2's sizes, a rank's heads and all. Kills columns or lanes past what toys have that are forgotten."""
    tables = {"fused": kernels.FUSED, "prefill": kernels.PREFILL}
    table = tables.get(name) or native.table(kernels.FUSED, torch.device("cuda"))
    for case, arguments in mla_qkv(torch.bfloat16, "cuda", REAL_QKV):
        compare(table, "mla_qkv", case, arguments, torch.bfloat16)
    for case, arguments in mla_attention(torch.bfloat16, "cuda", ATTENTION):
        if name != "prefill" or case.startswith("causal"):
            compare(table, "mla_attention", case, arguments, torch.bfloat16)


def test_heads_in_one_launch_are_those_of_two_and_the_same_among_any(monkeypatch):
    """Kills outputs that another block of the cluster makes, lanes turned by a neighbour's angle, sums that follow the
    number of rows."""
    make = native.table(kernels.FUSED, torch.device("cuda")).mla_qkv
    ((_, arguments),) = mla_qkv(torch.bfloat16, "cuda", [(1, 17, 7168, 8, 128, 64, 512, 1536, 16, True)])
    x, *rest, positions, index, pages, page, plane = arguments

    def run(n):
        own = plane.clone()
        return make(x[:n].contiguous(), *rest, positions[:, :n], index[:, :n], pages, page, own), own

    one = [run(n) for n in (17, 9, 8, 4, 1)]
    monkeypatch.setattr(native_latent, "QUERIES", -1)
    two, cache = run(17)
    assert torch.equal(one[0][0], two) and torch.equal(one[0][1].view(torch.int16), cache.view(torch.int16))
    for q, _ in one:
        assert torch.equal(q, two[: len(q)])


@pytest.mark.parametrize("prefix", [60, 126, 190])
def test_latent_rows_are_the_same_in_any_tree(prefix):
    """Law 1 and NaN: kills path nodes in node order, sums that follow the row beside, a NaN that siblings get."""
    attend, heads, page, columns = native.table(kernels.FUSED, torch.device("cuda")).mla_attention, 8, 16, 20
    make = Make(torch.bfloat16, "cuda")
    pages, bits = make.pages(1, columns), torch.tensor([make.path_bits([0, 0, 0, 1, 1, 2, 4])], device="cuda")
    context, nodes = make.floats(prefix, 1, 576), make.floats(7, 1, 576)
    q, up = make.floats(7, heads, 576), make.weight(heads, 128, 512)

    def run(q, rows, prefix, bits):
        (plane,), at = make.planes(1, pages, page, 1, 576), torch.arange(len(rows), device="cuda")
        plane[pages[0].long()[at // page] * page + at % page] = rows
        return attend(q, plane, up, pages, make.ints([prefix]), bits, page, 0.07)

    tree = run(q, torch.cat([context, nodes]), prefix, bits)
    for n in range(7):
        path = [i for i in range(7) if int(bits[0, n]) >> i & 1]
        rows = torch.cat([context, nodes[path]])
        assert torch.equal(run(q[n : n + 1], rows, len(rows) - 1, make.ints([[1]]))[0], tree[n])
    nodes[3] = float("nan")
    spoilt = run(q, torch.cat([context, nodes]), prefix, bits)
    for n in range(7):
        assert spoilt[n].isnan().all() if int(bits[0, n]) >> 3 & 1 else torch.equal(spoilt[n], tree[n])
