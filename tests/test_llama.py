"""The dense target against transformers: Llama and Qwen3, logits and every boundary in fp32, whole, in pieces, cached
and as a tree; the feature `final`; and what its checkpoints must hold."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from oracles import Replay, Transformers
from test_targets import agrees
from toys import V, pair

from engine import Refused, Sampling, Shape, loading, memory
from engine.batch import Batch
from engine.cache import Cache
from engine.layers.mlp import BiasedMLP
from engine.layers.norm import Norm
from kernels import REFERENCE
from weights import AnyCheckpoint, Source
from weights.capture import FINAL, Capture

pytestmark = pytest.mark.usefixtures("nan_memory")
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
BASE = {
    "hidden_size": 64,
    "vocab_size": V,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
VARIANTS = {
    "llama": LLAMA,
    "llama3 rope": {**LLAMA, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 100.0},
    "llama tied": {**LLAMA, "tie_word_embeddings": True},
    "attention bias": {**LLAMA, "attention_bias": True},
    "mlp bias": {**LLAMA, "mlp_bias": True, "num_key_value_heads": 4},
    "all biases, wide heads": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "qwen3": {**QWEN, "head_dim": 32},
    "qwen3 tied": {**QWEN, "tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "qwen3 bias": {**QWEN, "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def checkpoint(folder, changes, style=4, seed=3):
    """A random checkpoint as transformers writes it; its config.json in the style of transformers 4 or its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {**BASE, **changes}
    given = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw["model_type"], **given))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=draw)
            if "norm" in name:
                x.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                x.copy_(0.3 * noise)
            else:
                x.copy_(noise * (8 if "embed" in name else 1.5) * x.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if style == 4:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
    return str(folder)


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_boundaries(tmp_path, variant, style):
    """Mutants: a bias left out or added twice, q/k norms of the other family, low wavelengths scaled, a tied head read
    from elsewhere, the residual before the norm."""
    agrees(checkpoint(tmp_path, VARIANTS[variant], style))


def test_the_final_feature(tmp_path):
    """norm(B_L), after the boundaries. Mutants: B_L itself; its place among them."""
    path = checkpoint(tmp_path, VARIANTS["llama"])
    opened = loading.open_target(loading.Options(target=path))
    plan = loading.Plan(opened, None, Capture((1, FINAL), "config", ""), 64, REFERENCE, loading.TP(), torch.float32)
    target, source, _, _ = plan.build(torch.device("cpu"))
    source.fill()
    cache = Cache({"target": target.cache_rows}, 8, 4, torch.float32, torch.device("cpu"))
    ids = [(5 * i + 2) % V for i in range(11)]
    pages, zero = torch.arange(1, 5, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.int64)
    _, aux = target.forward(Batch.causal(torch.tensor([ids]), zero, pages), cache)
    model = Transformers(path)
    bounds = model(ids)[1]
    with torch.no_grad():
        want = torch.cat([bounds[1], model.model.model.norm(bounds[-1])], -1)
    assert target.features == 128
    torch.testing.assert_close(torch.cat(aux, -1), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [Shape(3, 1, 4), Shape(3, 2, 8)], ids=str)
def test_speculation_keeps_the_text(tmp_path, shape):
    """A dense target with a random head of two layers, then with a drafter that is often right: the ids of plain
    decoding. Mutants: commit skips a layer; a random head lacks what it declares."""
    config = {**BASE, **VARIANTS["llama"], "draft_vocab_size": 32, "num_hidden_layers": 2}
    (tmp_path / "head.json").write_text(json.dumps(config))
    path = checkpoint(tmp_path / "target", {**VARIANTS["llama"], "num_hidden_layers": 8})
    engine = pair(path, f"random:{tmp_path}/head.json")
    prompt, sampling = [4, 7, 1], Sampling(max_new_tokens=30, ignore_eos=True)
    plain = engine.generate(prompt, sampling, shape=Shape(0, 1, 1)).token_ids
    assert engine.generate(prompt, sampling, shape=shape).token_ids == plain and len(plain) == 30
    engine.drafter = Replay([prompt + plain], V, 0.8)
    result = engine.generate(prompt, sampling, shape=shape)
    assert result.token_ids == plain and result.stats["accept_length"] > 2


@dataclass(frozen=True)
class Share:
    """One of two ranks whose sum the test takes itself."""

    rank: int
    size: int = 2

    def add(self, residual, product):
        return product(None)


def test_two_ranks_share_a_biased_mlp():
    """Mutants: the output's bias added on both ranks; gate and up biases not cut, or cut after joining."""
    checkpoint, x, parts = AnyCheckpoint({}, seed=3), torch.randn(5, 64), []
    for tp in (loading.TP(), Share(0), Share(1)):
        source = Source(checkpoint, "cpu", torch.float32, tp.rank, tp.size)
        norm = Norm(source, "norm", 64, 1e-5, REFERENCE)
        layer = BiasedMLP(source, norm, 64, 96, "silu", REFERENCE, tp)
        source.fill()
        parts.append(layer(x))
    torch.testing.assert_close(parts[1] + parts[2] + x, parts[0], atol=1e-5, rtol=1e-5)
    assert (layer.gate_up.shape, layer.bias.shape, layer.down.bias) == ((96, 64), (96,), None)


# ------------------------------------------------------------------ refusals
def edited(folder, change):
    """The checkpoint of `folder` after change(config, tensors)."""
    from safetensors.torch import load_file, save_file

    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


MISFITS = {
    "switch without its bias": ("llama", lambda c, t: c.update(attention_bias=True), "lacks.*q_proj.bias"),
    "bias without its switch": ("attention bias", lambda c, t: c.update(attention_bias=False), "unexpected.*bias"),
    "mlp bias without its switch": ("mlp bias", lambda c, t: c.update(mlp_bias=False), "unexpected.*bias"),
    "no output bias": (
        "attention bias",
        lambda c, t: t.pop("model.layers.0.self_attn.o_proj.bias"),
        "lacks.*o_proj.bias",
    ),
    "norms of another family": (
        "qwen3",
        lambda c, t: c.update(architectures=["LlamaForCausalLM"], model_type="llama"),
        "unexpected.*k_norm",
    ),
    "a head where it is tied": (
        "llama tied",
        lambda c, t: c.update(tie_word_embeddings=False),
        "lacks.*lm_head.weight",
    ),
    "fewer layers than stored": ("llama", lambda c, t: c.update(num_hidden_layers=2), "unexpected.*layers.2"),
    "width of another size": ("llama", lambda c, t: c.update(intermediate_size=80), r"\[96, 64\], expected \[80, 64\]"),
    "a draft head": ("llama", lambda c, t: c.update(draft_vocab_size=32), "draft_vocab_size.*draft head"),
    "an unknown architecture": ("llama", lambda c, t: c.update(architectures=["GemmaForCausalLM"]), "LlamaForCausalLM"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path, name):
    """Mutants: a bias or norm dropped, a missing one left at what memory held, a layer served that is not there."""
    variant, change, words = MISFITS[name]
    checkpoint(tmp_path, VARIANTS[variant])
    with pytest.raises(Refused, match=words) as error:
        pair(edited(tmp_path, change))
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_what_does_not_fit_in_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """Need and have in one line, no tensor touched. Mutants: the check after the fill; the cache not counted."""
    path, read = checkpoint(tmp_path, VARIANTS["llama"]), []
    monkeypatch.setattr("weights.checkpoint.Checkpoint.read_into", lambda *args: read.append(args))
    weights = sum(t.nbytes for t in _tensors(path))
    monkeypatch.setattr(memory, "free_bytes", lambda device, ranks: weights * 2)
    with pytest.raises(Refused, match=r"memory: needs \S+ GB \(weights \S+, cache \S+\), has \S+ GB") as error:
        pair(path, max_context=1024, max_batch=8)
    assert "\n" not in str(error.value) and read == []
    pair(path, max_context=32, max_batch=1, page_size=4)
    assert read


def _tensors(path):
    from safetensors.torch import load_file

    return load_file(f"{path}/model.safetensors").values()
