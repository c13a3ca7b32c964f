"""What a bench command writes, and `python -m bench.demo` on a small slice of its work."""

import json
import math
import subprocess
from types import SimpleNamespace

import pytest
import torch

from bench import demo, results
from bench.results import ROOT, Figure, Workload
from engine import Shape
from engine.report import Run

KEYS = ["command", "commit", "dirty", "when", "environment", "workload", "figures"]
WORKLOAD = ["target", "draft", "layers", "tp", "tp_slice", "context", "batch", "dtype", "routing", "prompts_hash"]
FIGURE = ["name", "unit", "value", "p10", "p90", "repeats", "floor", "fraction", "experts", "note"]
LOAD = Workload("t", None, 7, 1, None, 512, 1, "float32", "text", "0")


def made(figures):
    return results.document("python -m bench.x", {"gpu": None}, LOAD, figures)


def test_a_figure_is_the_median_of_its_repeats():
    """Mutants: the mean; the last repeat; percentiles of the unsorted list."""
    figure = Figure.of("plain", "ms", [9, 1, 2, 100, 3], floor=1.5, experts=8.0)
    assert (figure.value, figure.repeats) == (3.0, [9.0, 1.0, 2.0, 100.0, 3.0])
    assert (figure.p10, figure.p90) == (pytest.approx(1.4), pytest.approx(63.6))
    assert figure.fraction == 0.5  # twice the floor's time


def test_a_rate_reaches_a_share_of_its_floor():
    """Mutant: floor / value whatever the unit."""
    assert Figure.of("read_bandwidth", "TB/s", 4.0, floor=5.0).fraction == 0.8
    alone = Figure.of("load", "s", 2)
    assert (alone.floor, alone.fraction, alone.p10, alone.p90) == (None, None, None, None)


def test_the_document_has_the_agreed_keys(tmp_path):
    """Mutants: a key left out or renamed; figures as objects of Python."""
    run = made([Figure.of("plain", "ms", [1, 2]), Figure.of("gap", "ms", 1, note="ümlaut")])
    results.write(tmp_path / "run.json", run)
    read = json.loads((tmp_path / "run.json").read_text())
    assert read == run and list(read) == KEYS
    assert list(read["workload"]) == WORKLOAD and [list(figure) for figure in read["figures"]] == [FIGURE] * 2
    assert len((tmp_path / "run.json").read_text().splitlines()) < 15 and list(tmp_path.iterdir()) == [
        tmp_path / "run.json"
    ]


def test_a_run_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    """Mutants: written in place; NaN let through, which JSON has not."""

    def killed(path, text, encoding):
        path.write_bytes(text[:20].encode(encoding))
        raise KeyboardInterrupt

    path = tmp_path / "run.json"
    results.write(path, made([Figure.of("plain", "ms", 1)]))
    before = path.read_text()
    with pytest.raises(ValueError):
        results.write(path, made([Figure.of("plain", "ms", math.nan)]))
    monkeypatch.setattr(results.Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        results.write(path, made([Figure.of("plain", "ms", 2)]))
    assert path.read_text() == before


def test_the_commit_is_the_checkout_that_ran(monkeypatch, tmp_path):
    """Mutants: the commit of the current directory; kept results count as changes; a new file does not."""

    def git(*words):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert (made([])["commit"], made([])["dirty"]) == (None, None)
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "x")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "run.json").write_text("{}")
    assert (len(made([])["commit"]), made([])["dirty"]) == (40, False)
    (tmp_path / "new.py").write_text("")
    assert made([])["dirty"] is True


def test_the_hash_is_of_the_prompts():
    """Mutants: their order or their borders do not count."""
    hashes = {results.prompts_hash(p) for p in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])}
    assert len(hashes) == 3 and results.prompts_hash([[1, 2], [3]]) in hashes


def test_the_environment_names_the_machine():
    found = results.environment(torch.device("cpu"), torch.float32)
    assert found["torch"] == torch.__version__ and found["gpu"] is None and found["dtype"] == "float32"
    assert found["cores"] >= 1 and found["threads"] >= 1 and found["cpu"]
    json.dumps(found)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--shapes", "0-1-1"], "--shapes 0-1-1"),
        (["--shapes", "3-1-9"], "draft_tokens is 9"),
        (["--shapes", "three"], "three"),
        (["--json", "nowhere/run.json"], "--json nowhere/run.json"),
        (["--heldout", "nowhere.bin.xz"], "nowhere.bin.xz"),
        (["--repeats", "0"], "--repeats"),
        (["--fast"], "--fast"),
        (["--device", "abacus"], "abacus"),
        (["--check", "--prompts", "3"], "--check"),
    ],
)
def test_what_the_demo_refuses(argv, said, capsys):
    """One line, exit code 2, before anything runs."""
    assert demo.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_the_demo_measures_what_it_says(tmp_path, capsys):
    """Mutant: a figure left out of the document, or named otherwise."""
    path = tmp_path / "run.json"
    argv = ["--shapes", "2-1-3", "--prompts", "2", "--new-tokens", "12", "--repeats", "1", "--device", "cpu"]
    assert demo.main([*argv, "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    values = {figure["name"]: figure["value"] for figure in run["figures"]}
    assert {n for n in values if n.startswith("accept")} == {
        "accept_length.2-1-3",
        "accept_rate.2-1-3.1",
        "accept_rate.2-1-3.2",
    }
    assert values["identical.2-1-3"] == values["identical.0-1-1"] == 1
    assert all(values[f"tokens_per_second.{shape}"] > 0 for shape in ("0-1-1", "2-1-3"))
    assert {f"head_top1.{step}" for step in (1, 2, 3, 4)} < set(values) and 0.3 < values["head_top1.1"] < 1
    assert {"first_token_seconds", "distinct_4gram_share", "prefill", "load"} < set(values)
    assert run["workload"]["batch"] == [1, 8] and run["command"].startswith("python -m bench.demo --shapes 2-1-3")
    assert "accept_length.2-1-3" in capsys.readouterr().out


def fake(ids):
    return Run([SimpleNamespace(token_ids=i) for i in ids], [], 0)


def test_identity_looks_at_every_run():
    """Mutants: only the batch; only the first of the timed runs."""
    plain, shape = Shape(0, 1, 1), Shape(3, 1, 4)
    good, bad = fake([[1, 2], [3, 4]]), fake([[1, 2], [3, 5]])
    first, wrong = fake([[1, 2]]), fake([[1, 3]])
    for runs, timed, same in ((good, [first, first], 1), (bad, [first], 0), (good, [first, wrong], 0)):
        assert demo.identity(shape, {plain: good, shape: runs}, timed, 8).value == same


def test_distinct_is_a_share_of_four_grams():
    """Mutants: of tokens; a loop counted once."""
    assert demo.distinct([1, 2, 3, 4, 5]) == 1 and demo.distinct([7] * 13) == 0.1 and demo.distinct([1]) == 1


def test_short_names_what_is_missed():
    """Mutants: a figure that was not measured passes; "at most" read as "at least"."""
    values = {name: bound for name, (bound, _) in demo.REACH.items()}
    assert demo.short(values) == []
    assert len(demo.short({**values, "first_token_seconds": 15.1, "accept_length.3-1-4": 2.39})) == 2
    assert len(demo.short({})) == len(demo.REACH)


@pytest.mark.parametrize("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_kept_runs_are_whole_and_listed(path):
    """Mutants: a run without its line in the list; one written by hand or by an older format."""
    run, listed = json.loads(path.read_text()), (path.parent / "README.md").read_text()
    assert list(run) == KEYS and f"`{path.name}`" in listed
    assert list(run["workload"]) == WORKLOAD and all(list(figure) == FIGURE for figure in run["figures"])
    assert run["command"].startswith("python -m bench.") and len(run["commit"]) == 40
