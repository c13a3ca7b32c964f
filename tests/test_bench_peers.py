"""Other engines beside this one: what is not there is named, the table, the scripts that run them."""

from bench import peers, results
from engine import Shape

JOB = {"target": "t", "draft": None, "prompts": [[1, 2]], "new_tokens": 4, "repeats": 1, "device": "cpu"}


def test_peers_that_are_not_there_are_named(monkeypatch):
    """None of them can import this repository's `kernels`. Mutants: its path left in; a failure taken for absence."""
    seen = "answer(absent=str(importlib.util.find_spec('kernels')))"
    monkeypatch.setenv("PYTHONPATH", str(results.ROOT))
    monkeypatch.setitem(peers.SCRIPTS, "vllm", seen)
    assert peers.peer("vllm", JOB) == {"absent": "None"}
    monkeypatch.setitem(peers.SCRIPTS, "vllm", "need('no_such_package')")
    assert peers.peer("vllm", JOB) == {"absent": "not installed"}
    monkeypatch.setitem(peers.SCRIPTS, "vllm", "raise ValueError('broken')")
    assert "failed with exit code 1: ValueError: broken" in peers.peer("vllm", JOB)["absent"]


def test_the_table_of_peers():
    """Mutants: a mean; an engine that gave other ids called the same."""
    answers = {
        ("ours", "plain"): {"speeds": [1.0, 50.0, 60.0], "ids": [[1], [2]]},
        ("vllm", "plain"): {"speeds": [40.0], "ids": [[1], [3]], "version": "0.1"},
        ("sglang", "eagle3"): {"absent": "not installed"},
    }
    text = "\n".join(peers.lines(answers, [[1], [2]]))
    assert "50.0" in text and "20.00" in text and "vllm 0.1" in text and "50 %" in text and "not installed" in text
    assert [f.name for f in peers.figures(answers, [[1], [2]])] == [
        "tokens_per_second.ours.plain",
        "tokens_per_second.vllm.plain",
    ]


def test_transformers_does_the_same_job(tmp_path):
    """Mutant: prompts or counts that differ from ours."""
    o = peers.parse(
        ["--draft", "none", "--engines", "transformers", "--count", "1", "--context", "16", "--new-tokens", "6"]
    )
    assert o.draft is None and o.shape == Shape(3, 1, 4)
    o.device, o.repeats = "cpu", 1
    said = peers.run(o, "x")
    assert (
        len(said) == 4
        and said[2].startswith("ours")
        and said[3].startswith("transformers 5")
        and said[3].endswith("100 %")
    )


def test_the_scripts_are_python():
    """Mutant: a script that only the machine that has its engine finds broken."""
    for name, script in peers.SCRIPTS.items():
        compile(peers.COMMON + script, name, "exec")
