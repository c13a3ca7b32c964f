"""Training of a head: the training form against the drafter that serves the file, and the command line."""

import json
import re

import pytest
import torch
from toys import Toys, V, pair

from engine import Sampling, Shape, train
from engine.buffers import State, Tree
from engine.cycle import prefill
from engine.forced import Teacher
from engine.train_head import Head, chain_length, describe, draft_vocabulary, losses
from weights.config import Eagle3Config, Refused

STEPS = 4


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return Toys(tmp_path_factory.mktemp("toys"))


def fresh_head(path, folder, length=64):
    """An untrained head for the HISTORY target at `path`, saved in `folder`; its norms are not ones."""
    engine = pair(path)
    target = engine.parts.target
    with open(f"{path}/config.json") as file:
        raw, _ = describe(target.config, json.load(file), 40, 48, "output:1,2")
    torch.manual_seed(3)
    ids = torch.randperm(V)[:40].sort().values
    head = Head(Eagle3Config.read(raw, "test"), ids, target, length)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    head.rounded()
    folder.mkdir(exist_ok=True)
    head.save(raw, folder)
    return head


@pytest.mark.parametrize("known", (1, 5, 15, 16, 33))
def test_unrolled_rows_are_the_drafted_ones(toys, tmp_path, known):
    """Mutants: step j sees step 0's keys up to its own position; it ropes at b; the hidden is normed before it is
    recycled; step j's own row left out of the keys; tokens not shifted."""
    head = fresh_head(toys.history(), tmp_path / "head")
    engine = pair(toys.history(), str(tmp_path / "head"))
    parts, seen = engine.parts, []
    best = parts.drafter.best

    def recorded(hidden, k):
        logits = torch.zeros(hidden.shape[1], 40)
        parts.drafter.head(hidden[0], 1, logits)
        seen.append(logits[-1])
        return best(hidden, k)

    parts.drafter.best = recorded
    prompt = torch.randint(V, (1, known), generator=torch.Generator().manual_seed(known))
    pages = torch.tensor([[3, 1, 5, 2]], dtype=torch.int32)
    first, _, feature = prefill(parts.target, parts.drafter, parts.cache, prompt, pages, 8)
    state = State.allocate(1, 4, parts.target.features, torch.float32, "cpu")
    state.start(0, pages[0].tolist(), known, 60, first, feature, [])
    tree = Tree.allocate(1, Shape(STEPS, 1, STEPS + 1), parts.target.features, torch.float32, "cpu")
    parts.drafter.propose(state, tree, parts.cache)

    tokens = torch.cat([prompt, tree.tokens, torch.zeros(1, STEPS, dtype=torch.int64)], 1)
    boundaries = pair(toys.history(), str(tmp_path / "head")).parts.target
    lesson = Teacher(boundaries, 1, tokens.shape[1], "cpu").lesson(tokens, head.draft_ids)
    unrolled = head.unroll(lesson.features, tokens, STEPS)
    for j, hidden in enumerate(unrolled):
        row = head.logits(hidden)[0, known - 1]
        torch.testing.assert_close(row, seen[j], atol=1e-4, rtol=1e-4)
        assert int(head.draft_ids[row.argmax()]) == int(tree.tokens[0, j + 1])


def test_the_file_is_a_specforge_head(toys, tmp_path):
    """Mutants: d2t as ids; t2d without the map; ids written as boundaries."""
    head = fresh_head(toys.history(), tmp_path / "head")
    engine = pair(toys.history(), str(tmp_path / "head"))
    assert engine.parts.capture.boundaries == (2, 3) and engine.parts.capture.source == "config"
    ids = engine.parts.drafter.to_target + torch.arange(40)
    assert ids.tolist() == head.draft_ids.tolist() == head.t2d.nonzero()[:, 0].tolist()
    assert [name for name, _ in engine.parts.reports[1].borrowed] == ["embed_tokens.weight"]


def test_the_teacher_is_the_target(toys):
    """Mutants: the feature or the token of another row; a continuation that is not greedy. Kills a wrong page count."""
    engine = pair(toys.history())
    prompt = torch.randint(V, (2, 70), generator=torch.Generator().manual_seed(1))
    teacher = Teacher(engine.parts.target, 3, 100, "cpu")
    texts = teacher.continued(prompt, 90)
    results = engine.generate(prompt.tolist(), Sampling(max_new_tokens=20, ignore_eos=True))
    assert texts[:, 70:].tolist() == [result.token_ids for result in results]
    lesson = teacher.lesson(texts, torch.arange(0, V, 2))
    assert lesson.best[:, 69:89].equal(texts[:, 70:])
    torch.testing.assert_close(lesson.wanted.sum(-1), torch.ones(2, 90))


def test_a_token_that_the_head_cannot_say_is_no_loss(toys, tmp_path):
    """Mutant: rows whose target token is outside the draft vocabulary count."""
    head = fresh_head(toys.history(), tmp_path / "head")
    target = pair(toys.history(), str(tmp_path / "head")).parts.target
    tokens = torch.randint(V, (2, 24), generator=torch.Generator().manual_seed(2))
    lesson = Teacher(target, 2, 24, "cpu").lesson(tokens, head.draft_ids)
    outside = next(i for i in range(V) if not head.t2d[i])
    lesson.best.fill_(outside)
    loss, agree = losses(head, lesson, STEPS)
    assert loss.tolist() == agree.tolist() == [0.0] * STEPS


def test_draft_vocabulary_is_the_most_frequent_ids_in_order():
    """Mutants: in order of frequency (negative offsets); ties by the highest id."""
    assert draft_vocabulary(torch.tensor([5, 0, 9, 5, 5, 7]), 4).tolist() == [0, 2, 3, 5]


def test_chain_length_walks_cycle_by_cycle():
    """Mutants: the mean over all rows; the bonus token left out."""
    agree = torch.tensor([[[1, 1], [0, 1], [0, 0], [0, 1], [1, 0]]], dtype=torch.bool)
    assert chain_length(agree, 2) == (3 + 1 + 2) / 3
    assert chain_length(agree, 1) == (2 + 1 + 1 + 2) / 4


@pytest.mark.parametrize(
    "override, boundaries",
    [(None, (2, 3, 4)), ("output:1,3,5", (2, 4, 6)), ("boundary:2,7", (2, 7)), ("boundary:3,7", (3, 7))],
)
def test_readers_take_the_boundaries_that_were_trained(toys, override, boundaries):
    """Mutant: boundaries written as they are. The embedding is no layer's output: it cannot be named."""
    target = pair(toys.history()).parts.target.config
    target = type(target)(**{**vars(target), "layers": 7})
    raw, capture = describe(target, {"rope_theta": 1e4}, 8, 8, override)
    ids = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert capture.boundaries == boundaries and [i + 1 for i in ids] == list(capture.boundaries)
    with pytest.raises(Refused, match="boundaries"):
        describe(target, {"rope_theta": 1e4}, 8, 8, "boundary:0,2,4")


def corpus_file(folder, tokens=6000):
    """Text in which the MAP target's circle and jumps alternate."""
    torch.manual_seed(0)
    ids = torch.randint(V, (tokens,)).numpy().astype("<u2")
    path = folder / "text.bin"
    ids.tofile(path)
    return path


def arguments(toys, folder, *more):
    options = {"--target": toys.map(layers=4), "--corpus": corpus_file(folder), "--out": folder / "head"}
    options |= {"--capture-layers": "output:1,2", "--draft-vocab": 48, "--intermediate": 64, "--steps": 10}
    options |= {"--batch": 4, "--length": 24, "--ttt": 3, "--lr": 0.01, "--device": "cpu", "--log-every": 0}
    return [str(word) for pair in options.items() for word in pair] + list(more)


def test_training_lowers_the_loss_and_the_head_then_drafts(toys, tmp_path, capsys):
    """Mutants: gradients never applied; the file of an untrained head."""
    argv = arguments(toys, tmp_path, "--steps", "80", "--self-generated", "0.5", "--length", "192", "--windows", "6")
    assert train.main(argv) == 0
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    curve = record["loss_and_top1_by_step"]
    assert len(curve) == record["steps"] == 80 and curve[-1][1] < 0.7 * curve[0][1]
    assert not (tmp_path / "head" / "training.pt").exists() and "step 80" in capsys.readouterr().out
    engine = pair(toys.map(layers=4), str(tmp_path / "head"), shape=Shape(3, 1, 4))
    result = engine.generate([5, 9, 30], Sampling(max_new_tokens=60))
    emitted = sum(emitted for emitted, _, _ in result.cycles) / len(result.cycles)
    assert emitted > 1.3 and abs(emitted - record["greedy_accept_length"]["3-1-4"]) < 0.8


def test_a_killed_run_goes_on_where_it_was(toys, tmp_path, monkeypatch):
    """Mutants: the optimizer, the step or the windows start afresh; resuming with other options."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        folder.mkdir()
    assert train.main(arguments(toys, whole)) == 0
    say = train.say

    def killed(line):
        if line.startswith("step 7 "):
            raise KeyboardInterrupt
        say(line)

    monkeypatch.setattr(train, "say", killed)
    assert train.main(arguments(toys, part, "--save-every", "0")) == 1
    monkeypatch.setattr(train, "say", say)
    assert train.main(arguments(toys, part, "--resume", "--seed", "9")) == 2
    assert train.main(arguments(toys, part, "--resume")) == 0
    files = [(folder / "head" / "model.safetensors").read_bytes() for folder in (whole, part)]
    assert files[0] == files[1]
    steps = [row[0] for row in json.loads((part / "head" / "training.json").read_text())["loss_and_top1_by_step"]]
    assert steps == list(range(1, 11))


@pytest.mark.parametrize(
    "more, said",
    [
        (("--minutes", "3"), "exactly one"),
        (("--draft-vocab", "65"), "--draft-vocab 65"),
        (("--self-generated", "1.5"), "--self-generated 1.5"),
        (("--self-generated", "0.5"), "--length 24"),
        (("--windows", "5"), "--windows 5"),
        (("--log-every", "nan"), "--log-every nan"),
        (("--length", "2000"), "2000"),
        (("--length", "7"), "7"),
        (("--corpus", "nowhere.bin"), "nowhere.bin"),
        (("--corpus", __file__), "tokenizer"),
        (("--capture-layers", "output:1,9"), "9"),
        (("--lr", "0"), "--lr"),
        (("--resume",), "training.pt"),
        (("--colour", "red"), "--colour"),
    ],
)
def test_what_is_refused(toys, tmp_path, capsys, more, said):
    """One line that names the option, exit code 2, nothing written."""
    assert train.main(arguments(toys, tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error) and said in error
    assert not (tmp_path / "head").exists()


def test_a_foreign_corpus_is_refused(toys, tmp_path, capsys):
    """Mutant: ids outside the vocabulary index past the embedding."""
    argv = arguments(toys, tmp_path)
    torch.full((600,), V, dtype=torch.int16).numpy().tofile(tmp_path / "text.bin")
    assert train.main(argv) == 2 and f"vocabulary of {V}" in capsys.readouterr().err
