"""What `bench.sweep` and `bench.auto` say of shapes on the demo pair: speed-ups, recommendations, refusals."""

import pytest

from bench import auto, reading, sweep, verdict
from bench.results import Figure

FEW = ["--count", "1", "--rounds", "1", "--new-tokens", "12", "--context", "24", "--device", "cpu"]


def test_a_draft_that_is_always_wrong_loses(tmp_path, capsys):
    """Fault B52 (c), and a comparison with a kept run. Mutants: the speed-up of the best round; synthetic unlabelled;
    a stored run of other prompts compared."""
    path = str(tmp_path / "run.json")
    words = [*FEW, "--grid", "7-1-8", "--accept-length", "1"]
    assert sweep.main([*words, "--json", path]) == 0
    assert "recommended: plain decoding" in capsys.readouterr().out
    run = reading.read(path)
    assert reading.value(run, "speedup.7-1-8") < 1 and reading.value(run, "accept_length.7-1-8") == 1
    assert reading.value(run, "predicted_cycle.7-1-8") > 0 and reading.value(run, "predicted_cycle.0-1-1") > 0
    assert reading.value(run, "identical.7-1-8") == 1 and reading.value(run, "accept_rate.7-1-8.1") == 0
    assert "SYNTHETIC" in run["workload"]["routing"]
    labelled = [f for f in run["figures"] if f["name"].startswith(("tokens_per_s", "speedup", "accept_", "recomm"))]
    assert all("SYNTHETIC" in f["note"] for f in labelled if f["name"] != "tokens_per_second.0-1-1")
    assert sweep.main([*words, "--context", "20", "--baseline", path]) == 2
    error = capsys.readouterr().err
    assert "not comparable" in error and "prompts_hash" in error and error.count("\n") == 1
    assert sweep.main([*words, "--baseline", path]) == 0
    assert f"tokens/s in {path}" in capsys.readouterr().out


def test_auto_measures_what_it_says(tmp_path, capsys, monkeypatch):
    """Mutant: a figure left out; a shortfall that leaves the exit code 0."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run.json"
    words = ["--count", "1", "--new-tokens", "12", "--context", "24", "--rounds", "1", "--long", "130", "--check"]
    code = auto.main([*words, "--grid", "1-1-2", "3-1-4", "--device", "cpu", "--json", str(path)])
    out, err = capsys.readouterr()
    values = {f["name"]: f["value"] for f in reading.read(str(path))["figures"]}
    whole = {f"tokens_per_second.{way}" for way in ("0-1-1", "1-1-2", "3-1-4", "auto")} | {"auto_of_best", "identical"}
    whole |= {f"cost.{name}" for name in ("0-1-1", "1-1-2", "3-1-4", "catch_up.8", "catch_up.64")}
    for made in ("wrong_draft", "good_then_bad", "bad_then_good"):
        whole |= {made, f"identical.{made}"} | ({f"changed.{made}"} if made != "wrong_draft" else set())
    assert set(values) == whole and all(values[name] == 1 for name in whole if name.startswith("identical"))
    assert code == (1 if "SHORT" in err else 0) and "costs at batch 1 measured" in out


def test_what_falls_short():
    """Mutants: a bound read the other way; a change in the wrong direction."""
    good = {"auto_of_best": 0.96, "wrong_draft": 0.98, "identical": 1, "changed.good_then_bad": -0.9}
    bad = {"auto_of_best": 0.94, "wrong_draft": 0.96, "identical": 0, "changed.good_then_bad": 0.9}
    bad["changed.bad_then_good"] = -0.9
    assert auto.short([Figure.of(name, "share", value) for name, value in good.items()]) == []
    assert len(auto.short([Figure.of(name, "share", value) for name, value in bad.items()])) == 5


@pytest.mark.parametrize(
    "argv, said",
    [(["--draft", "none"], "--draft"), (["--grid", "1-1-9"], "no valid shape"), (["--long", "9"], "--long")],
)
def test_what_auto_refuses(argv, said, capsys):
    """One line, exit code 2, before anything is loaded."""
    assert auto.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def gains(**repeats):
    return {f"speedup.{k}": Figure.of(f"speedup.{k}", "times plain", v) for k, v in repeats.items()}


def test_the_recommendation_knows_its_spread():
    """Mutants: the best median whatever its rounds; plain decoding never recommended."""
    assert "recommended: a at 1.20" in verdict.recommendation(gains(a=[1.19, 1.2, 1.21], b=[1.0, 1.1, 1.15]))
    assert "overlap" in verdict.recommendation(gains(a=[1.1, 1.2, 1.3], b=[1.0, 1.1, 1.15]))
    assert "not" not in verdict.recommendation(gains(a=[1.2]))
    assert "plain decoding: no shape is ahead in every" in verdict.recommendation(gains(a=[0.9, 1.2, 1.3]))
    assert "plain decoding: no shape is faster" in verdict.recommendation(gains(a=[0.9, 0.8], b=[0.7]))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--grid", "3-1-9", "2-1-9"], "no valid shape among 2"),
        (["--steps", "2", "--topk", "1", "--draft-tokens", "8"], "no valid shape"),
        (["--steps", "2"], "all three"),
        (["--grid", "2-1-3", "--accept-length", "3.5"], "emit 1 to 3"),
        (["--accept-rates", "0.5", "0.7"], "not rising"),
        (["--prompts", "EMPTY"], "EMPTY: it is empty"),
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl"),
        (["--baseline", "nowhere.json"], "nowhere.json"),
        (["--draft", "none"], "--draft"),
        (["--fast"], "--fast"),
    ],
)
def test_what_a_sweep_refuses(argv, said, tmp_path, capsys):
    """One line, exit code 2, before anything is timed."""
    (tmp_path / "EMPTY").write_text("\n")
    argv = [str(tmp_path / word) if word == "EMPTY" else word for word in argv]
    assert sweep.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
