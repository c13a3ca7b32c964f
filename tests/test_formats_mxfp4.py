"""MXFP4: codes by hand, gpt-oss checkpoints against what they mean and against transformers' reader, the cut."""

import json
from pathlib import Path

import pytest
import torch
from families import GPT_OSS, checkpoint
from packed_cases import laid_out
from packers import FP8, INT4
from safetensors.torch import load_file, save_file
from toys import V, one_line, pair

from engine import Sampling, Shape
from kernels import REFERENCE, experts, experts_mxfp4
from weights import AnyCheckpoint, Checkpoint, Refused, Source
from weights.formats import Mxfp4Experts, format_of, mxfp4

PROMPTS = [[3, 1, 4, 1, 5], [(7 * i + 2) % V for i in range(19)]]
SMALL = {**GPT_OSS, "intermediate_size": 96}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def test_codes_by_hand():
    """All sixteen codes in order, at two scales. Mutants: the high half first; an exponent bias of 1 more; 2^scale."""
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8)[None, None]
    right = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2)[None]
    for scale, factor in ((127, 1.0), (120, 2.0**-7), (130, 8.0), (0, 2.0**-127)):
        scales = torch.tensor([[scale]], dtype=torch.uint8)
        assert torch.equal(mxfp4.unpack(blocks, scales), right * factor)
        words = laid_out(blocks.clone())
        assert torch.equal(experts_mxfp4.dequantise(words, scales), right * factor)


def test_pack_is_the_inverse():
    """Any codes with any scales come back as the same numbers."""
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 4, 16), generator=draw).to(torch.uint8)
    blocks[:, :, 0] = 0x77  # a six in every group
    scales = torch.randint(100, 140, (3, 4), generator=draw).to(torch.uint8)
    weight = mxfp4.unpack(blocks, scales)
    again, found = mxfp4.pack(weight)
    assert torch.equal(mxfp4.unpack(again, found), weight) and torch.equal(found, scales)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """`alike` once for this file."""
    return alike(tmp_path_factory.mktemp("oss"))


def alike(folder, width=96):
    """(packed, plain) gpt-oss checkpoints that mean the same, below a folder."""
    raw = {**SMALL, "intermediate_size": width}
    plain = Path(checkpoint(folder / "plain", raw))
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            size = 4 ** -torch.rand(*weight.shape[:1], 1, weight.shape[2], generator=torch.Generator().manual_seed(1))
            blocks, scales = mxfp4.pack((weight * size).transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = mxfp4.unpack(blocks, scales).transpose(1, 2).contiguous()
        else:
            stored[name] = weight
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed = folder / "packed"
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    (packed / "config.json").write_text(json.dumps({**raw, "quantization_config": CONFIG}))
    return str(packed), str(plain)


def test_logits_of_a_tiny_checkpoint(toys, targets, nan_memory):
    """fp32: the same logits, and ids of chains and trees, as the matrices that are meant. Mutants: gate and up rows one
    below the other; a bias of the neighbouring row; scales of the wrong group."""
    found, expected = (pair(path) for path in targets)
    assert isinstance(found.target.layers[0].mlp.experts, Mxfp4Experts)
    for prompt in PROMPTS:
        torch.testing.assert_close(found.score(prompt).logprobs, expected.score(prompt).logprobs, atol=1e-4, rtol=1e-4)
    for shape in (Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 2, 8)):
        how = Sampling(max_new_tokens=12)
        ours, theirs = (pair(path, toys.random_draft()).generate(PROMPTS, how, shape=shape) for path in targets)
        assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]


def test_as_transformers_reads_it(targets):
    """The same file through its reader: the same logits."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(
        targets[0], quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32, attn_implementation="eager"
    )
    engine = pair(targets[0])
    for prompt in PROMPTS:
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].float()
        right = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(engine.score(prompt).logprobs, right, atol=2e-2, rtol=2e-2)  # its experts are bf16


def shares(config, tensors, toys, hidden, width, size, **how):
    """What each rank of `size` holds of the experts."""
    found = Checkpoint.open(toys.save({"quantization_config": config}, tensors))
    form, held = format_of(found.config, found.where), []
    for rank in range(size):
        source = Source(form.view(found), "cpu", torch.float32, rank, size)
        held.append(form.declare_woven(source.prefixed("mlp.experts."), 4, hidden, width, **how))
        source.fill()
    return held


def stored_experts(hidden, width):
    """(tensors of four experts, gate and up one below the other, down, biases likewise)."""
    draw = torch.Generator().manual_seed(3)
    wide, tall = torch.randn(4, 2 * width, hidden, generator=draw), torch.randn(4, hidden, width, generator=draw)
    bias, last = torch.randn(4, 2 * width, generator=draw), torch.randn(4, hidden, generator=draw)
    (blocks, scales), (tall_blocks, tall_scales) = mxfp4.pack(wide / 8), mxfp4.pack(tall / 8)
    tensors = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales, "gate_up_proj_bias": bias}
    tensors |= {"down_proj_blocks": tall_blocks, "down_proj_scales": tall_scales, "down_proj_bias": last}
    wide, tall = mxfp4.unpack(blocks, scales), mxfp4.unpack(tall_blocks, tall_scales)
    apart = [torch.cat([m[:, ::2], m[:, 1::2]], 1) for m in (wide, bias)]
    return {f"mlp.experts.{name}": t for name, t in tensors.items()}, *apart, tall, last


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_share_whole_groups(toys, size):
    """The sum over ranks is what one rank computes. Mutants: the last bias added by every rank; scales not cut."""
    tensors, wide, bias, tall, last = stored_experts(64, 256)
    held = shares(CONFIG, tensors, toys, 64, 256, size)
    draw = torch.Generator().manual_seed(1)
    x, ids = torch.randn(5, 64, generator=draw), torch.rand(5, 4, generator=draw).topk(2, 1).indices
    weights = torch.rand(5, 2, generator=draw)
    expected = experts.reference(x, ids, weights, wide, tall, "clamped_swiglu", None, bias, last)
    total = sum(e.apply(REFERENCE, x, None, 0.0, lambda *_: (x, ids, weights), "clamped_swiglu", None) for e in held)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


def test_ranks_hold_whole_experts(toys):
    """`--expert-parallel`: the matrices of the rank's own experts, and their biases on every rank."""
    tensors, wide, _, tall, last = stored_experts(64, 96)
    for rank, e in enumerate(shares(CONFIG, tensors, toys, 64, 96, 2, dealt=True)):
        mine = slice(2 * rank, 2 * rank + 2)
        rows = experts_mxfp4.dequantise(e.gate_up, e.gate_up_scale)
        assert torch.equal(torch.cat([rows[:, ::2], rows[:, 1::2]], 1), wide[mine])
        assert torch.equal(experts_mxfp4.dequantise(e.down, e.down_scale), tall[mine])
        assert torch.equal(e.down_bias, last[mine])


def test_a_split_group_is_refused(toys):
    """gpt-oss's own width: 2880 is 90 groups."""
    with pytest.raises(Refused, match="does not divide; sizes that work: 1, 2, 3, 5, 6, 9, 10, 15, 18, 30, 45$"):
        shares(CONFIG, stored_experts(64, 2880)[0], toys, 64, 2880, 4)


@pytest.mark.parametrize("config", [INT4, FP8], ids=["int4", "fp8"])
def test_other_formats_are_refused(toys, targets, config):
    def change(raw, tensors):
        raw["quantization_config"] = {**config, "ignore": [], "modules_to_not_convert": None}

    path = toys.altered(targets[1], change)
    with pytest.raises(Refused) as error:
        pair(path)
    one_line(error, path)


def test_one_by_one_is_refused(toys):
    path = toys.altered(toys.history(), lambda raw, tensors: raw.update(quantization_config=CONFIG))
    with pytest.raises(Refused) as error:
        pair(path)
    one_line(error, path, "mxfp4", "gpt-oss")


def test_random_weights():
    form, (d, i) = format_of({"quantization_config": CONFIG}, "here"), (256, 128)
    source = Source(form.view(AnyCheckpoint({"quantization_config": CONFIG})), "cpu", torch.bfloat16)
    e = form.declare_woven(source.prefixed("model.layers.0.mlp.experts."), 4, d, i)
    source.fill()
    for words, scale, size in ((e.gate_up, e.gate_up_scale, 1), (e.down, e.down_scale, 0.5**0.5)):
        matrix = experts_mxfp4.dequantise(words, scale)
        assert 0.6 < matrix.std() * matrix.shape[-1] ** 0.5 / size < 1.6 and matrix.isfinite().all()
