"""Options of bench commands that would have no effect are refused, and a run is not lost with the file it was for."""

import errno
import importlib
import json
from pathlib import Path

import pytest

from bench import collectives, command, peers, results, sweep
from engine import Engine, Refused

NO_EFFECT = {
    "verify_vs_draft --inject-stage draft": "--inject-stage draft: nothing is injected",
    "lockstep --tp 1": "--tp 1: one rank agrees with itself; supported: from 2",
    "lockstep --tp-slice 2": "--tp-slice: there is no such option",
    "startup --tp-slice 2": "--tp-slice: there is no such option",
    "peers --target x --shape 5-1-6": "--shape 5-1-6: there is no draft",
}


@pytest.mark.parametrize("given, message", NO_EFFECT.items(), ids=NO_EFFECT)
def test_options_without_effect_are_refused(given, message):
    name, *words = given.split()
    with pytest.raises(Refused) as refusal:
        importlib.import_module(f"bench.{name}").parse(words)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_settings_of_nccl_are_refused_on_the_cpu(capsys):
    assert collectives.main("--device cpu --rows 1 --settings NCCL_PROTO=LL".split()) == 2
    assert capsys.readouterr().err == "error: --settings 'NCCL_PROTO=LL': the CPU sums by gloo; supported: on CUDA\n"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reduction": "library"}, "reduction: 'library' with one rank; supported: 'auto', or tp above 1"),
        ({"draft_tp": "cut", "tp": 2}, "draft_tp: 'cut' without a draft; supported: 'auto', or with a draft"),
        ({"random": "llama-3.1-8b", "layers": 33}, "layers: 33; supported: 1 to 32, those of the architecture"),
    ],
    ids=str,
)
def test_the_engine_refuses_them_too(toys, options, message):
    target = None if "random" in options else toys.map()
    with pytest.raises(Refused) as refusal:
        Engine.load(target, device="cpu", **options)
    assert str(refusal.value) == message


@pytest.mark.parametrize("path", ["/dev/null", "/proc/run.json", "/nowhere/run.json", "/tmp"])
def test_where_no_run_can_go(path):
    """Before anything is run. Mutants: a device that is replaced by a file; a folder that takes no files."""
    with pytest.raises(Refused, match=f"^--json {path}: "):
        results.writable(path)


def test_a_full_disk_loses_no_run(tmp_path, monkeypatch):
    """It goes where temporary files go, and the one line says where. Mutant: the measurement ends in a traceback."""
    full, writing = tmp_path / "run.json", Path.write_text
    (tmp_path / "spare").mkdir()

    def write(path, *args, **words):
        if path.parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writing(path, *args, **words)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    with pytest.raises(command.Failed, match="No space left on device; the run is kept in (.*)") as failure:
        results.write(full, {"command": "x", "figures": [{"value": 1.0}]})
    kept = Path(str(failure.value).rpartition(" ")[2])
    assert json.loads(kept.read_text()) == {"command": "x", "figures": [{"value": 1.0}]} and not full.exists()


def test_an_interrupted_sweep_keeps_its_rounds(tmp_path, monkeypatch, capsys):
    """The first of two, when the second is interrupted. Mutant: a file that is written at the end alone."""
    generate, path = Engine.generate, tmp_path / "run.json"

    def some(engine, *args, **words):
        if path.exists():
            raise KeyboardInterrupt
        return generate(engine, *args, **words)

    monkeypatch.setattr(Engine, "generate", some)
    argv = f"--grid 1-1-2 --count 1 --context 16 --new-tokens 4 --rounds 2 --device cpu --json {path}"
    assert sweep.main(argv.split()) == 1 and capsys.readouterr().err.endswith("error: interrupted\n")
    kept = {figure["name"]: figure for figure in json.loads(path.read_text())["figures"]}
    assert len(kept["tokens_per_second.1-1-2"]["repeats"]) == 1


def test_other_engines_are_kept_one_by_one(tmp_path, monkeypatch):
    """What ours did, when the first of the others is interrupted. Mutant: a file that is written at the end alone."""

    def stopped(*_):
        raise KeyboardInterrupt

    path = tmp_path / "run.json"
    monkeypatch.setattr(peers, "peer", stopped)
    assert peers.main(f"--count 1 --context 16 --new-tokens 4 --repeats 1 --device cpu --json {path}".split()) == 1
    names = {figure["name"] for figure in json.loads(path.read_text())["figures"]}
    assert names == {"tokens_per_second.ours.plain", "tokens_per_second.ours.eagle3"}


@pytest.mark.parametrize("name", ["engine.train", "bench.report"])
def test_a_full_disk_is_one_line(name, monkeypatch, capsys):
    """Mutant: a traceback."""
    module = importlib.import_module(name)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "out")

    monkeypatch.setattr(module, "parse", full)
    assert module.main([]) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'out'\n"
