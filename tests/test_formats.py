"""Weight formats: packings by hand, agreement with the formats' own readers, tiny checkpoints against what they mean,
and the cut over ranks."""

import json

import pytest
import torch
from packers import FP8, INT4, fp8_tensors, grouped, int4_tensors, quantised, uneven
from toys import Noise, V, pair, target_config, target_tensors

from engine import Sampling, Shape
from engine.layers.moe import Router
from engine.sharing import Dealt
from kernels import REFERENCE, experts, experts_fp8, experts_int4, moe
from kernels.routing import Routing
from weights import AnyCheckpoint, Checkpoint, Refused, Source
from weights.formats import ExpertNames, format_of, fp8, int4

PROMPTS = [[3, 1, 4, 1, 5], [(7 * i + 2) % V for i in range(19)]]
TREE = Shape(3, 2, 8)


def test_int4_packing_by_hand():
    """Two words of the 16 codes in order. Mutants: the high nibble first; codes of two's complement; words along the
    other dimension."""
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    scale = torch.tensor([[0.5]])
    expected = torch.arange(-8, 8)[None] * 0.5
    assert torch.equal(int4.unpack(words, scale), expected)
    assert torch.equal(experts_int4.dequantise(words, scale), expected)
    groups = torch.cat([words, words, words, words], 1)
    assert experts_int4.dequantise(groups, torch.tensor([[1.0, 100.0]]))[0, [31, 32, 63]].tolist() == [7, -800, 700]


def test_int4_pack_is_the_inverse():
    """Kimi's codes, -7 to 7, come back whole; each group has its own scale."""
    codes = torch.randint(-7, 8, (5, 128), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32] = 7
    scale = torch.tensor([0.25, 0.001953125, 4.0, 1.0])
    weight = codes * scale.repeat_interleave(32)
    words, found = int4.pack(weight, 32)
    assert torch.equal(int4.unpack(words, found), weight) and torch.equal(found.float(), scale.expand(5, 4))
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (5, 16))


def test_fp8_blocks_by_hand():
    """Partial blocks at both edges. Mutants: scales transposed; the reciprocal; blocks counted from the far edge."""
    codes = torch.tensor([0x38, 0x40, 0xB8, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1, 2, -1, 448
    weight = codes[torch.arange(130 * 260) % 4].view(130, 260)
    scale = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    whole = experts_fp8.dequantise(weight, scale)
    assert torch.equal(whole, weight.float() * fp8.spread(scale, 130, 260))
    assert whole[0, [0, 1, 130, 259]].tolist() == [1, 2, -2, 3 * 448]
    assert whole[128, [0, 1, 130, 259]].tolist() == [10, 20, -20, 30 * 448]
    stacked = experts_fp8.dequantise(torch.cat([weight, weight]), torch.cat([scale, scale * 7]), parts=2)
    assert torch.equal(stacked, torch.cat([whole, 7 * whole]))


def test_int4_as_compressed_tensors_packs_it():
    """Its packer gives our words, its reader our numbers up to the rounding of its product to bf16."""
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (12, 96), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    words = package.pack_to_int32(codes, 4)
    assert torch.equal(int4.unpack(words, torch.ones(12, 3)), codes.float())
    assert torch.equal(package.unpack_from_int32(words, 4, torch.Size((12, 96))), codes)


def checkpoints(toys, pack, config, chosen, **changes):
    """(quantised, plain) toy targets that mean the same."""
    plain = target_config(layers=3, **changes)
    tensors = target_tensors(plain, Noise(0, gain=1.5))
    width = plain["moe_intermediate_size"]
    if width != 32:  # the toys' own width is fixed
        noise = Noise(7, gain=1.5)
        for name in tensors:
            if ".experts." in name:
                tensors[name] = noise.matrix(*((64, width) if "down" in name else (width, 64)))
    stored, meant = quantised(uneven(tensors), pack, chosen)
    return toys.save({**plain, "quantization_config": config}, stored), toys.save(plain, meant)


def experts_only(module):
    return ".experts." in module


def projections(module):
    return module.endswith("_proj")


CASES = {
    "int4": (int4_tensors, INT4, experts_only),
    "int4, a plain first layer": (
        int4_tensors,
        {**INT4, "ignore": [*INT4["ignore"], "re:model\\.layers\\.0\\."]},
        lambda m: experts_only(m) and ".layers.0." not in m,
    ),
    "int4, every projection": (int4_tensors, {**INT4, "ignore": ["lm_head"]}, projections),
    "fp8": (fp8_tensors, {**FP8, "modules_to_not_convert": None}, projections),
    "fp8, experts": (fp8_tensors, {**FP8, "modules_to_not_convert": [".*self_attn"]}, experts_only),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_tiny_checkpoint(toys, case, nan_memory):
    """fp32: the same logits, and ids of chains and trees, as the matrices that are meant. Mutants: a scale of the
    neighbouring group; gate and up exchanged; an ignored module unpacked; attention left packed."""
    packed, plain = checkpoints(toys, *CASES[case])
    found, expected = pair(packed), pair(plain)
    for prompt in PROMPTS:
        torch.testing.assert_close(found.score(prompt).logprobs, expected.score(prompt).logprobs, atol=1e-4, rtol=1e-4)
    for shape in (Shape(0, 1, 1), TREE):
        ids = [
            pair(path, toys.random_draft()).generate(PROMPTS, Sampling(max_new_tokens=12), shape=shape)
            for path in (packed, plain)
        ]
        assert [r.token_ids for r in ids[0]] == [r.token_ids for r in ids[1]]
    first = found.target.layers[1].mlp.experts
    assert type(first).__name__ == {"int4": "Int4Experts", "fp8": "Fp8Experts"}[case[:4].strip(",")]


@pytest.mark.parametrize("case", ["int4", "fp8"])
def test_bfloat16(toys, case):
    """Within bf16 rounding of the matrices that are meant."""
    packed, plain = checkpoints(toys, *CASES[case])
    found, expected, exact = pair(packed, dtype="bfloat16"), pair(plain, dtype="bfloat16"), pair(plain)
    for prompt in PROMPTS:
        ours, theirs, right = (engine.score(prompt).logprobs for engine in (found, expected, exact))
        assert (ours - right).abs().max() < 1.5 * (theirs - right).abs().max() + 0.02


NAMES = [ExpertNames(*(f"mlp.experts.{e}.{part}_proj" for part in ("gate", "up", "down"))) for e in range(4)]


def shares(toys, pack, config, hidden, width, size, way=lambda form: form):
    """What each rank of `size` holds of four experts, shared out by `way`, and their whole matrices."""
    noise, tensors = Noise(3), {}
    for n in NAMES:
        for name, shape in ((n.gate, (width, hidden)), (n.up, (width, hidden)), (n.down, (hidden, width))):
            tensors[f"{name}.weight"] = noise.matrix(*shape)
    stored, meant = quantised(uneven(tensors), pack, lambda module: True)
    checkpoint = Checkpoint.open(toys.save({"quantization_config": config}, stored))
    form, held = format_of(checkpoint.config, checkpoint.where), []
    for rank in range(size):
        source = Source(form.view(checkpoint), "cpu", torch.float32, rank, size)
        held.append(way(form).declare(source, NAMES.__getitem__, len(NAMES), hidden, width))
        source.fill()
    wide = torch.stack([torch.cat([meant[f"{n.gate}.weight"], meant[f"{n.up}.weight"]]) for n in NAMES])
    return held, wide, torch.stack([meant[f"{n.down}.weight"] for n in NAMES])


def summed(held, wide, tall):
    """(sum over ranks, what the whole matrices give) of the same rows and choices."""
    draw = torch.Generator().manual_seed(1)
    x, ids = torch.randn(5, 128, generator=draw), torch.rand(5, 4, generator=draw).topk(2, 1).indices
    weights = torch.rand(5, 2, generator=draw)
    ops, router = moe.routed_by(REFERENCE, lambda *_: (x, ids, weights)), Router(torch.zeros(4, 128), Routing(2, True))
    total = sum(e.apply(ops, x, None, 0.0, router, "silu", None) for e in held)
    return total, experts.reference(x, ids, weights, wide, tall, "silu")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "pack, config, width",
    [
        (int4_tensors, INT4, 256),
        (lambda m, w: int4_tensors(m, w, 128), grouped(128), 1024),
        (fp8_tensors, FP8, 1024),
    ],
    ids=["int4-32", "int4-128", "fp8"],
)
def test_ranks_share_whole_groups(toys, pack, config, width, size):
    """The sum over ranks is what one rank computes from the whole matrices (B36). Mutants: scales not cut, or cut along
    the other dimension; gate and up cut as one matrix."""
    total, expected = summed(*shares(toys, pack, config, 128, width, size))
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pack, config", [(int4_tensors, INT4), (fp8_tensors, FP8)], ids=["int4", "fp8"])
def test_ranks_hold_whole_experts(toys, pack, config):
    """`--expert-parallel`: any width of whole groups, and nothing of a foreign expert is unexpected."""
    total, expected = summed(*shares(toys, pack, config, 128, 96, 2, Dealt))
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "pack, config, width, size, works",
    [
        (int4_tensors, INT4, 96, 2, "1, 3"),
        (lambda m, w: int4_tensors(m, w, 128), grouped(128), 256, 4, "1, 2"),
        (fp8_tensors, FP8, 768, 4, "1, 2, 3, 6"),
        (fp8_tensors, FP8, 192, 2, "1"),
    ],
    ids=["int4-32", "int4-128", "fp8", "fp8-partial"],
)
def test_a_split_group_is_refused(toys, pack, config, width, size, works):
    """Before anything is read, with the sizes that work. Mutant: the share's width alone is looked at."""
    with pytest.raises(Refused, match=f"does not divide; sizes that work: {works}$"):
        shares(toys, pack, config, 128, width, size)


@pytest.mark.parametrize("config", [INT4, grouped(64), FP8], ids=["int4", "int4-64", "fp8"])
def test_random_weights(config):
    """Packed random weights are declared by no list of names, have the size of plain ones and are the same again."""
    form = format_of({"quantization_config": config}, "here")
    parts = []
    for _ in range(2):
        source = Source(form.view(AnyCheckpoint({"quantization_config": config})), "cpu", torch.bfloat16)
        parts.append(form.declare(source, NAMES.__getitem__, len(NAMES), 256, 128))
        source.fill()
    e = parts[0]
    assert all(torch.equal(a, b) for a, b in zip(vars(e).values(), vars(parts[1]).values(), strict=True))
    if config["quant_method"] == "fp8":
        wide, tall = experts_fp8.dequantise(e.gate_up, e.gate_up_scale, 2), experts_fp8.dequantise(e.down, e.down_scale)
    else:
        wide, tall = experts_int4.dequantise(e.gate_up, e.gate_up_scale), experts_int4.dequantise(e.down, e.down_scale)
    for matrix, size in ((wide, 1), (tall, 0.5**0.5)):  # of one layer, two products are added to the residual stream
        assert 0.8 < matrix.std() * matrix.shape[-1] ** 0.5 / size < 1.3 and matrix.isfinite().all()


def test_a_random_target_of_packed_experts(tmp_path):
    """`--random FILE` of a config with a quantization_config runs; its memory is the packed bytes."""
    raw = target_config(layers=2) | {"quantization_config": INT4}
    (tmp_path / "some.json").write_text(json.dumps({"target": raw}))
    engine = pair(None, random=str(tmp_path / "some.json"))
    assert len(engine.generate([3, 9], Sampling(max_new_tokens=5, ignore_eos=True)).token_ids) == 5
    assert type(engine.target.layers[0].mlp.experts).__name__ == "Int4Experts"
