"""Tensor parallelism over gloo: any number of ranks gives the ids, logits and features of one, from a share of the
bytes, and sizes that do not divide are refused in the same words everywhere."""

import os
import re

import pytest
import torch
from families import VARIANTS, checkpoint
from latent_toys import KIMI, deepseek, deepseek_config, deepseek_tensors
from oracles import Replay
from packers import INT4, int4_tensors, quantised, uneven
from test_formats import CASES as PACKED
from test_formats import checkpoints
from test_formats_mxfp4 import alike
from test_llama import VARIANTS as LLAMAS
from test_llama import checkpoint as llama
from toys import KV_HEADS, Noise, V, one_line, pair

import weights.checkpoint
from engine import Refused, Sampling, Shape, loading, spawn
from engine.tp import TP, Library
from kernels import peers

SHAPES = [Shape(0, 1, 1), Shape(3, 1, 4), Shape(4, 4, 16)]
FAMILIES = ("mixtral windowed, tied", "glm groups", "gpt-oss")
PROMPTS = [[9, 8, 7, 40, 2], [(11 * i + 3) % V for i in range(20)]]
WHOLE = re.compile(r"norm|mlp\.gate\.weight|fc\.weight|d2t")  # what every rank needs all of


class Counted:
    """Bytes of each stored tensor that this process reads."""

    def __init__(self):
        self.read, own = {}, weights.checkpoint.Checkpoint.read_into

        def read_into(checkpoint, place, name, index=None):
            part = checkpoint.read(name, index=index)
            key = os.path.basename(checkpoint.where), name
            self.read[key] = self.read.get(key, 0) + part.numel() * part.element_size()
            own(checkpoint, place, name, index)

        weights.checkpoint.Checkpoint.read_into = read_into


def record(size, cases):
    """What a rank computes of each (target, draft, options): for each drafter and shape the ids, and logits, features
    and proposals of a stream; bytes of its cache; bytes read of each tensor."""
    torch.set_num_threads(1)
    counted, found = Counted(), []
    for target, draft, options in cases:
        counted.read.clear()
        engine = pair(target, draft, tp=size, **(options if size > 1 else {}))
        out, texts = {}, None
        for name in ("head", "oracle"):
            for shape in SHAPES:
                results = engine.generate(PROMPTS, Sampling(max_new_tokens=12), shape=shape)
                events = list(engine.stream(PROMPTS[1], Sampling(max_new_tokens=6), shape=shape))
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
        cache = engine.parts.cache.storage["target"].nbytes
        found.append((out, cache, dict(counted.read), engine.parts.rank_bytes))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_are_one(toys, size):
    """Target and head, cut, replicated, experts whole: same ids, accept lengths and proposals, logits and features
    within 1e-4, and to the bit on all ranks. With a dense layer, a tied head, a head of its own vocabulary, a borrowed
    embedding, and fewer heads of keys than ranks (B41). Each rank reads 1/size of what is cut and one copy of the rest.

    Mutants: one all-reduce missing or doubled (residual added on every rank); features read before the sum (B03); ids
    of a share not moved by its start; q, k and v cut as one block; a shared head taken by rank modulo heads; a foreign
    expert counted; a replicated draft given a share of the embedding."""

    def borrow(config, tensors):
        del tensors["embed_tokens.weight"]

    tied = toys.history(seed=2, layers=2, mlp_only_layers=[1], tie_word_embeddings=True)
    borrowed = toys.altered(toys.random_draft(seed=7, layers=2, draft_vocab=V), borrow)
    cases = [
        (toys.history(), toys.random_draft(kv_heads=1), {"draft_tp": "cut"}),
        (tied, borrowed, {"draft_tp": "replicated", "expert_parallel": True}),
    ]
    ranks = spawn(record, size, size, cases)
    wanted = record(1, cases)
    for number, (want, cache_bytes, whole, _) in enumerate(wanted):
        same(want, [rank[number][0] for rank in ranks])
        for _, own_cache, read, held in (rank[number] for rank in ranks):
            assert own_cache == cache_bytes / min(size, KV_HEADS)
            assert len(held) == size and held[0][0] < 0.75 * sum(whole.values())
            for key, nbytes in read.items():
                parts = 1 if WHOLE.search(key[1]) or (number == 1 and key[0] == os.path.basename(borrowed)) else size
                if ".k_proj" in key[1] or ".v_proj" in key[1]:
                    parts = min(parts, 1 if key[0] == os.path.basename(cases[0][1]) else KV_HEADS)
                share = whole[key] / parts
                if number == 1 and key[1] == "model.embed_tokens.weight":
                    share += whole[key]  # the replicated head's own copy
                assert nbytes == (whole[key] if ".experts." in key[1] and number == 1 else share), key
            experts = [key for key in whole if ".experts." in key[1]]
            assert sum(read.get(key, 0) for key in experts) == sum(whole[key] for key in experts) / size


def same(want, ranks):
    """What `record` found in a case: on all ranks to the bit, and as on one device."""
    for got in ranks:
        for key, values in want.items():
            for part in ("ids", "cycles", "proposals"):
                assert got[key][part] == values[part], (key, part)
            for part in ("logits", "features"):
                torch.testing.assert_close(got[key][part], values[part], atol=1e-4, rtol=1e-4)
                assert torch.equal(got[key][part], ranks[0][key][part]), (key, part)


@pytest.mark.parametrize("size", [2, 4])
def test_every_family(toys, tmp_path, size):
    """Windows, sinks, biases of experts and MLPs, a shared expert (B41: on four ranks too), latent attention on four
    ranks; INT4 groups, FP8 blocks, MXFP4; experts stored together, cut and dealt out. Mutants: the bias of experts or
    the shared one added on every rank; gate and up cut before they are taken apart; words cut and scales not (B36)."""
    cut, draft = {"draft_tp": "cut"}, toys.random_draft()
    names = FAMILIES if size == 2 else ("glm groups", "mixtral windowed, tied")
    cases = [(checkpoint(tmp_path / name, VARIANTS[name]), draft, cut) for name in names]
    form, width = ("fp8, experts", 256) if size == 2 else ("int4", 128)
    packed, _ = checkpoints(toys, *PACKED[form], moe_intermediate_size=width)
    cases += [(packed, draft, cut), (llama(tmp_path / "llama", LLAMAS["mlp bias"]), draft, cut)]
    cases.append((deepseek(toys) if size == 4 else alike(tmp_path, 128)[0], draft, cut))
    if size == 2:
        cases.append((*cases[2][:2], cut | {"expert_parallel": True}))
    ranks = spawn(record, size, size, cases)
    for number, (want, *_) in enumerate(record(1, cases)):
        same(want, [rank[number][0] for rank in ranks])


def normed_sums(size, cases):
    """`record` where sums bring the norm that follows, as peer memory does."""

    def sum_and_norm(self, x, residual, weight, eps):
        brought.append(len(x))
        return peers.reference(self.gather(x), residual, weight, eps)

    brought, Library.sum_and_norm = [], sum_and_norm
    return record(size, cases), len(brought)


def kimi(toys):
    """Experts in INT4 beside a shared one, latent attention."""
    config = deepseek_config(**KIMI, moe_intermediate_size=64)
    tensors = uneven(deepseek_tensors(config, Noise(8, gain=1.5)))
    stored, _ = quantised(tensors, int4_tensors, lambda module: ".mlp.experts." in module)
    return toys.save({**config, "quantization_config": INT4}, stored)


def test_norms_that_come_with_a_sum(toys, tmp_path):
    """The same on two ranks: experts with and without a shared one, of several formats, a dense layer, biases, latent
    attention. Mutants: rows normed twice; the sum where its norm is due, in the experts or the shared one; features
    taken from normed rows; a norm taken from the layer before."""
    tied = toys.history(seed=2, layers=2, mlp_only_layers=[1], tie_word_embeddings=True)
    packed, draft = checkpoints(toys, *PACKED["int4"], moe_intermediate_size=128)[0], toys.random_draft()
    targets = [packed, deepseek(toys), kimi(toys), llama(tmp_path / "llama", LLAMAS["mlp bias"])]
    targets += [checkpoint(tmp_path / name, VARIANTS[name]) for name in ("glm groups", "gpt-oss")]
    cut = {"draft_tp": "cut"}
    cases = [(tied, toys.random_draft(layers=2), cut), *((target, draft, cut) for target in targets)]
    ranks = spawn(normed_sums, 2, 2, cases)
    assert ranks[0][1] == ranks[1][1] > 0
    for number, (want, *_) in enumerate(record(1, cases)):
        same(want, [rank[0][number][0] for rank in ranks])


class Unlinked(TP):
    """A rank of many without the others: enough to judge a checkpoint."""

    def together(self, make):
        return make()

    def every(self, value):
        return [value] * self.size


@pytest.mark.parametrize(
    "size, target, draft, options, words",
    [
        (3, {}, {}, {}, ["tp: 3", "model.embed_tokens.weight", "64 equal parts", "whole pair: 1, 2, 4"]),
        (8, {}, None, {}, ["tp: 8", "q_proj.weight", "4 equal parts", "whole pair: 1, 2, 4"]),
        (4, {"moe_intermediate_size": 30}, None, {}, ["gate_proj.weight", "30 equal parts", "whole pair: 1, 2"]),
        (4, {"num_experts": 6}, None, {"expert_parallel": True}, ["experts", "6 equal parts", "whole pair: 1, 2"]),
        (4, {}, {"draft_vocab": 30}, {"draft_tp": "cut"}, ["lm_head.weight", "30 equal parts", "whole pair: 1, 2"]),
        (2, {}, {"kv_heads": 1}, {"device": "cuda:0"}, ["cuda:0", "2 ranks"]),
    ],
)
def test_a_size_that_does_not_divide_is_refused(toys, monkeypatch, size, target, draft, options, words):
    """Heads, experts, widths and vocabularies, of target and draft: before a weight is read, with the sizes that all of
    the pair could be cut into, and by every rank in the same words. Mutants: heads cut in the middle, because their
    rows divide; sizes of the one tensor; a refusal of rank 0 alone."""
    monkeypatch.setattr(weights.checkpoint.Checkpoint, "read_into", None)
    draft = "none" if draft is None else toys.random_draft(**draft)
    said = set()
    for rank in range(size):
        monkeypatch.setattr(loading, "join", lambda size, device, total, rank=rank: Unlinked(rank, size))
        with pytest.raises(Refused) as error:
            pair(toys.history(**target), draft, tp=size, **options)
        one_line(error, *words)
        said.add(str(error.value))
    assert len(said) == 1


def test_auto_replicates_a_draft_that_cannot_be_cut(toys, monkeypatch):
    """Whatever a collective costs. Mutant: a pair is refused for its draft's sizes."""
    monkeypatch.setattr(loading, "join", lambda size, device, total: Unlinked(0, size))
    engine = pair(toys.history(), toys.random_draft(draft_vocab=30), tp=4)
    assert engine.parts.draft_tp == "replicated, for its sizes do not divide"
    assert engine.drafter.head.weight.shape[0] == 30 and engine.target.head.weight.shape[0] == V // 4
