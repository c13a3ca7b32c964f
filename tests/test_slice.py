"""One rank's share of a tensor-parallel model, alone: what that rank of a real group would hold and compute."""

import json

import pytest
import torch
from latent_toys import KIMI, deepseek_config
from toys import draft_config, one_line, target_config

from engine import Engine, Refused, Sampling, Shape
from engine.report import loaded, parallel
from engine.slice import Slice

SIZES = dict(device="cpu", max_context=128, page_size=16, max_batch=1)
CONFIGS = {"latent": deepseek_config(**KIMI), "grouped": target_config(layers=3)}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shape", [Shape(0, 1, 1), Shape(3, 1, 4), Shape(4, 4, 16)], ids=str)
def test_a_slice_runs_and_says_so(tmp_path, kind, shape):
    """A quarter of the bytes or little more, in the report too. Mutants: everything held; the share of another rank
    counted; a report that passes for a whole model."""
    (tmp_path / "c.json").write_text(json.dumps({"target": CONFIGS[kind]}))
    (tmp_path / "d.json").write_text(json.dumps({"draft": draft_config(layers=3, draft_vocab=32)}))
    pair = dict(random=str(tmp_path / "c.json"), draft=f"random:{tmp_path}/d.json")
    whole, part = (Engine.load(tp_slice=n, **pair, **SIZES) for n in (None, 4))
    held, all_of_it = part.parts.reports[0].nbytes, whole.parts.reports[0].nbytes
    assert all_of_it / 4 <= held < all_of_it * 0.45
    assert any("one rank of 4 alone" in line and "left out" in line for line in loaded(part.parts))
    assert parallel(part.parts)["tp_slice"] == 4 and "left out" in parallel(part.parts)["reduction"]
    result = part.generate([3, 1, 4, 1, 5], Sampling(max_new_tokens=9, ignore_eos=True), shape=shape)
    assert len(result.token_ids) == 9 and max(result.token_ids) < 16  # its share of 64 ids


def test_rows_of_a_slice_differ(tmp_path):
    """Ids that other ranks hold, too. Mutant: rows of zeros, which route alike and read few experts."""
    (tmp_path / "c.json").write_text(json.dumps({"target": CONFIGS["latent"]}))
    part = Engine.load(random=str(tmp_path / "c.json"), tp_slice=4, **SIZES)
    rows = part.target.embedding(torch.tensor([-1, 3, 17, 34, 63]))
    assert rows.abs().sum(1).min() > 0 and len(rows.unique(dim=0)) == 5


def test_a_slice_adds_nothing_twice():
    """Its part of a sum with the residual once. Mutant: the residual times the ranks."""
    tp, x = Slice.of(4), torch.ones(2, 3)
    assert torch.equal(tp.add(x, lambda carried: carried + 2), 3 * x)
    assert torch.equal(tp.all_reduce(x), x) and tp.all_gather(x).shape == (2, 12)
    y, normed = tp.links.sum_and_norm(x, 2 * x, x[0], 1e-6)
    assert torch.equal(y, 3 * x) and normed is None


def test_refused(tmp_path):
    """Mutants: a slice of real weights; a slice among ranks; sizes that do not divide."""
    (tmp_path / "c.json").write_text(json.dumps({"target": CONFIGS["latent"]}))
    for options, words in (
        ({"target": "x", "tp_slice": 2}, ("tp_slice: 2", "random")),
        ({"random": str(tmp_path / "c.json"), "tp_slice": 3}, ("sizes that work", "1, 2, 4")),
        ({"random": str(tmp_path / "c.json"), "tp_slice": 1}, ("tp_slice: 1", "from 2")),
    ):
        with pytest.raises(Refused) as error:
            Engine.load(**options, **SIZES)
        one_line(error, *words)
