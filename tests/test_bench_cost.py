"""The model of a cycle: `python -m bench.cost`, and which kept runs may be compared."""

import json
import math

import pytest

from bench import cost, reading, results
from bench.results import Figure, Workload
from engine import Shape
from engine.cost import CostTable, Fit, distinct, json_of, table_of
from weights.config import Refused

DEPLOYMENT = {"plain": 11.1, "verify": {"6": 28.7, "3": 25.6}, "rest": 1.2}
SIX, THREE = Shape(5, 1, 6), Shape(2, 1, 3)


@pytest.fixture
def saved(tmp_path):
    def save(content):
        path = tmp_path / "table.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return save


def test_the_worked_example(saved):
    """A known deployment. Mutants: rest left out; plain added; slope over cycles rather than verify passes."""
    table = cost.read(saved(DEPLOYMENT))
    assert (round(table.break_even(SIX), 2), round(table.break_even(THREE), 2)) == (2.69, 2.41)
    assert (round(table.fit.b, 2), round(table.fit.a, 1), table.fit.c) == (1.03, 22.5, None)
    assert "neither shape pays" in table.decision({SIX: 2.1, THREE: 2.1})
    honest = cost.read(saved(DEPLOYMENT | {"plain": 15.9}))
    assert "both shapes pay: 2-1-3 gives 78.4" in honest.decision({SIX: 2.1, THREE: 2.1})


def test_the_worked_example_on_the_command_line(saved, capsys):
    """Mutant: the decision for another accept length than the one given."""
    assert cost.main([saved(DEPLOYMENT), "--accept-length", "2.1"]) == 0
    out = capsys.readouterr().out
    assert "22.5 + 1.033 n" in out and "2.69" in out and "2.41" in out and "neither shape pays" in out
    assert cost.main([saved(DEPLOYMENT), "--accept-length", "2.1", "5-1-6=2.8"]) == 0
    assert "1 of 2 shapes pays (5-1-6)" in capsys.readouterr().out


def test_a_shape_pays_no_more_than_it_can_emit(saved):
    """Mutant: an accept length of 4 believed of a chain that emits 3 tokens at most."""
    table = CostTable(10.0, {3: 35.0})
    assert "does not pay" in table.decision({THREE: 4.0}) and table.tokens_per_second(THREE, 4.0) == pytest.approx(
        3000 / 35
    )


def test_the_fit_finds_the_three_coefficients():
    """Mutants: U left out of the matrix; residuals of the other sign; U of another row count."""
    u = {n: distinct(128, 8, n) for n in range(1, 17)}
    fit = Fit.of({n: 2.0 + 0.05 * n + 0.03 * u[n] + (0.4 if n == 5 else 0.0) for n in u}, u)
    exact = Fit.of({n: 2.0 + 0.05 * n + 0.03 * u[n] for n in u}, u)
    assert (exact.a, exact.b, exact.c) == pytest.approx((2.0, 0.05, 0.03)) and exact.error < 1e-9
    assert max(fit.residuals, key=fit.residuals.get) == 5 and fit.residuals[5] > 0.25
    assert exact(20, distinct(128, 8, 20)) == pytest.approx(3.0 + 0.03 * distinct(128, 8, 20))


def test_experts_that_say_nothing_of_their_own_get_no_coefficient():
    """Repeated rows read the same experts however many there are. Mutant: a coefficient that is noise."""
    fit = Fit.of({n: 3.0 + n for n in (1, 2, 3, 4, 8)}, dict.fromkeys((1, 2, 3, 4, 8), 8.0))
    assert fit.c is None and (fit.a, fit.b) == pytest.approx((3.0, 1.0))
    assert Fit.of({4: 7.0}).line().startswith("verify(n) = 7 + 0 n")


def test_different_experts_of_independent_rows():
    """The values of Qwen3-30B-A3B. Mutant: n k, capped at E."""
    found = [round(distinct(128, 8, n), 1) for n in (1, 2, 3, 4, 6, 8)]
    assert found == [8, 15.5, 22.5, 29.1, 41.1, 51.6]


def test_a_cycle_is_the_sum_of_its_parts():
    """Mutants: one step too many; the root counted as a draft pass; steps of another width."""
    table = CostTable(10.0, {4: 15.0, 16: 30.0}, rest={Shape(4, 4, 16): 2.0}, extend=1.0, step={1: 0.5, 4: 0.75})
    assert table.cycle(Shape(4, 4, 16)) == 30 + 1 + 3 * 0.75 + 2 and table.cycle(Shape(0, 1, 1)) == 10
    assert table.verify_ms(8) == pytest.approx(15 + 4 * 15 / 12)


def test_a_whole_cycle_is_believed_before_its_stages():
    """Stamps cost time and break overlap; a shape that was not measured gets what others take besides. Mutants: the sum
    of stages for a shape that was measured; its own rest in what is said of its parts; a rest below 0 cut off."""
    shapes = [Shape.parse(text) for text in ("1-1-2", "3-1-4", "2-4-8")]
    stages = {s: {"draft": [0.2 + 0.1 * (s.steps - 1)], "verify": [1 + 0.1 * s.draft_tokens]} for s in shapes}
    whole = dict(zip([Shape(0, 1, 1), *shapes], (0.9, 1.5, 1.7, 2.0), strict=True))
    table = CostTable.of_stages(stages, whole)
    assert {s: table.cycle(s) for s in whole} == pytest.approx(whole)
    assert list(table.rest.values()) == pytest.approx([0.1, -0.1, -0.1])
    assert table.of_parts(shapes[0]) == pytest.approx(1.4 - 0.1) and table.of_parts(shapes[1]) == pytest.approx(1.8)
    assert table.cycle(Shape(2, 1, 3)) == table.of_parts(Shape(2, 1, 3)) == pytest.approx(1.3 + 0.3 - 0.1)
    assert table_of(json_of(table), "x") == table


@pytest.mark.parametrize(
    "table, said",
    [
        ({"verify": {"3": 1}}, "key 'plain'"),
        ({"plain": 0, "verify": {"3": 1}}, "key 'plain' is 0"),
        ({"plain": 1, "verify": {"x": 1}}, "'x'"),
        ({"plain": 1, "verify": {"3": True}}, "True"),
        ({"plain": 1, "verify": {"1": 1}}, "no shape drafts"),
        ({"plain": 1, "verify": {"3": 1}, "rest": -1}, "key 'rest' is -1"),
        ({"plain": 1, "verify": {"3": 1}, "rest": {"2-1-3": math.inf}}, "key 'rest' has '2-1-3'"),
        ({"plain": 1, "verify": {"3": 1}, "restt": 1}, "'restt' is unknown"),
        ({"plain": 1, "verify": {"3": 1}, "shapes": ["3-1-9"]}, "draft_tokens is 9"),
        ("[1]", "list"),
        ("{", "not JSON"),
        ({"figures": []}, "format None"),
    ],
)
def test_tables_that_are_refused(table, said, saved, capsys):
    """One line that names the file, exit code 2."""
    path = saved(table)
    assert cost.main([path]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_accept_lengths_that_are_refused(saved, capsys):
    for word in ("0.5", "nan", "x", "3-1-9=2"):
        assert cost.main([saved(DEPLOYMENT), "--accept-length", word]) == 2
    assert cost.main(["nowhere.json"]) == 2 and "nowhere.json" in capsys.readouterr().err


LOAD = Workload("t", "d", 7, 1, None, 512, 1, "float32", "text", "0")


def kept(figures=None, **environment):
    figures = figures or [Figure.of("plain", "ms", [10.0, 11.0, 12.0]), Figure.of("verify.4", "ms", 20, experts=9.0)]
    figures += [Figure.of("gap", "ms", 1.0), Figure.of("cycle.3-1-4", "ms", 26.0), Figure.of("gap.3-1-4", "ms", 2.0)]
    return results.document("python -m bench.x", {"format": results.FORMAT, "gpu": None, **environment}, LOAD, figures)


def test_a_run_is_a_cost_table(saved):
    """Mutants: gaps left out; another shape's cycle; stamped cycles where there are whole ones."""
    table = cost.read(saved(kept()))
    assert table.plain == 12 and table.break_even(Shape(3, 1, 4)) == pytest.approx(28 / 12)
    run = kept()
    run["figures"] += [vars(Figure.of(name, "ms", ms)) for name, ms in (("wall", 10.5), ("wall.3-1-4", 25.0))]
    table = cost.read(saved(run))
    assert table.plain == 10.5 and table.cycle(Shape(3, 1, 4)) == pytest.approx(25.0)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda run: run["environment"].update(format=99), "results of format 99"),
        (lambda run: run.pop("when"), "'when' is missing"),
        (lambda run: run["figures"][0].pop("p90"), "'figures[0].p90' is missing"),
        (lambda run: run["workload"].update(depth=1), "'workload.depth' is unknown"),
        (lambda run: run["figures"].clear(), "no figures"),
    ],
)
def test_results_of_another_version_are_refused(change, said, saved):
    """Mutant: only the number is looked at, or only the keys."""
    run = kept()
    change(run)
    with pytest.raises(Refused, match="table.json") as refused:
        reading.read(saved(run))
    assert said in str(refused.value)


def test_runs_of_other_settings_are_not_compared():
    """Fault B52: a baseline measured under other NCCL settings, on other prompts, without graphs.

    Mutants: a key that only one of them has is skipped; the workload is not compared; the load average is."""
    run = kept(graphs="captured", NCCL_PROTO="LL", load_average=0.1)
    reading.comparable(run, kept(graphs="captured", NCCL_PROTO="LL", load_average=3.0), "old.json")
    other = kept(graphs="graphs are off")
    other["workload"]["prompts_hash"] = "1"
    with pytest.raises(Refused) as refused:
        reading.comparable(run, other, "old.json")
    said = str(refused.value)
    assert all(
        word in said for word in ("old.json", "NCCL_PROTO: LL, not set", "graphs: captured", "prompts_hash: 0, 1")
    )
    assert "load_average" not in said
