"""Which reading of a head's file is right (B01, B06): every reading is planted in turn on the demo pair, and
`engine.diagnose` names it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, diagnose
from engine.forced import Teacher, handing_out
from engine.options import DEMO
from engine.train_head import Head, losses
from weights.config import Eagle3Config

HELD = (2, 4, 6)  # what the demo head was trained on
LAYERS = 7
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def demo():
    return Engine.load(str(DEMO / "target"), str(DEMO / "draft"), device="cpu", max_batch=1)


def code_ids(demo):
    """Token ids of Python files of this repository."""
    files = sorted((Path(__file__).parents[1] / "kernels").glob("*.py"))
    return demo.parts.text.encode("".join(path.read_text() for path in files))


@pytest.fixture(scope="module")
def states(demo):
    """Every boundary [8000, D] of Python files of this repository."""
    ids, out = code_ids(demo)[:8000], []
    teacher = Teacher(demo.target, 1, 500, "cpu")
    with handing_out(demo.target, tuple(range(LAYERS + 1))):
        for at in range(0, len(ids), 500):
            out.append(teacher.read(ids[at : at + 500], 500).features)
    return torch.cat(out).chunk(LAYERS + 1, 1)


def altered(folder, change):
    """A copy of the demo head after change(config, tensors)."""
    place = folder / "head"
    shutil.copytree(DEMO / "draft", place)
    config, tensors = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
    change(config, tensors)
    (place / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, place / "model.safetensors")
    return str(place)


def fitted(states, order):
    """A head whose fc makes of boundaries `order`, as well as a linear map can, what the trained one makes of its own;
    its config stays as it is."""

    def change(config, tensors):
        given, own = (torch.cat([states[i] for i in layers], 1).double() for layers in (order, HELD))
        wanted = own @ tensors["fc.weight"].double().T
        scale = given.pow(2).mean(0).sqrt()
        given, own = given / scale, 0.3 * own / scale  # and little of the others, which hold nearly the same
        square = given.T @ given + own.T @ own + 1e-3 * len(given) * torch.eye(given.shape[1], dtype=torch.float64)
        found = torch.linalg.solve(square, given.T @ wanted) / scale[:, None]
        tensors["fc.weight"] = found.T.float()

    return change


def verdict(capsys, head, *more):
    """(exit code, name of the marked reading, the verdict's line) of `engine.diagnose`."""
    code = diagnose.main(["--draft", head, "--device", "cpu", "--tokens", "512", *more])
    lines = capsys.readouterr().out.splitlines()
    print("\n".join(lines))
    (best,) = [line[2:] for line in lines if line.startswith("* ")]
    return code, best, lines[-1]


BOUNDARIES = {
    "one layer lower": (1, 3, 5),
    "one layer higher": (3, 5, 7),
    "default layers": (2, 3, 4),
    "embedding in place of the lowest": (0, 4, 6),
    "embedding first, the highest left out": (0, 2, 4),
    "order reversed": (6, 4, 2),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_the_boundaries_a_head_was_made_for_are_found(states, tmp_path, capsys, name):
    """Mutants: features of another boundary under a reading's name; the order lost on the way; the reading in force
    excused; fc fed with all that was captured."""
    order = BOUNDARIES[name]
    code, best, said = verdict(capsys, altered(tmp_path, fitted(states, order)))
    assert code == 3 and name in best and best.endswith(", ".join(map(str, order)))
    assert (
        "WRONG READING" in said
        and ("fc.weight" if order == (6, 4, 2) else f"boundary:{','.join(map(str, order))}") in said
    )


def normed_residual(states):
    """The demo head for a residual stream that starts with the normed hidden: the same numbers there, fc 20 times as
    large, so that the plain one is off."""

    def change(config, tensors):
        g = torch.cat([states[i] for i in HELD], 1) @ tensors["fc.weight"].float().T
        level = g.pow(2).mean(1).sqrt().mean()
        weight = tensors["midlayer.hidden_norm.weight"].float()
        for name in "qkv":
            own = tensors[f"midlayer.self_attn.{name}_proj.weight"].float()
            own[:, len(weight) :] *= weight / level
            tensors[f"midlayer.self_attn.{name}_proj.weight"] = own
        tensors["midlayer.hidden_norm.weight"] = torch.full_like(weight, float(level))
        tensors["fc.weight"] = 20 * tensors["fc.weight"].float()

    return change


def test_a_normed_residual_is_found(states, tmp_path, capsys):
    """Mutants: the switch read under one of the passes only; the normed half taken for the token's."""
    code, best, said = verdict(capsys, altered(tmp_path, normed_residual(states)))
    assert code == 3 and best.startswith("norm_before_residual true ") and "set 'norm_before_residual' to true" in said


def post_normed(demo, folder):
    """The demo head taught for a moment to go on from the normed hidden, three times its size; its config stays as it
    is."""
    raw = json.loads((DEMO / "draft" / "config.json").read_text())
    other = raw | {"eagle_config": raw["eagle_config"] | {"return_hidden_post_norm": True}}
    config, weights = Eagle3Config.read(other, "test"), load_file(DEMO / "draft" / "model.safetensors")
    head = Head(config, weights["d2t"] + torch.arange(config.draft_vocab), demo.target, 96)
    head.load_state_dict(weights)
    with torch.no_grad():
        head.norm.weight.mul_(3)
        head.lm_head.weight.div_(3)
    teacher, windows = Teacher(demo.target, 8, 96, "cpu"), torch.tensor(code_ids(demo)[: 96 * 96]).view(-1, 8, 96)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    for window in [*windows, *windows]:
        loss, _ = losses(head, teacher.lesson(window, head.draft_ids), 3)
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder.mkdir()
    head.save(raw, folder)
    return str(folder)


def test_post_norm_recycling_is_found(demo, tmp_path, capsys):
    """Mutants: later passes left out, where alone it shows; the hidden recycled as it comes under either reading."""
    code, best, said = verdict(capsys, post_normed(demo, tmp_path / "head"), "--tokens", "1400")
    assert code == 3 and best.startswith("post-norm recycling ") and "set 'return_hidden_post_norm' to true" in said


FAULTS = {  # what a config may wrongly say of the demo head: change of its config, what is right in the table's words
    "post-norm": ({"return_hidden_post_norm": True}, "pre-norm recycling "),
    "residual": ({"norm_before_residual": True}, "norm_before_residual false "),
    "boundaries": ({IDS: [2, 4, 6]}, "ids are boundaries"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_config_that_lies_is_caught(tmp_path, capsys, fault):
    """Mutants: the reading in force taken from the weights; other switches tried beside the right one only."""
    said, right = FAULTS[fault]
    code, best, _ = verdict(capsys, altered(tmp_path, lambda config, _: config["eagle_config"].update(said)))
    assert code == 3 and best.startswith(right) and best.endswith("2, 4, 6")


def test_nothing_is_wrong_with_the_demo(capsys):
    """Mutants: exit code 3 where the best is in force; a trifle called a fault."""
    code, best, said = verdict(capsys, str(DEMO / "draft"))
    assert code == 0 and best.startswith("in force = ids are layer outputs ") and "in force is right" in said


REFUSED = {
    "--tokens 12": "--tokens: '12' is not supported; supported: whole numbers from 256",
    "--draft none": "--draft none: there is no trained head",
    "--draft random:qwen3-30b-a3b-eagle3": "no trained head",
    "--text /nowhere": "--text /nowhere: cannot be read",
    "--colour red": "--colour: there is no such option",
    "--capture-layers boundary:1,2": "names 2 layers",
    "--target /nowhere --draft /nowhere": "/nowhere: no such directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_diagnose_refuses(capsys, words):
    """One line, exit code 2."""
    assert diagnose.main([*words.split(), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and REFUSED[words] in error


def test_a_text_too_short_to_tell_is_refused(tmp_path, capsys):
    """Mutant: a verdict over a handful of positions."""
    (tmp_path / "short.txt").write_text("import os\n" * 20)
    assert diagnose.main(["--device", "cpu", "--text", str(tmp_path / "short.txt")]) == 2
    error = capsys.readouterr().err
    assert "positions to look at; supported: at least 256" in error and error.count("\n") == 1


def test_the_list_of_options_is_frozen():
    listed = vars(diagnose.parser().parse_args([]))
    assert sorted(listed) == "capture_layers device draft dtype target text tokens tp".split()


def test_a_reader_who_leaves_ends_it(tmp_path):
    """`diagnose | head -1`. Mutant: a traceback of a broken pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "engine.diagnose", "--device", "cpu", "--tokens", "400"]
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    os.close(writer)
    assert run.returncode == 1 and "Error" not in run.stderr


def test_ranks_examine_together(tmp_path, capfd):
    """Two ranks say what one says, once. Mutants: every rank prints; exit code 3 taken for a rank's failure."""
    head = altered(tmp_path, lambda config, _: config["eagle_config"].update({IDS: [2, 4, 6]}))
    words = ["--draft", head, "--device", "cpu", "--tokens", "400"]
    assert diagnose.main(words) == 3
    one = capfd.readouterr().out.splitlines()
    assert diagnose.main([*words, "--tp", "2"]) == 3
    two = capfd.readouterr().out.splitlines()
    assert len(one) == len(two) and one[-1] == two[-1]
    assert diagnose.main([*words, "--tp", "2", "--text", "/nowhere"]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: --text /nowhere: cannot be read")


# ------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_in_bf16(tmp_path, capsys, fault):
    """The same with the fused table. Mutant: a reading whose passes run over another's cache rows."""
    said, right = FAULTS[fault]
    head = altered(tmp_path, lambda config, _: config["eagle_config"].update(said))
    assert diagnose.main(["--draft", head, "--device", "cuda", "--tokens", "1400"]) == 3
    (best,) = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("* ")]
    assert best.startswith(right) and best.endswith("2, 4, 6")
