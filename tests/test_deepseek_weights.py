"""Weights of targets with latent attention: packed as Kimi and DeepSeek publish theirs, and cut over ranks."""

from dataclasses import dataclass, field

import pytest
import torch
from latent_toys import KIMI, V2_LITE, DeepSeek, deepseek, deepseek_config, deepseek_tensors, nested
from packers import FP8, INT4, fp8_tensors, int4_tensors, quantised, uneven
from test_deepseek import agrees
from test_heads_latent import HEADS
from test_tp import record
from test_tp import same as ranks_are_one
from toys import Noise

from engine import spawn
from engine.batch import Batch
from engine.cache import Cache
from engine.targets import TARGETS
from engine.tp import TP
from kernels import REFERENCE
from weights import Checkpoint, Refused, Source
from weights.config import DeepseekConfig
from weights.formats import format_of

pytestmark = pytest.mark.usefixtures("nan_memory")
PACKED = {
    "Kimi-K2.5, experts in INT4": (KIMI, INT4, int4_tensors, lambda module: ".mlp.experts." in module),
    "DeepSeek-V3, every projection in FP8": (
        {},
        {**FP8, "modules_to_not_convert": None},
        fp8_tensors,
        lambda module: module.endswith(("_proj", "_proj_with_mqa")),
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_checkpoints(toys, name):
    """Logits and boundaries of the matrices that are meant, as transformers computes them. Mutants: the latent's
    projections read without their scales, the settings of formats looked for in the outer object only."""
    changes, format, pack, chosen = PACKED[name]
    config = deepseek_config(**changes)
    stored, meant = quantised(uneven(deepseek_tensors(config, Noise(8, gain=1.5))), pack, chosen)
    packed = toys.save({**config, "quantization_config": format}, stored)
    agrees(DeepSeek(toys, toys.save(config, meant)), nested(toys, packed) if "Kimi" in name else packed)


@dataclass(frozen=True)
class Share(TP):
    """A rank whose sums are left to the test: `parts` holds what it would have added."""

    parts: list = field(default_factory=list)

    def add(self, residual, product):
        self.parts.append(product(None))
        return residual

    def add_and_norm(self, residual, product, norm):
        return self.add(residual, product), None


def built(path, tp):
    """The target of a rank, its cache, its attention's outputs before they are summed, and its bytes."""
    checkpoint = Checkpoint.open(path)
    config = DeepseekConfig.read(checkpoint.config, path)
    source = Source(checkpoint, torch.device("cpu"), torch.float32, tp.rank, tp.size)
    form = format_of(checkpoint.config, path)
    target = TARGETS[config.architecture](config, source, (), 64, form, REFERENCE, tp)
    source.fill()
    return target, source.nbytes


@pytest.mark.parametrize("kind", ["V3", "V2-Lite"])
@pytest.mark.parametrize("size", [2, 4])
def test_heads_are_cut_and_rows_are_on_every_rank(toys, kind, size):
    """The shares of a layer's attention and experts add up to the whole; cached rows are the same on all ranks.
    Mutants: k_up and v_up cut as one block of rows, queries and latent cut as one, a rank's part of the latent."""
    path = deepseek(toys, **({} if kind == "V3" else V2_LITE))
    batch = Batch.causal(torch.arange(9)[None], torch.zeros(1, dtype=torch.int64), torch.tensor([[2, 1, 3]]).int())
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for tp in [TP(), *(Share(rank, size) for rank in range(size))]:
        target, nbytes = built(path, tp)
        cache = Cache({"target": target.cache_rows}, 4, 4, torch.float32, torch.device("cpu"))
        layer = target.layers[2]
        y, _ = layer.attention(x, x, batch, cache.layer("target", 2), 4, layer.mlp.norm)
        z = layer.mlp(x)
        outs = (y - x, z - x) if tp.size == 1 else tp.parts
        found.append((outs, cache.storage["target"], nbytes))
    (whole, rows, nbytes), *shares = found
    for i in range(2):
        torch.testing.assert_close(sum(outs[i] for outs, *_ in shares), whole[i], atol=1e-4, rtol=1e-4)
    assert all(torch.equal(own, rows) for _, own, _ in shares)
    assert all(own < nbytes * (0.75 if size == 2 else 0.55) for *_, own in shares)


def test_a_size_that_cuts_a_head_is_refused(toys):
    """Four heads over three ranks. Mutant: rows cut where they divide (4 heads of 18 rows over 3)."""
    with pytest.raises(Refused, match=r"q_b_proj.weight.*4 equal parts.*work: 1, 2, 4"):
        built(deepseek(toys, vocab_size=64), Share(0, 8))


def test_ranks_are_one(toys):
    """Two processes, a latent head cut and then whole on each, experts cut and then dealt out: ids, accept lengths and
    proposals of one device, logits and features within 1e-4 and to the bit on both. Mutant: a sum over ranks of what
    every rank holds."""
    path, head = deepseek(toys, layers=8), HEADS["EAGLE-3.1"].save(toys)[0]
    cases = [
        (path, head, {"draft_tp": "cut"}),
        (deepseek(toys, layers=8, **V2_LITE), head, {"draft_tp": "replicated", "expert_parallel": True}),
    ]
    ranks = spawn(record, 2, 2, cases)
    for number, (want, *_) in enumerate(record(1, cases)):
        ranks_are_one(want, [rank[number][0] for rank in ranks])
