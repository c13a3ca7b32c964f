"""Tensor parallelism on GPUs: whole engines whose cycles are graphs with sums over peer memory inside."""

import pytest
import torch
import torch.distributed as dist
from toys import V, pair

from bench import lockstep
from engine import Sampling, Shape, loading, spawn, tp

pytestmark = pytest.mark.gpu
SHAPES = [Shape(0, 1, 1), Shape(3, 1, 4), Shape(4, 4, 16)]
PROMPT = [(11 * i + 3) % V for i in range(20)]


def gathered(self, x):
    """Library.gather by way of the host: NCCL does not serve two ranks on one GPU."""
    parts = [torch.empty_like(x, device="cpu") for _ in range(self.size)]
    dist.all_gather(parts, x.cpu())
    return torch.stack(parts).to(x.device)


def on_one_gpu(target, draft, options):
    """Both ranks on the first GPU -> {shape: ids and logits of emitted positions}, drawn ids, graphs. Sums go over peer
    memory, or it fails with the reason why not."""
    dist.init_process_group("gloo")
    tp.Library.gather = gathered
    loading.device_of = lambda name, size: torch.device("cuda", 0)
    engine = pair(target, draft, device="cuda", dtype="bfloat16", tp=2, graphs="required", **options)
    found, name = {}, engine.parts.tp.links.name
    if not name.startswith("one-shot over peer memory"):
        raise RuntimeError(f"sums are by {name}")
    for shape in SHAPES:
        events = list(engine.stream(PROMPT, Sampling(12, ignore_eos=True), shape=shape))
        rows = [e.tree.logits[e.accepted].cpu() for e in events if e.tree is not None]
        found[str(shape)] = [token for e in events for token in e.tokens], torch.cat(rows)
    drawn = engine.generate([PROMPT, PROMPT[:7]], Sampling(10, 1.0, seed=3), shape=SHAPES[1])
    return found, [r.token_ids for r in drawn], engine.graphs.report()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{"draft_tp": "cut"}, {"draft_tp": "replicated", "expert_parallel": True}], ids=str)
def test_two_ranks_on_one_gpu(toys, options):
    """Law 1 within the ranks: every shape gives the ids and logits of plain decoding to the bit, the same on both, in
    captured cycles over peer memory. Mutants: a sum in the order of arrival; a call's number fixed at capture; a row's
    sum that depends on the other rows."""
    first, second = spawn(on_one_gpu, 2, toys.history(), toys.random_draft(), options)
    for found, drawn, graphs in (first, second):
        assert all(entry["captured"] for entry in graphs)
        ids, logits = found[str(SHAPES[0])]
        for other, rows in found.values():
            assert other == ids and torch.equal(rows, logits)
        assert drawn == first[1]
    for key, (ids, logits) in first[0].items():
        assert second[0][key][0] == ids and torch.equal(second[0][key][1], logits)


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_two_gpus(toys):
    """HISTORY toys: fp32 has the ids of one GPU, bf16 those of plain decoding to the bit; both ranks alike."""
    assert lockstep.main(["--target", toys.history(), "--draft", toys.random_draft(), "--tp", "2"]) == 0
