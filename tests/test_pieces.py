"""Pieces of prompts in passes of fixed widths, as a GPU captures them: they give what each piece gives by itself."""

import pytest
import torch
from families import VARIANTS, checkpoint
from latent_toys import KIMI, deepseek
from test_prefix import CHAIN, LENGTH, PLAIN, run, same, sharing, small
from toys import V, disturb, pair

from engine import Engine, pieces
from engine.batch import Batch
from engine.pieces import Pieces
from engine.programs import Programs


class Launched:
    """engine.graph.Graphs that captures nothing; names: of what was run."""

    def __init__(self):
        self.names = []

    def run(self, program, batch, shape, stages):
        self.names.append(shape)
        program.run(stages)


@pytest.fixture
def widen(monkeypatch):
    """Function: from now on pieces of up to 3 rows are passes of 3, longer ones of 16. -> Launched. The page table is
    whole, as on a GPU."""
    monkeypatch.setattr(pieces, "WIDTHS", (3, 16))
    monkeypatch.setattr(Programs, "prompt_columns", lambda programs, pages: programs.columns)
    graphs = Launched()

    def forward(programs, target):
        return Pieces(target, graphs, programs.columns, programs.parts.max_context)

    return lambda: (monkeypatch.setattr(Programs, "forward", forward), graphs)[1]


def outcomes(engine, shape):
    """What requests of several lengths give, the last one after its beginning has been kept; nothing finite lies in
    rows that no request has written."""
    found = []
    for length in (*range(1, 10), LENGTH):
        disturb(engine, float("nan"))
        found += run(engine, sharing(17, length), shape, 9)[1]
    reused, seen = run(engine, sharing(18), shape, 9)
    assert reused == 16
    return found + seen


@pytest.mark.parametrize("shape", [PLAIN, CHAIN], ids=str)
def test_a_wider_pass_gives_the_same(toys, widen, shape):
    """Ids, logits, features and cache rows of both kinds, to the end of context and tables. Kills: rows beside the
    piece's own taken for its last; committed rows that they write; rows left unwritten that the pass reads, though with
    no weight; positions and rows past the tables."""
    engine = small(toys, max_context=LENGTH + 1, reserve=4)
    want, graphs = outcomes(engine, shape), widen()
    for a, b in zip(outcomes(engine, shape), want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=1e-4 if a.is_floating_point() else 0, rtol=1e-5)
    assert set(graphs.names) == {"prompt of 3", "prompt of 16"}


@pytest.mark.parametrize("features", ["boundary:0,1", "boundary:2"])
@pytest.mark.parametrize("name", ["map", "kimi", *VARIANTS])
def test_the_row_that_is_wanted(toys, tmp_path, name, features):
    """Every kind of attention, behind committed rows: the last layer's other rows are left out where no feature is that
    layer's; what is written and the features are the same. Kills: a row that sees too few keys or too many, the
    residual of another one, keys of one row alone."""
    make = {"map": toys.map, "kimi": lambda: deepseek(toys, num_hidden_layers=2, **KIMI)}
    path = make[name]() if name in make else checkpoint(tmp_path / name, VARIANTS[name])
    engine, found = pair(path, capture_layers=features), []
    pages, prefix = torch.tensor([[3, 5, 1]], dtype=torch.int32), torch.tensor([9])
    text = torch.randint(V, (1, 29), generator=torch.Generator().manual_seed(3))
    for wanted in (None, torch.tensor([17])):
        disturb(engine)
        engine.target.forward(Batch.causal(text[:, :9], prefix * 0, pages), engine.cache)
        batch = Batch.causal(text[:, 9:], prefix, pages, wanted)
        found.append((*engine.target.forward(batch, engine.cache), engine.cache.storage["target"].clone()))
    (hidden, *rest), (own, *others) = found
    layers = engine.target.config.layers
    assert len(own) == (20 if layers in engine.target.boundaries else 1)
    torch.testing.assert_close(own[17:18] if len(own) > 1 else own, hidden[17:18], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(others, rest, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_captured_passes_change_no_bit():
    """On a GPU: prompts of every width, begun and whole, in pieces, and to the end of the context, with captures and
    without; replayed over the rows that another prompt has left. Kills: captures over tensors of an earlier prompt, a
    width that is captured anew for each prompt."""
    sizes = dict(layers=3, max_context=4170, max_batch=1, page_size=16, reserve=16, prefill_chunk=4096)
    sizes |= dict(capture_layers="boundary:0,1,2", prefix_cache=False, random="qwen3-30b-a3b")
    made = {how: Engine.load(draft="random:qwen3-30b-a3b-eagle3", graphs=how, **sizes) for how in ("off", "required")}
    draw, seen = torch.Generator().manual_seed(5), {}
    for length in (1, 33, 64, 65, 129, 300, 512, 513, 1000, 1500, 2048, 2049, 4000, 4096, 4097, 4164, 512, 33):
        prompt = torch.randint(0, 100_000, (length,), generator=draw).tolist()
        for graphs, engine in made.items():
            disturb(engine)
            seen[graphs] = run(engine, prompt, CHAIN, 9)[1]
        assert same(seen["off"], seen["required"]), length
    names = [entry.shape for entry in made["required"].graphs.entries.values() if entry.stages == ("prompt",)]
    assert sorted(names) == sorted(f"prompt of {width}" for width in pieces.WIDTHS)
