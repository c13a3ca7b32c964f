"""The measurements of several ranks, on the CPU: each says what it should, and notices what is wrong."""

import json
import shutil

import pytest
import torch
from toys import draft_config, target_config

from bench import collectives, failures, lockstep, startup, verify_vs_draft
from engine import Engine


def test_collectives(tmp_path, capsys):
    """Every sum of every width and row count, the best of them, and what a pass makes of it."""
    file = tmp_path / "run.json"
    words = "--device cpu --rows 1 3 --columns 64 2048 --calls 2 --json"
    assert collectives.main([*words.split(), str(file)]) == 0
    said, names = capsys.readouterr().out, {figure["name"] for figure in json.loads(file.read_text())["figures"]}
    assert "ordered+norm [as found].3x64" in names and len(names) == 12
    assert said.count("is the fastest") == 4 and "makes 96 of them" in said and "sums: gloo" in said


@pytest.mark.parametrize("ranks, sums", [
    ("--tp 2", {"sums.1", "sums.4"}), ("--tp 2 --reduction library", {"sums.1", "sums.4"}), ("--tp-slice 2", set()),
])  # fmt: skip
def test_sums_of_a_pass(tmp_path, monkeypatch, ranks, sums):
    """Measured among ranks, under NCCL's variables as they stand; one rank alone has none. Mutants: additions of a
    slice that pass for its sums; ranks whose sums are left out; a run that does not say what it ran under."""
    monkeypatch.setenv("NCCL_PROTO", "LL")
    (tmp_path / "t.json").write_text(json.dumps({"target": target_config(layers=3)}))
    (tmp_path / "d.json").write_text(json.dumps({"draft": draft_config(layers=3, draft_vocab=32)}))
    words = f"--random {tmp_path}/t.json --draft random:{tmp_path}/d.json {ranks} --device cpu --context 20"
    words += f" --rows 1 4 --shapes 3-1-4 --rounds 1 --repeats 1 --tokens 8 --json {tmp_path}/run.json"
    assert verify_vs_draft.main(words.split()) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    names = {figure["name"] for figure in run["figures"]}
    assert {name for name in names if name.startswith("sums.")} == sums and {"plain", "cycle.3-1-4"} <= names
    assert run["environment"]["NCCL_PROTO"] == "LL" and run["workload"]["tp"] == (2 if sums else 1)


def test_sums_of_a_slice(tmp_path):
    """Mutant: links of one rank alone that lack what other links have."""
    (tmp_path / "t.json").write_text(json.dumps({"target": target_config(layers=3)}))
    parts = Engine.load(random=str(tmp_path / "t.json"), tp_slice=2, device="cpu", max_context=64, max_batch=1).parts
    found = collectives.of_a_pass(parts, [1, 4])
    assert [figure.name for figure in found] == ["sums.1", "sums.4"] and "left out" in found[0].note


@pytest.mark.parametrize("setting", ["PROTO=LL", "NCCL_PROTO"])
def test_a_setting_that_is_none_is_refused(setting, capsys):
    assert collectives.main(["--settings", setting]) == 2
    assert f"--settings '{setting}'" in capsys.readouterr().err


def test_lockstep(toys, capsys):
    words = ["--target", toys.history(), "--draft", toys.random_draft(), "--device", "cpu", "--tokens", "8"]
    assert lockstep.main([*words, "--context", "20"]) == 0
    assert "float32: 6 runs on 2 ranks, 8 tokens each: all as they should be" in capsys.readouterr().out


@pytest.mark.parametrize("rank, key, said", [
    (1, ("3-1-4", 1.0), "rank 1 differs"), (0, ("3-1-4", 0.0), "plain decoding"), (2, ("0-1-1", 1.0), "one device"),
])  # fmt: skip
def test_lockstep_notices(monkeypatch, capsys, rank, key, said):
    """A rank, a shape, a device that differs. Mutant: any of the comparisons left out."""
    keys = [(shape, temperature) for shape in ("0-1-1", "3-1-4") for temperature in (0.0, 1.0)]
    found = [{k: ([1, 2], torch.zeros(1, 4) if k[1] == 0 else None) for k in keys} for _ in range(3)]
    found[rank][key] = ([1, 3], found[rank][key][1])
    if rank == 0:
        found[1][key] = found[2][key] = found[0][key]
    ranks = [[found[0], found[2]], [found[1], found[2]]]  # cut, then alone
    monkeypatch.setattr(lockstep, "spawn", lambda function, size, *args: ranks)
    assert lockstep.main(["--device", "cpu", "--shapes", "3-1-4"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_startup(tmp_path, capsys, ranks):
    """Every rank's load of a written checkpoint, which is gone afterwards, twice. Mutants: figures of the first start;
    one page table captured."""
    for name, kind, config in (("t", "target", target_config()), ("d", "draft", draft_config())):
        (tmp_path / f"{name}.json").write_text(json.dumps({kind: config}))
    words = [
        "--random",
        str(tmp_path / "t.json"),
        "--draft",
        f"random:{tmp_path / 'd.json'}",
        "--device",
        "cpu",
        "--tp",
        ranks,
    ]
    (tmp_path / "ram").mkdir()
    assert startup.main([*words, "--folder", str(tmp_path / "ram")]) == 0
    said = capsys.readouterr().out
    assert "GB/s" in said and list((tmp_path / "ram").iterdir()) == [] and "start 2" in said and "first.capture" in said
    assert "0-1-1, 1-1-2, 3-1-4, 4-4-16 for page tables of 128, 256, 512, 1024" in said


def test_failures(capsys):
    """In load, capture (on the CPU the first pass) and decode. Mutant: one of them in which nobody is killed."""
    assert failures.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.count("rank 1: was killed by SIGKILL") == 3 and all(f"ended.{when}" in said for when in failures.WHEN)


def test_a_folder_that_is_full_is_refused(tmp_path, monkeypatch, capsys):
    """Before anything is written there. Mutant: a RAM disk filled to its end."""
    (tmp_path / "t.json").write_text(json.dumps({"target": target_config()}))
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda folder: full)
    words = ["--random", str(tmp_path / "t.json"), "--draft", "none", "--device", "cpu", "--folder", str(tmp_path)]
    assert startup.main(words) == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["t.json"]
    assert "are free there" in capsys.readouterr().err


def test_failures_notices(monkeypatch, capsys):
    """Another rank that is blamed. Mutant: nobody looks at what was said."""

    def spawn(function, size, o, when, stamp):
        with open(stamp, "w") as file:
            file.write("0")
        raise failures.RankFailed("rank 0: lost the others")

    monkeypatch.setattr(failures, "spawn", spawn)
    assert failures.main(["--device", "cpu", "--when", "load"]) == 1
    assert "rank 0: lost the others" in capsys.readouterr().err
