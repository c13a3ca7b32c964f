"""What cycles cost: measured when an engine starts, by all ranks together, and kept; and `--shape auto` on the command
line."""

import json

import pytest
import torch
from test_auto import FAIR, SHAPES
from toys import NEXT, follow, pair

from engine import Engine, Sampling, Shape, measure, spawn
from engine.auto import AUTO, GRID
from engine.cost import CostTable, json_of, table_of
from engine.shape import PLAIN


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "eagle3-engine"


def chosen(target, draft):
    """On each rank: the costs it goes by, ids and shapes of two requests, ids of plain decoding."""
    torch.set_num_threads(1)
    engine = pair(target, draft, tp=2, max_context=128, max_batch=2, shapes=SHAPES[:2])
    how = [Sampling(max_new_tokens=60)] * 2
    plain = [r.token_ids for r in engine.generate([[3], [5, 9]], how, shape=PLAIN)]
    found = engine.generate([[3], [5, 9]], how, shape=AUTO)
    return json_of(engine.auto.tables[2]), [r.token_ids for r in found], [r.shapes for r in found], plain


def test_ranks_measure_and_choose_together(home, toys):
    """Two processes measure, each with a clock of its own, and go by the same costs. Mutants: how many cycles to time
    decided by each rank's clock, which leaves one waiting; a table of each rank's own; another rank's file read."""
    one, other = spawn(chosen, 2, toys.history(), toys.random_draft())
    assert one == other and one[1] == one[3] and len(list(home.iterdir())) == 1


def test_costs_are_measured_once_and_kept(home, toys, monkeypatch):
    """Mutants: a key without the shapes, the code or the batch; a file that is not whole; a stale one that is used."""
    load = dict(device="cpu", max_context=128, max_batch=2, shape=AUTO, shapes=SHAPES)
    engine = Engine.load(toys.history(), toys.random_draft(), **load)
    (file,) = home.iterdir()
    table = engine.auto.tables[1]
    assert engine.auto.origin[1].startswith("measured") and str(file) in engine.auto.origin[1]
    assert set(table.shapes) == set(SHAPES) and set(table.catch_up) == {8, 64} and table.plain > 0
    assert all(table.cycle(s) > table.plain / 2 for s in SHAPES)
    assert not any(key[-1] for key in engine.programs.cycles)  # no stamped cycle is left
    assert engine.pool.free == engine.pool.size
    again = Engine.load(toys.history(), toys.random_draft(), **load)
    assert again.auto.origin[1] == f"read from {file}" and again.auto.tables[1] == table
    again.prepare(AUTO, 2)
    assert again.auto.origin[2].startswith("measured") and len(list(home.iterdir())) == 2
    stale = Engine.load(toys.history(), toys.random_draft(), **load | {"shapes": SHAPES[:2]})
    assert stale.auto.origin[1].startswith("measured") and set(stale.auto.tables[1].shapes) == set(SHAPES[:2])
    monkeypatch.setattr(measure, "_code", lambda: "another")
    assert Engine.load(toys.history(), toys.random_draft(), **load).auto.origin[1].startswith("measured")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"key": 1, "table": {}}', '{"key": {"a": 1}, "table": {"plain": 0}}', "\udcff"]
)
def test_a_kept_table_that_cannot_be_read_is_measured_again(text, tmp_path):
    """Mutant: any of these as an error."""
    file = tmp_path / "costs.json"
    assert measure.read(file, {"a": 1}) is None
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert measure.read(file, {"a": 1}) is None
    assert measure.keep(file, {"a": 1}, FAIR) == f"kept in {file}"
    assert measure.read(file, {"a": 1}) == FAIR and measure.read(file, {"a": 2}) is None
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_where_nothing_can_be_kept(tmp_path):
    """It says so, and goes on. Mutant: an error at start-up."""
    (tmp_path / "file").write_text("")
    said = measure.keep(tmp_path / "file" / "costs.json", {}, FAIR)
    assert said.startswith("not kept: ") and "\n" not in said


def test_ranks_take_the_slowest(toys):
    """A cycle ends when its slowest rank does, and all must decide by the same numbers. Mutant: each its own."""
    engine = pair(toys.history(), toys.random_draft())

    class Two:
        def every(self, numbers):
            return [numbers, [2 * x for x in reversed(numbers)]]

    engine.parts.tp = Two()
    assert measure._most(engine, [1.0, 5.0, 3.0]) == [6.0, 10.0, 3.0]


def test_a_table_survives_json():
    """Mutants: shapes or widths as texts; a rest of each shape summed up."""
    own = CostTable(1.5, {4: 2.0, 8: 3.0}, {Shape(3, 1, 4): 0.5}, 0.1, {1: 0.2}, {4: 9.0}, (Shape(3, 1, 4),), {8: 1.0})
    for table in (own, FAIR, CostTable(1.0, {4: 2.0}, shapes=(Shape(3, 1, 4),))):
        assert table_of(json.loads(json.dumps(json_of(table))), "x") == table


def test_the_command_line(home, toys, tmp_path, capsys):
    """The report says when the shape changed. Mutant: shapes of a fixed run."""
    from engine.generate import main

    ids, stats = tmp_path / "ids.jsonl", tmp_path / "stats.json"
    ids.write_text('{"token_ids": [3, 9]}')
    words = ["--target", toys.map(), "--draft", toys.map_draft(), "--prompt-file", str(ids), "--stats", str(stats)]
    words += ["--device", "cpu", "--max-context", "128", "--max-new-tokens", "40"]
    assert main([*words, "--shape", "auto"]) == 0
    said, run = capsys.readouterr().err, json.loads(stats.read_text())
    assert "shape auto: one of 0-1-1, 1-1-2" in said and "measured in" in said
    assert run["shapes"][0]["cycle"] == 0 and run["requests"][0]["token_ids"] == follow(9, 40, NEXT)
    names = {str(s) for s in (PLAIN, *GRID)}
    assert {entry["shape"] for entry in run["shapes"]} <= names and set(run["shapes"][0]) == {"cycle", "shape"}
    assert sum(entry["eager"] for entry in run["graphs"]) == run["requests"][0]["cycles"]
    assert main(words) == 0 and json.loads(stats.read_text())["shapes"] == []
