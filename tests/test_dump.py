"""Hidden states on disk: what they hold, and that a kill loses and doubles nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toys import V, pair

from engine import dump, train
from engine.forced import Teacher

LAYERS, BOUNDARIES = 4, (2, 3)


def prompts_file(folder, count=12, longest=50):
    """Token ids of many lengths, a few of them longer than a sequence may be."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=draw).tolist()
    texts = [torch.randint(V, (n,), generator=draw).tolist() for n in lengths]
    path = Path(folder) / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in texts))
    return path, texts


def words(toys, path, out, *more, length=24, shard=40):
    target = toys.history(layers=LAYERS)
    given = ["--target", target, "--prompts", path, "--out", out, "--capture-layers", "boundary:2,3"]
    given += ["--length", length, "--shard-tokens", shard, "--device", "cpu", *more]
    return [str(word) for word in given]


def contents(folder):
    """Every file of a dump by name."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.name != ".lock"}


def test_a_dump_holds_what_the_target_says(toys, tmp_path):
    """Every token once, in order; features, hidden and next tokens of a pass over its piece alone. Mutants: a piece
    seen through the cache of the one before; boundaries of the wrong layers; the token itself for the target's; pieces
    that overlap; the last, short piece left out."""
    path, texts = prompts_file(tmp_path)
    assert dump.main(words(toys, path, tmp_path / "out")) == 0
    index = json.loads((tmp_path / "out" / "dump.json").read_text())
    assert index["complete"] and index["tokens"] == sum(map(len, texts)) and index["settings"]["boundaries"] == [2, 3]
    engine, again = pair(toys.history(layers=LAYERS), capture_layers="boundary:2,3"), [[] for _ in texts]
    for entry in index["shards"]:
        shard = load_file(tmp_path / "out" / entry["file"])
        assert entry["tokens"] == len(shard["tokens"]) and entry["sequences"] == len(shard["prompts"])
        assert entry["tokens"] <= 40 or entry["sequences"] == 1
        for at, (low, high) in enumerate(zip(shard["offsets"], shard["offsets"][1:], strict=False)):
            ids, prompt = shard["tokens"][low:high].tolist(), int(shard["prompts"][at])
            assert len(again[prompt]) == shard["starts"][at] and len(ids) <= 24
            again[prompt] += ids
            want = Teacher(engine.target, 1, 64, "cpu").read(ids, 64)
            for name in ("features", "hidden"):
                torch.testing.assert_close(shard[name][low:high], getattr(want, name), atol=1e-5, rtol=1e-5)
            assert shard["best"][low:high].tolist() == want.best.tolist()
            torch.testing.assert_close(shard["features"][low:high], engine.score(ids).boundaries, atol=1e-5, rtol=1e-5)
    assert again == texts


def test_a_killed_dump_goes_on(toys, tmp_path):
    """SIGKILL in the middle, twice; then the same command. Every file is byte for byte that of a run left alone.
    Mutants: a shard counted before it is whole; begun again from the first; a half file taken; the index of the second
    run only."""
    path, _ = prompts_file(tmp_path, count=150)
    assert dump.main(words(toys, path, tmp_path / "whole")) == 0
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "engine.dump", *words(toys, path, out)]
    root = Path(__file__).parents[1]
    seen = []
    for shards in (3, 20):
        run = subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            while run.poll() is None and len(list(out.glob("shard-*.safetensors"))) < shards:
                time.sleep(0.002)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        index = json.loads((out / "dump.json").read_text())
        assert run.returncode == -signal.SIGKILL and not index["complete"]
        seen.append({entry["file"]: (out / entry["file"]).stat().st_mtime_ns for entry in index["shards"]})
    assert seen[0].items() <= seen[1].items() and len(seen[1]) > len(seen[0]) >= 2
    (out / "shard-00090.safetensors.part").write_bytes(b"half")
    assert dump.main(words(toys, path, out)) == 0
    assert contents(out) == contents(tmp_path / "whole")
    assert all((out / name).stat().st_mtime_ns == when for name, when in seen[1].items())


def test_a_lost_or_short_shard_is_made_again(toys, tmp_path, capsys):
    """Mutant: the index believed whatever the folder holds."""
    path, _ = prompts_file(tmp_path)
    argv = words(toys, path, tmp_path / "out")
    assert dump.main(argv) == 0
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    with open(tmp_path / "out" / "shard-00002.safetensors", "r+b") as file:
        file.truncate(500)
    assert dump.main(argv) == 0 and contents(tmp_path / "out") == whole
    error = capsys.readouterr().err
    assert all(f"shard-0000{i}.safetensors is listed and not whole" in error for i in (1, 2))
    assert dump.main(argv) == 0 and "nothing is missing" in capsys.readouterr().err


def test_ranks_write_one_dump(toys, tmp_path, capfd):
    """The numbers of one rank, by rank 0 alone, and another number of ranks goes on with none of it. Mutants: each rank
    writes; features of a rank's own part of the sums."""
    path, _ = prompts_file(tmp_path, count=6)
    alone, both = words(toys, path, tmp_path / "one"), words(toys, path, tmp_path / "two", "--tp", "2")
    assert dump.main(alone) == dump.main(both) == 0
    assert json.loads((tmp_path / "two" / "dump.json").read_text())["complete"]
    for one, two in zip(*(sorted((tmp_path / n).glob("*.safetensors")) for n in ("one", "two")), strict=True):
        one, two = load_file(one), load_file(two)
        for name in one:
            torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=1e-4)
    capfd.readouterr()
    assert dump.main([*both, "--tp", "1"]) == 2 and "'tp' is 2, of this run 1" in capfd.readouterr().err
    both[both.index("--out") + 1] = str(tmp_path / "three")
    assert dump.main([*both, "--tp", "3"]) == 2
    assert re.fullmatch(r"error: [^\n]+\n", capfd.readouterr().err.split("free\n")[-1])


def refused(capsys, argv, *said):
    assert dump.main(argv) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error) and all(word in error for word in said), error


def test_a_full_disk_is_seen_before_anything_is_read(toys, tmp_path, capsys, monkeypatch):
    """Mutants: checked after the weights are loaded; shards that are there counted again."""
    path, _ = prompts_file(tmp_path)
    argv, room = words(toys, path, tmp_path / "out"), Namespace(free=20_000)
    monkeypatch.setattr(dump.shutil, "disk_usage", lambda folder: room)
    refused(capsys, argv, "--out", "needs 0.", "the disk has 0.000 GB")
    assert contents(tmp_path / "out") == {}
    room.free = 10**9
    assert dump.main(argv) == 0
    room.free = 0
    assert dump.main(argv) == 0


def test_what_is_refused(toys, tmp_path, capsys):
    """One line that names the option, exit code 2; another plan or another run in the same folder too."""
    path, _ = prompts_file(tmp_path)
    out = tmp_path / "out"
    for more, said in (
        (["--colour"], ["--colour"]),
        (["--length", "2000"], ["--length 2000", "1024"]),
        (["--length", "1"], ["--length", "'1'"]),
        (["--capture-layers", "boundary:2,9"], ["9", "4 layers"]),
        (["--prompts", "/nowhere"], ["--prompts /nowhere", "cannot be read"]),
        (["--prompts", __file__], ["no tokenizer", Path(__file__).name]),
        (["--target", "/nowhere"], ["/nowhere"]),
        (["--out", str(path)], ["--out", "it is a file"]),
        (["--device", "tpu"], ["tpu"]),
    ):
        refused(capsys, words(toys, path, out, *more), *said)
    assert dump.main(words(toys, path, out)) == 0
    capsys.readouterr()
    refused(capsys, words(toys, path, out, "--length", "20"), "dump.json", "'length' is 24, of this run 20")
    other = prompts_file(tmp_path, count=13)[0]
    refused(capsys, words(toys, other, out), "dump.json", "'prompts'")
    with dump.alone(out):
        refused(capsys, words(toys, other, out), "another run is writing")
    refused(capsys, words(toys, other, tmp_path), "prompts.jsonl", "an empty directory")
    (out / "dump.json").write_text("{}")
    refused(capsys, words(toys, other, out), "dump.json", "no index")


def test_the_lists_of_options_are_frozen():
    listed = sorted(vars(dump.parser().parse_args("--target a --prompts b --out c".split())))
    assert listed == "capture_layers device dtype length out prompts shard_tokens target tp".split()
    listed = sorted(vars(train.parser().parse_args("--target a --out c".split())))
    expected = """
    batch capture_layers corpus device draft_vocab dump heldout intermediate length log_every lr minutes out resume
    save_every seed self_generated sharpen steps target ttt windows
    """
    assert listed == expected.split()


@pytest.mark.gpu
def test_a_dump_in_bf16_goes_on(toys, tmp_path):
    """Rows of a shard do not depend on what was passed before it. Mutant: a cache that is read past its rows."""
    path, _ = prompts_file(tmp_path)
    for name in ("whole", "part"):
        argv = words(toys, path, tmp_path / name, "--device", "cuda")
        assert dump.main(argv) == 0
    (tmp_path / "part" / "shard-00002.safetensors").unlink()
    assert dump.main(argv) == 0 and contents(tmp_path / "part") == contents(tmp_path / "whole")
