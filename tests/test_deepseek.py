"""Targets with latent attention against transformers, in fp32: whole, in pieces, cached, as trees and far along; their
configs; and speculation that never changes their ids."""

import pytest
import torch
from latent_toys import KIMI, V2_LITE, YARN, DeepSeek, deepseek, deepseek_config, deepseek_tensors, nested
from oracles import Replay
from test_targets import build, run
from toys import Noise, V, disturb, one_line, pair

import kernels
from engine import Sampling, Shape
from engine.batch import Batch
from engine.layers.rope import sharpness
from weights import Refused
from weights.config import DeepseekConfig, named

pytestmark = pytest.mark.usefixtures("nan_memory")
VARIANTS = {
    "V3 with groups": {},
    "two mscales": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3}},
    "no scaling": {"rope_scaling": None},
    "yarn without mscales": {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "weights not renormalised": {"norm_topk_prob": False, "routed_scaling_factor": 0.7},
    "no dense layer, eps": {"first_k_dense_replace": 0, "rms_norm_eps": 1e-2},
    "queries projected at once": {"q_lora_rank": None},
    "Kimi-K2": KIMI,
    "V2-Lite": V2_LITE,
}
PAGES = [9, 2, 31, 5, 14, 3, 22, 8, 30, 1, 17, 6]


def same(got, want):
    logits, boundaries = want
    torch.testing.assert_close(got[0], logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], torch.stack(boundaries), atol=1e-4, rtol=1e-4)


def agrees(model, path):
    """A checkpoint served as transformers does: one pass, prefill in pieces, rows one by one, and a tree whose branches
    are texts of their own."""
    target, cache = build(path)
    ids = [(3 * i * i + 7 * i + 1) % V for i in range(30)]
    want = model(ids)
    tokens, pages = torch.tensor([ids]), torch.tensor([PAGES], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    same(run(target, cache, Batch.causal(tokens, zero, pages)), want)

    cache.storage["target"].fill_(float("nan"))
    for start, end in ((0, 5), (5, 16), (16, 17), (17, 18), (18, 30)):
        got = run(target, cache, Batch.causal(tokens[:, start:end], zero + start, pages))
        same(got, (want[0][start:end], [b[start:end] for b in want[1]]))

    branch = {0: [], 1: [1], 2: [2], 3: [1, 3], 4: [2, 4], 5: [1, 3, 5]}
    nodes = [ids[20], 50, 13, 41, 5, 33]
    bits = torch.tensor([[sum(1 << j for j in {0, *branch[i]}) for i in range(len(nodes))]])
    depth = torch.tensor([[len(branch[i]) for i in range(len(nodes))]])
    n = zero + 20
    batch = Batch(torch.tensor([nodes]), n + depth, n + torch.arange(len(nodes))[None], pages, n, bits)
    logits, boundaries = run(target, cache, batch)
    for node, above in branch.items():
        wanted = model(ids[:21] + [nodes[i] for i in above])
        same((logits[node : node + 1], boundaries[:, node : node + 1]), (wanted[0][-1:], [b[-1:] for b in wanted[1]]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_boundaries(toys, variant):
    """Mutants: rope pairs half-split, k_up and v_up swapped, the latent cached before its norm or the key before its
    rotation, eps of the latents' norms, softmax scale without or with one mscale, cos and sin times the wrong ratio,
    correction in the weights, groups ranked by their best, scaling left out, shared expert scaled or missing."""
    path = deepseek(toys, **VARIANTS[variant])
    agrees(DeepSeek(toys, path), path)


def test_kimi_k25(toys):
    """Nested settings, prefixed names, both end ids, vision skipped and said so. Mutants: the outer config's settings,
    vision refused or not reported, generation_config's end id forgotten."""
    plain = deepseek(toys, **KIMI)
    path = nested(toys, plain)
    agrees(DeepSeek(toys, plain), path)
    engine = pair(path)
    assert engine.parts.end_ids == (V - 1, V - 2)
    skipped = [f"mm_projector.proj.{i}.weight" for i in (0, 2)] + ["vision_tower.patch_embed.proj.weight"]
    assert engine.parts.reports[0].skipped == skipped
    assert engine.parts.cache.storage["target"].shape[3:] == (1, 48)  # one row of 40 + 8 a position


def test_positions_far_along(toys):
    """B40: positions 0, 1, 63 and 500, prefilled, one by one and as a tree's nodes. Mutants: YaRN's blend by plain
    wavelengths, its two corrections mixed up."""
    path = deepseek(toys, layers=2, rope_scaling={**YARN, "mscale": 0.9, "mscale_all_dim": 0.6})
    model, (target, cache) = DeepSeek(toys, path), build(path, 512)
    ids = [(5 * i * i + 11 * i + 3) % V for i in range(502)]
    logits, boundaries = model(ids)
    tokens, zero = torch.tensor([ids]), torch.zeros(1, dtype=torch.int64)
    pages = torch.randperm(39, generator=torch.Generator().manual_seed(2)).int()[None] + 1
    cache.storage["target"] = cache.storage["target"].repeat(1, 1, 4, 1, 1)  # 16 rows a page
    cache.page_size = 16
    for start in (0, 1, 63, 64, 500):
        end = {0: 1, 1: 63, 63: 64, 64: 500, 500: 502}[start]
        got = run(target, cache, Batch.causal(tokens[:, start:end], zero + start, pages))
        same(got, (logits[start:end], [b[start:end] for b in boundaries]))
    n = zero + 500
    bits, at = torch.tensor([[1, 0b10, 0b101]]), torch.tensor([[500, 500, 501]])
    batch = Batch(torch.tensor([[ids[500], 7, ids[501]]]), at, n + torch.arange(3)[None], pages, n, bits)
    got = run(target, cache, batch)
    same((got[0][::2], got[1][:, ::2]), (logits[500:], [b[500:] for b in boundaries]))


def test_multi_token_prediction_layers_are_skipped(toys):
    """A layer past the model's own, as in DeepSeek-V3's files. Mutant: refused as unexpected, or read as a layer."""
    config = deepseek_config(layers=3)
    tensors = deepseek_tensors(config, Noise(8, gain=1.5))
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    engine = pair(toys.save(config, tensors | {"model.layers.2.eh_proj.weight": torch.zeros(4, 4)}))
    skipped = engine.parts.reports[0].skipped
    assert "model.layers.2.eh_proj.weight" in skipped and all(name.startswith("model.layers.2.") for name in skipped)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"scoring_func": "softmax"}, ("scoring_func", "'sigmoid'")),
        ({"topk_method": "greedy"}, ("topk_method", "'noaux_tc'")),
        ({"rope_interleave": False}, ("rope_interleave", "half-split")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq",)),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings",)),
        ({"n_group": 3}, ("n_group", "8 experts")),
        ({"topk_group": 5}, ("topk_group",)),
        ({"num_key_value_heads": 2}, ("num_key_value_heads",)),
        ({"qk_rope_head_dim": 7}, ("qk_rope_head_dim", "even")),
        ({"rope_scaling": {**YARN, "mscale_all_dim": None}}, ("rope_scaling.mscale", "both")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling.type", "yarn")),
        ({"n_group": None}, ("n_group", "missing")),
        ({**V2_LITE, "norm_topk_prob": True}, ("norm_topk_prob",)),
        ({**V2_LITE, "topk_method": "group_limited_greedy"}, ("topk_method", "greedy")),
        ({"architectures": ["KimiK25ForConditionalGeneration"]}, ("text_config",)),
    ],
    ids=str,
)
def test_refused(changes, words):
    """Mutants: each key ignored."""
    with pytest.raises(Refused) as error:
        DeepseekConfig.read(deepseek_config(**changes), "here")
    one_line(error, "here", *words)


@pytest.mark.parametrize(
    "name, latent, score, scale",
    [("kimi-k2.5", (1536, 512, 128, 64, 128), 0.144680, 2.827), ("deepseek-v3", (1536, 512, 128, 64, 128), None, 2.5)],
)
def test_published_configs(name, latent, score, scale):
    """Numbers of formats of the real files. Mutants: keys of the outer object, the softmax scale without mscale."""
    config = DeepseekConfig.read(named(name)["target"], name)
    sizes = config.latent
    assert (sizes.q_rank, sizes.rank, sizes.plain, sizes.turned, sizes.value) == latent
    assert (config.layers, config.hidden, config.scale) == (61, 7168, scale)
    if score:
        assert (sizes.plain + sizes.turned) ** -0.5 * sharpness(config.rope) == pytest.approx(score, abs=1e-6)


SHAPES = [Shape(1, 1, 2), Shape(3, 1, 4), Shape(4, 4, 16), Shape(5, 8, 64)]
PROMPTS = [[3], [1, 4, 1, 5, 9, 2, 6], list(range(16)), [(7 * i) % V for i in range(40)]]


@pytest.fixture(scope="module", params=["V3", "V2-Lite"])
def served(request, toys):
    """An engine with a random head, and plain ids after each prompt; they are those of transformers, without a tie."""
    path = deepseek(toys, **(V2_LITE if request.param == "V2-Lite" else {}))
    engine, model = pair(path, toys.random_draft(layers=3)), DeepSeek(toys, path)
    sampling = Sampling(max_new_tokens=60, ignore_eos=True)
    texts = [engine.generate(p, sampling, shape=Shape(0, 1, 1)).token_ids for p in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        logits = model(prompt + text[:-1])[0][len(prompt) - 1 :]
        best = logits.topk(2).values
        assert logits.argmax(-1).tolist() == text and (best[:, 0] - best[:, 1]).min() > 1e-4
    return engine, texts, sampling


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lossless(served, shape):
    """All four at once: a random head, then an oracle that is right for 70 % of nodes and scatters its branch. Mutants:
    bits ignored, commit of half a row, rope at the row in place of the depth, a latent row of another layer."""
    engine, texts, sampling = served
    real = engine.drafter
    for drafter in (real, Replay([p + t for p, t in zip(PROMPTS, texts, strict=True)], V, 0.7)):
        engine.drafter = drafter
        disturb(engine, float("nan"))
        results = engine.generate(PROMPTS, sampling, shape=shape)
        assert [r.token_ids for r in results] == texts
    lengths = {n for r in results for n in r.stats["emitted_per_cycle"]}
    assert lengths == set(range(1, shape.path + 1))
    engine.drafter = real


@pytest.mark.interpreter
def test_fused_operations_in_a_whole_engine(toys):
    """Triton's interpreter: a prompt in wide tiles, then plain decoding and an oracle's tree: the reference's ids.
    Kills rows of a pass taken to be adjacent, a tree's rows written where a chain's belong."""
    path, prompt, texts = deepseek(toys, layers=2), [(7 * i) % V for i in range(20)], []
    sampling = Sampling(max_new_tokens=4, ignore_eos=True)
    for options in ({}, {"ops": kernels.FUSED, "prompt_ops": kernels.PREFILL}):
        engine = pair(path, max_context=64, **options)
        texts.append(engine.generate(prompt, sampling, shape=Shape(0, 1, 1)).token_ids)
    engine.drafter = Replay([prompt + texts[0] + [0] * 8], V, 0.8)
    disturb(engine, float("nan"))
    texts.append(engine.generate(prompt, sampling, shape=Shape(3, 3, 9)).token_ids)
    assert texts[0] == texts[1] == texts[2]
