"""Targets against transformers: logits and every boundary in fp32, whole, in pieces, cached, and as a tree; and rotary
tables against its formulas."""

import json
from pathlib import Path

import pytest
import torch
from oracles import Transformers
from toys import Noise, V, target_config, target_tensors

from engine import loading
from engine.batch import Batch
from engine.cache import Cache
from engine.layers import rope as rotary
from kernels import REFERENCE
from weights import Fields, rope
from weights.capture import Capture

pytestmark = pytest.mark.usefixtures("nan_memory")
PAGE = 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 1.0}
VARIANTS = {
    "plain": {},
    "dense layers": {"mlp_only_layers": [1], "layers": 3},
    "every second layer sparse": {"decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
    "weights not renormalised": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    "one key head": {"num_key_value_heads": 1},
    "eps": {"rms_norm_eps": 1e-2},
    "heads wider than hidden / heads": {"head_dim": 24},
    "yarn": {"rope_scaling": YARN, "rope_theta": 100.0},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "rope_theta": 100.0,
    },
}


def dense_tensors(config):
    """Layers that are dense by the sparse step are listed too, for the writer of toys."""
    step = config.get("decoder_sparse_step", 1)
    return [i for i in range(config["num_hidden_layers"]) if (i + 1) % step] + config.get("mlp_only_layers", [])


def checkpoint(toys, variant, style):
    """A random checkpoint, its config.json in the style of transformers 4 or 5 (as its own class writes it)."""
    config = target_config(**VARIANTS[variant])
    path = toys.save(config, target_tensors({**config, "mlp_only_layers": dense_tensors(config)}, Noise(8, gain=1.5)))
    if style == 5:
        model = Transformers(path).model
        written = json.loads(model.config.to_json_string(use_diff=False))
        written["architectures"] = config["architectures"]
        model.config.save_pretrained(path)
        saved = json.loads((Path(path) / "config.json").read_text())
        assert "rope_parameters" in saved and "rope_theta" not in saved and saved["architectures"]
    return path


def build(path, length=128):
    """The target with every boundary captured, a rotary table of `length`, and a cache of 40 pages full of noise."""
    opened = loading.open_target(loading.Options(target=path))
    layers = opened.config.layers
    every = Capture(tuple(range(layers + 1)), "override", "")
    plan = loading.Plan(opened, None, every, length, REFERENCE, loading.TP(), torch.float32)
    target, source, _, _ = plan.build(torch.device("cpu"))
    source.fill()
    cache = Cache({"target": target.cache_rows}, 40, PAGE, torch.float32, torch.device("cpu"))
    cache.storage["target"].fill_(float("nan"))
    return target, cache


def run(target, cache, batch):
    """logits [N, V], boundaries [L + 1, N, D]."""
    hidden, aux = target.forward(batch, cache)
    logits = torch.empty(hidden.shape[0], V)
    target.head(hidden, 1, logits)
    return logits, torch.stack(aux)


def same(got, want):
    logits, boundaries = want
    torch.testing.assert_close(got[0], logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], torch.stack(boundaries), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_boundaries(toys, variant, style):
    """Mutants: B_k taken a layer early or after the norm, norm weight ignored, q/k norm after rope, rope pairs
    interleaved, expert weights not renormalised or over the chosen logits, gate and up swapped, pages permuted."""
    agrees(checkpoint(toys, variant, style))


def agrees(path):
    """A checkpoint served as transformers does: one pass, prefill in pieces, cached rows one by one, and a tree whose
    branches are texts of their own."""
    model, (target, cache) = Transformers(path), build(path)
    ids = [(3 * i * i + 7 * i + 1) % V for i in range(30)]
    want = model(ids)
    tokens = torch.tensor([ids])
    pages = torch.tensor([[9, 2, 31, 5, 14, 3, 22, 8, 30, 1, 17, 6]], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    same(run(target, cache, Batch.causal(tokens, zero, pages)), want)

    cache.storage["target"].fill_(float("nan"))
    for start, end in ((0, 5), (5, 16), (16, 17), (17, 18), (18, 30)):
        got = run(target, cache, Batch.causal(tokens[:, start:end], zero + start, pages))
        same(got, (want[0][start:end], [b[start:end] for b in want[1]]))

    # root = text[20]; branches 1-3-5 and 2-4, nodes in an order that no branch has alone
    branch = {0: [], 1: [1], 2: [2], 3: [1, 3], 4: [2, 4], 5: [1, 3, 5]}
    nodes = [ids[20], 50, 13, 41, 5, 33]
    bits = torch.tensor([[sum(1 << j for j in {0, *branch[i]}) for i in range(len(nodes))]])
    depth = torch.tensor([[len(branch[i]) for i in range(len(nodes))]])
    n = zero + 20
    batch = Batch(torch.tensor([nodes]), n + depth, n + torch.arange(len(nodes))[None], pages, n, bits)
    logits, boundaries = run(target, cache, batch)
    for node, path in branch.items():
        wanted = model(ids[:21] + [nodes[i] for i in path])
        same((logits[node : node + 1], boundaries[:, node : node + 1]), (wanted[0][-1:], [b[-1:] for b in wanted[1]]))


def test_rows_of_a_batch_do_not_mix(toys):
    """Two sequences with pages of their own and different prefixes. Mutant: one prefix or page row for all."""
    path = checkpoint(toys, "plain", 4)
    model, (target, cache) = Transformers(path), build(path)
    texts = [[(5 * i + 1) % V for i in range(12)], [(3 * i + 2) % V for i in range(17)]]
    pages = torch.tensor([[1, 3, 5, 7, 9], [8, 6, 4, 2, 10]], dtype=torch.int32)
    for row, text in enumerate(texts):
        run(
            target,
            cache,
            Batch.causal(torch.tensor([text[:-3]]), torch.zeros(1, dtype=torch.int64), pages[row : row + 1]),
        )
    start = torch.tensor([len(t) - 3 for t in texts])
    logits, boundaries = run(target, cache, Batch.causal(torch.tensor([t[-3:] for t in texts]), start, pages))
    for row, text in enumerate(texts):
        wanted = model(text)
        mine = slice(3 * row, 3 * row + 3)
        same((logits[mine], boundaries[:, mine]), (wanted[0][-3:], [b[-3:] for b in wanted[1]]))


def test_equal_router_logits_take_the_lowest_expert(toys):
    """B17's routing tie: two experts with equal gate rows; decode and a wide pass agree. Mutant: an unstable top-k."""
    path = checkpoint(toys, "plain", 4)

    def tie(config, tensors):
        for name in tensors:
            if name.endswith("mlp.gate.weight"):
                tensors[name][:] = tensors[name][3]

    target, cache = build(toys.altered(path, tie))
    tokens, pages = torch.arange(20)[None], torch.arange(1, 6, dtype=torch.int32)[None]
    wide, _ = run(target, cache, Batch.causal(tokens, torch.zeros(1, dtype=torch.int64), pages))
    for i in range(20):
        one, _ = run(target, cache, Batch.causal(tokens[:, i : i + 1], torch.tensor([i]), pages))
        torch.testing.assert_close(one[0], wide[i], atol=1e-4, rtol=1e-4)
    normed = torch.randn(4, 64)
    _, ids, weights = target.layers[0].mlp.router(REFERENCE, normed, torch.ones(64), 1e-6)
    assert ids.tolist() == [[0, 1]] * 4 and torch.equal(weights, torch.full((4, 2), 0.5))


KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": VARIANTS["llama3"]["rope_scaling"],
    "llama3 at its size": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn untruncated": {**YARN, "truncate": False},
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn given factor": {**YARN, "attention_factor": 1.7},
    "yarn mscale": {**YARN, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn mscales differ": {**YARN, "factor": 32.0, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn mscale alone": {**YARN, "factor": 32.0, "mscale": 0.707},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
}


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_table(kind, theta):
    """cos and sin of every position. Mutants: betas swapped, the two mscale terms mixed up, wavelengths in turns."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    settings = {**KINDS[kind], "rope_theta": theta}
    raw = dict(head_dim=64, hidden_size=128, num_attention_heads=2, max_position_embeddings=4096)
    module = Qwen3MoeRotaryEmbedding(Qwen3MoeConfig(**raw, rope_parameters=dict(settings)))
    cos, sin = module(torch.zeros(1), torch.arange(700)[None])
    for written in ({"rope_parameters": settings}, {"rope_scaling": KINDS[kind], "rope_theta": theta}):
        table = rotary.table(rope(Fields({**raw, **written}, "test")), 64, 4096, 700, torch.device("cpu"))
        want = torch.cat([cos[0, :, :32], sin[0, :, :32]], 1)
        # their angles are products in fp32, good to 700 * 2^-24 turns
        torch.testing.assert_close(table, want, atol=1e-4, rtol=1e-4)


def test_a_named_gpu_becomes_the_current_one(monkeypatch):
    """Kernels and graphs go to the current device. Mutant: a single rank on cuda:1 that launches on cuda:0."""
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(loading, "join", lambda *_: 1 / 0)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    with pytest.raises(ZeroDivisionError):
        loading.load(loading.Options(random="qwen3-30b-a3b", device="cuda:1"))
    assert seen == [torch.device("cuda:1")]
