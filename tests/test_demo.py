"""The bundled pair: whole, small, and really speculating. `python -m bench.demo --check` measures it at length."""

import json

import pytest

from bench import demo
from bench.results import ROOT
from engine import Engine, Sampling, Shape
from engine.options import DEMO
from engine.report import Acceptance

SHAPES = [Shape(3, 1, 4), Shape(4, 4, 16), Shape(5, 8, 64)]
NEW = 24


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def engine():
    return Engine.load(target=str(DEMO / "target"), draft=str(DEMO / "draft"), device="cpu", max_batch=8)


@pytest.fixture(scope="module")
def plain(engine, prompts):
    return decode(engine, prompts[:8], Shape(0, 1, 1))


def decode(engine, prompts, shape):
    return engine.generate([prompt["prompt"] for prompt in prompts], Sampling(max_new_tokens=NEW), shape=shape)


def test_the_pair_fits_in_twenty_mebibytes():
    """Everything that is loaded, tokenizer and records too."""
    assert sum(file.stat().st_size for part in ("target", "draft") for file in (DEMO / part).iterdir()) <= 20 << 20


def test_it_loads_whole(engine):
    """Mutants: a tensor renamed in the files; layer ids that readers must guess at."""
    assert engine.parts.capture.boundaries == (2, 4, 6) and engine.parts.capture.source == "config"
    target, head = engine.parts.reports
    assert target.missing == target.unexpected == head.unexpected == []
    assert head.missing == [name for name, _ in head.borrowed] == ["embed_tokens.weight"]
    assert engine.parts.text is not None and engine.parts.end_ids == (0,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_speculation_gives_the_ids_of_plain_decoding(engine, prompts, plain, shape):
    """Real weights accept for real: commit moves rows at every length. Mutants: see tests/test_lossless.py."""
    few = 8 if shape == SHAPES[0] else 3
    results = decode(engine, prompts[:few], shape)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain[:few]]
    counts = sum((Acceptance.of(r.cycles) for r in results), Acceptance())
    assert counts.length > {3: 1.9, 4: 2.2, 5: 2.2}[shape.steps], counts


def test_proposals_come_from_the_draft_vocabulary(engine, prompts):
    """Mutants: d2t left out (ids below 3,840), or read as ids (the offsets themselves)."""
    drafter, target = engine.drafter.config, engine.target.head.vocabulary
    allowed = {draft + offset for draft, offset in enumerate(engine.drafter.to_target.tolist())}
    assert len(allowed) == drafter.draft_vocab < target and max(allowed) > drafter.draft_vocab
    events = engine.stream(prompts[0]["prompt"], Sampling(max_new_tokens=NEW), shape=SHAPES[1])
    proposed = {token for event in events if event.tree is not None for token in event.tree.tokens[1:].tolist()}
    assert proposed <= allowed and any(token >= drafter.draft_vocab for token in proposed)


def test_prompts_name_their_sources(prompts):
    """Mutant: a prompt of a package that is not pinned, or under another licence than the list says."""
    packages = {line[0]: line[1] for line in rows((DEMO / "packages.tsv").read_text(encoding="utf-8"))}
    assert len(prompts) == 40 and len({prompt["prompt"] for prompt in prompts}) == 40
    for prompt in prompts:
        assert set(prompt) == {"prompt", "source", "licence", "path"} and prompt["prompt"].strip()
        assert packages[prompt["source"]] == prompt["licence"] and prompt["path"].endswith(".py")


def rows(text):
    return [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]


def test_records_name_no_machine():
    """Mutants: a record with the path of a folder that only one machine had; an edited weight count."""
    head, target = (json.loads((DEMO / part / "training.json").read_text()) for part in ("draft", "target"))
    assert "--out weights/demo/draft" in head["command"] and "/tmp" not in head["command"]
    assert target["finished"] and target["tokens"] == target["steps"] * target["batch"] * target["context"]


@pytest.fixture(scope="module")
def kept():
    """Figures of the kept run, by name."""
    run = json.loads((ROOT / "bench" / "results" / "cpu-demo.json").read_text())
    return {figure["name"]: figure["value"] for figure in run["figures"]}


def test_the_kept_run_reaches_what_the_pair_must(kept):
    """bench/results/cpu-demo.json is a full run, and no figure in it is short."""
    assert demo.short(kept) == []


@pytest.mark.parametrize("paper", ["README.md", "weights/demo/README.md"])
def test_the_papers_say_what_the_kept_run_says(paper, kept):
    """Mutant: a new run kept, its figures not copied."""
    text = (ROOT / paper).read_text(encoding="utf-8")
    for shape in demo.SHAPES.split():
        rates = " ".join(f"{kept[f'accept_rate.{shape}.{depth}']:.2f}" for depth in range(1, int(shape[0]) + 1))
        length, speed = kept[f"accept_length.{shape}"], kept[f"tokens_per_second.{shape}"]
        assert f"| ({shape.replace('-', ', ')}) | {length:.2f} | {rates} | yes | {speed:.0f} |" in text
