"""Tensor parallelism of the layers over gloo: two ranks give the ids, logits and features of one."""

import socket

import pytest
import torch
import torch.distributed as dist
from families import VARIANTS, checkpoint
from oracles import Replay
from toys import V, pair

from engine import Refused, Sampling, Shape, loading
from engine.tp import TP

SHAPES = [Shape(0, 1, 1), Shape(3, 1, 4), Shape(4, 4, 16)]
FAMILIES = ("mixtral windowed, tied", "glm groups", "gpt-oss")
PROMPTS = [[9, 8, 7, 40, 2], [(11 * i + 3) % V for i in range(20)]]


def record(target, draft):
    """What a rank computes: for each drafter and shape the ids, and logits, features and proposals of a stream."""
    engine = pair(target, draft)
    out, texts = {}, None
    for name in ("head", "oracle"):
        for shape in SHAPES:
            results = engine.generate(PROMPTS, Sampling(max_new_tokens=16), shape=shape)
            events = list(engine.stream(PROMPTS[1], Sampling(max_new_tokens=8), shape=shape))
            trees = [e.tree for e in events if e.tree is not None]
            out[name, str(shape)] = {
                "ids": [r.token_ids for r in results],
                "cycles": [r.stats["emitted_per_cycle"] for r in results],
                "proposals": [t.tokens.tolist() for t in trees],
                "logits": torch.cat([t.logits for t in trees]),
                "features": torch.cat([e.features for e in events]),
            }
            texts = texts or [p + r.token_ids + [0] * 8 for p, r in zip(PROMPTS, results, strict=True)]
        engine.drafter = Replay(texts, V, 0.7)
    return out, sum(r.nbytes for r in engine.parts.cache.storage.values()), [r.nbytes for r in engine.parts.reports]


def worker(rank, port, pairs, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    loading.TP = lambda: TP(rank, 2)
    torch.save([record(*paths) for paths in pairs], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_ranks_are_one(toys, tmp_path):
    """Target and head, cut: same ids, accept lengths and proposals, logits and features within 1e-4 on both ranks, half
    the bytes each. With a dense layer, a tied head, a head of its own vocabulary and a borrowed embedding; windows,
    sinks, biases of experts, a shared one. Mutants: one all-reduce missing or doubled (residual or the bias of experts
    added on every rank); features read before the sum (B03); ids of a share not moved by its start; q, k and v cut as
    one block; gate and up cut before they are taken apart."""

    def borrow(config, tensors):
        del tensors["embed_tokens.weight"]

    pairs = [
        (toys.history(), toys.random_draft()),
        (
            toys.history(seed=2, layers=2, mlp_only_layers=[1], tie_word_embeddings=True),
            toys.altered(toys.random_draft(seed=7, layers=2, draft_vocab=V), borrow),
        ),
        *((checkpoint(tmp_path / name, VARIANTS[name]), toys.random_draft()) for name in FAMILIES),
    ]
    torch.multiprocessing.spawn(worker, (free_port(), pairs, str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for number, paths in enumerate(pairs):
        want, cache_bytes, weight_bytes = record(*paths)
        for got, own_cache, own_weights in (rank[number] for rank in ranks):
            assert own_cache == cache_bytes / 2
            assert all(own < 0.75 * whole for own, whole in zip(own_weights, weight_bytes, strict=True))
            for key, values in want.items():
                for part in ("ids", "cycles", "proposals"):
                    assert got[key][part] == values[part], (key, part)
                torch.testing.assert_close(got[key]["logits"], values["logits"], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(got[key]["features"], values["features"], atol=1e-4, rtol=1e-4)
        first, second = (rank[number][0] for rank in ranks)
        for key in want:  # to the bit on all ranks
            assert torch.equal(first[key]["logits"], second[key]["logits"])
            assert torch.equal(first[key]["features"], second[key]["features"])


@pytest.mark.parametrize("size, heads", [(4, {}), (2, {"kv_heads": 1})])
def test_a_size_that_cuts_a_key_head_is_refused(toys, monkeypatch, size, heads):
    """B41: a target's two key heads over 4 ranks, a head's one over 2; named with the sizes that work. Mutant: heads
    cut in the middle, because their rows divide."""
    monkeypatch.setattr(loading, "TP", lambda: TP(0, size))
    with pytest.raises(Refused, match=rf"k_proj.weight.*{size // 2} equal parts.*size {size}.*work: 1"):
        pair(toys.history(), toys.random_draft(**heads))
