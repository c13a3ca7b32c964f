"""Windows, sinks, biases and a rotating share through the fused operations: whole programs on toys, law 1 to the bit at
the real models' sizes."""

import pytest
import torch
from families import VARIANTS, checkpoint
from oracles import Replay
from test_gpu import SHAPES, decoded, lossless, prompts_of
from toys import V, pair

import kernels
from engine import Engine, Sampling, Shape
from engine.shape import PLAIN

CPU, GPU = pytest.mark.interpreter, pytest.mark.gpu
PROMPTS = [[1, 4, 1, 5], [(7 * i) % V for i in range(9)]]


@pytest.mark.parametrize(
    "name, device",
    [
        pytest.param("gpt-oss", "cpu", marks=CPU),
        *(pytest.param(name, "cuda", marks=GPU) for name in ("gpt-oss", "mixtral windowed, tied", "glm groups")),
    ],
)
def test_fused_programs_write_the_reference_text(tmp_path, name, device):
    """In fp32, plain and as a tree with an oracle, the window shorter than the tree is deep. Mutants: a sink or window
    that only the reference knows; a window counted from the end of the pass; a bias of the next expert."""
    raw = {**VARIANTS[name], "num_hidden_layers": 2}
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][:2]
    path, count, shape = checkpoint(tmp_path, raw), 4 if device == "cpu" else 40, Shape(5, 2, 9)
    engines = [
        pair(path, page_size=16, ops=table, device=device, dtype="float32")
        for table in (kernels.REFERENCE, kernels.FUSED)
    ]
    sampling = Sampling(max_new_tokens=count, ignore_eos=True)
    want = [r.token_ids for r in engines[0].generate(PROMPTS, sampling, shape=PLAIN)]
    texts = [p + t + [0] * 8 for p, t in zip(PROMPTS, want, strict=True)]
    engines[1].drafter = Replay(texts, V, 0.8, device=device)
    for given in (PLAIN, shape):
        assert [r.token_ids for r in engines[1].generate(PROMPTS, sampling, shape=given)] == want


@pytest.fixture(scope="module", params=["gpt-oss-120b", "glm-4.5"])
def named(request):
    """Four layers of a published model with random weights in bf16, plain ids and logits, an oracle in place of its
    head; prompts cross pages, splits, chunks and the window."""
    name = request.param
    sizes = dict(max_context=1024, max_batch=4, page_size=16, prefill_chunk=128, capture_layers="boundary:1,2,4")
    engine = Engine.load(draft=f"random:{name}-eagle3", random=name, layers=4, **sizes)
    prompts = prompts_of(engine)
    ids, logits, _ = decoded(engine, prompts, PLAIN)
    texts = [prompt + out for prompt, out in zip(prompts, ids, strict=True)]
    engine.drafter = Replay(texts, engine.target.head.vocabulary, right=0.7, batch=4, device="cuda")
    for shape in SHAPES:
        engine.drafter.prepare(shape)
    yield engine, (ids, logits)
    del engine
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [PLAIN, *SHAPES], ids=str)
def test_named_models_are_lossless_to_the_bit(named, shape):
    """Kills: a window that begins at a node's number; a sink merged in an order that follows the splits; a router,
    shared expert or biased expert whose sums follow the number of rows."""
    engine, plain = named
    accepted = lossless(engine, prompts_of(engine), shape, plain)
    assert shape.steps < 4 or accepted > 2.5
