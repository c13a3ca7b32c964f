"""Ranks in lockstep, and how they end: decisions are rank 0's, and one rank's failure ends the whole command within a
minute, its own error first, with nothing left behind."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
from toys import V, pair

from engine import Sampling, Shape, spawn, tp
from engine.graph import Graphs
from engine.ranks import RankFailed
from engine.session import Session
from weights.source import Source

ROOT = Path(__file__).parents[1]
CHAIN, TREE = Shape(3, 1, 4), Shape(4, 4, 16)


class Guess:
    """A drafter that guesses: another number on each rank, unless somebody decides for all."""

    cache_rows = None

    def extend(self, batch, features, cache):
        """Learns nothing."""

    def propose(self, state, tree, cache):
        """A chain of random tokens."""
        tree.tokens.random_(0, V)
        tree.parents.copy_(torch.arange(tree.shape.draft_tokens) - 1)
        tree.parents.clamp_(min=0)


def astray(target, draft):
    """Ranks told different things: seeds of the process, prompts and requests' seeds, logits an ulp off on one rank, a
    drafter that guesses. -> ids of each drafter, shape and way of drawing, to the context's limit."""
    torch.set_num_threads(1)
    engine = pair(target, draft, tp=2, draft_tp="replicated", max_context=128)
    rank, real = engine.parts.tp.rank, engine.drafter
    torch.manual_seed(rank)
    for head in {id(m.head): m.head for m in (engine.target, real)}.values():
        if rank == 1:
            head.ops = dataclasses.replace(head.ops, head=nudged(head.ops.head))
    out = []
    for drafter, shape, temperature in ((real, CHAIN, 1), (real, TREE, 0), (real, TREE, 1), (Guess(), CHAIN, 1)):
        engine.drafter = drafter
        how = [Sampling(500, temperature, seed=7 + rank, stop_ids=(60 + rank,)) for _ in range(2)]
        prompts = [[3 + rank, 9], [(5 * i) % V for i in range(40 + rank)]]
        results = engine.generate(prompts, how, shape=shape)
        out.append([(r.token_ids, r.finish_reason, r.stop) for r in results])
    return out


def nudged(head):
    """`head` with every logit one representable number further up."""

    def up(*args):
        values, ids, lse = head(*args)
        if args[5] is not None:
            args[5].copy_(torch.nextafter(args[5], torch.tensor(torch.inf)))
        return torch.nextafter(values, torch.tensor(torch.inf)), ids, lse

    return up


def test_what_one_rank_decides_all_use(toys):
    """B42: ids and ends are the same on both ranks whatever one of them would have done, and everything ends. Mutants:
    each rank's own drafts are verified; each rank draws for itself; each rank's own seed, prompt or stop ids."""
    first, second = spawn(astray, 2, toys.history(), toys.random_draft())
    assert first == second
    assert len(first) == 4 and all(ids for case in first for ids, _, _ in case)


def failing(target, draft, where, how):
    """Decode on two ranks; rank 1 fails at `where`."""
    torch.set_num_threads(1)
    owner, name = {
        "load": (Source, "fill"),
        "capture": (Graphs, "_enter"),
        "decode": (Session, "_read"),
    }[where]
    real, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) > (0 if where == "load" else 1):
            how()
        return real(*args, **kwargs)

    setattr(owner, name, broken)
    engine = pair(target, draft, tp=2, shapes=[CHAIN, TREE])
    engine.generate([1, 2, 3], Sampling(max_new_tokens=60))


def boom():
    raise OSError("the disk is on fire")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "where, how, first",
    [
        ("load", boom, "OSError: the disk"),
        ("capture", boom, "OSError: the disk"),
        ("decode", boom, "OSError: the disk"),
        ("decode", die, "was killed by SIGKILL"),
    ],
)
def test_one_rank_fails(toys, where, how, first):
    """B43: within a minute, its own error first, no process and no shared memory left. Mutants: the others wait for
    ever; what they say of the lost connection comes first; a killed rank goes unnoticed."""
    shared, began = set(os.listdir("/dev/shm")), time.monotonic()
    with pytest.raises(RankFailed) as error:
        spawn(failing, 2, toys.history(), toys.random_draft(), where, how)
    assert time.monotonic() - began < 60
    assert str(error.value).startswith(f"rank 1: {first}"), error.value
    assert children(os.getpid()) == [] and set(os.listdir("/dev/shm")) <= shared


def children(process):
    """Numbers of the running processes that `process` started, multiprocessing's own tracker left out."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(p) for p in found if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()]


def generate(*words, start=(sys.executable, "-m")):
    """`python -m engine.generate` on the demo pair, on the CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*start, "engine.generate", "def quicksort(items):", "--device", "cpu", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def test_the_command_line_starts_ranks(tmp_path, monkeypatch):
    """One text, one report: rank 0's, with what matters to ranks in it. Mutants: every rank prints; the text of two
    ranks is another one; NCCL's variables or a rank's bytes left out."""
    monkeypatch.setenv("NCCL_PROTO", "LL")
    ranks = ("--tp", "2", "--draft-tp", "cut", "--stats", str(tmp_path / "stats.json"))
    alone, two = (generate("--max-new-tokens", "24", *more) for more in ((), ranks))
    texts = [process.communicate(timeout=120) for process in (alone, two)]
    assert [alone.returncode, two.returncode] == [0, 0], texts[1][1]
    assert texts[0][0] == texts[1][0] and texts[1][1].count("accept length") == 1
    assert "2 ranks hold" in texts[1][1] and "draft cut, as asked" in texts[1][1]
    stated = json.loads((tmp_path / "stats.json").read_text())["environment"]
    assert (stated["tp"], stated["NCCL_PROTO"], stated["draft_tp"]) == (2, "LL", "cut, as asked")
    assert stated["reduction"].startswith("gloo, all_gather") and len(stated["weights_bytes"]) == 2


def test_torchrun_starts_ranks_too():
    """The same under torchrun, without --tp. Mutants: every rank prints; a rank starts ranks of its own."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    process = generate("--max-new-tokens", "8", start=torchrun)
    text, report = process.communicate(timeout=120)
    assert process.returncode == 0, report
    assert report.count("accept length") == 1 and "2 ranks hold" in report and text.strip()


@pytest.mark.parametrize("name, words", [
    ("engine.generate", "--device cpu --max-new-tokens 4 x"),
    ("bench.verify_vs_draft", "--device cpu --rows 1 --shapes 3-1-4 --rounds 1 --repeats 1 --tokens 6 --context 24"),
])  # fmt: skip
def test_graphs_go_before_the_group(monkeypatch, name, words):
    """NCCL's end waits for them: a run over it on two GPUs did not end by itself. Mutants: left for the collector;
    something that holds a command's engine to the end."""
    made, left, begin = [], [], Graphs.__init__

    def counted(graphs, *given):
        made.append(weakref.ref(graphs))
        begin(graphs, *given)

    monkeypatch.setattr(Graphs, "__init__", counted)
    started = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
    for each in started.split():
        monkeypatch.setenv(*each.split("="))
    monkeypatch.setattr(tp.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(tp.dist, "destroy_process_group", lambda: left.append([graphs() for graphs in made]))
    assert importlib.import_module(name).main(words.split()) == 0
    assert made and left == [[None] * len(made)]


def test_a_refusal_is_said_once():
    """By all ranks in one line, exit code 2. Mutant: each rank says it."""
    process = generate("--tp", "3")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2 and said.count("error:") == 1 and "\nerror" not in said.strip()
    assert "tp: 3" in said and "whole pair: 1, 2" in said


@pytest.mark.parametrize("victim", ["rank 1", "the command"])
def test_a_killed_process(victim):
    """SIGKILL while text comes, of a rank or of the process that started them: nothing is left running. Mutants: rank 0
    waits for ever; ranks outlive the command."""
    process = generate("--tp", "2", "--max-new-tokens", "2000", "--ignore-eos")
    process.stdout.readline()
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1] if victim == "rank 1" else process.pid, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    if victim == "rank 1":
        last = said[said.index("error:") :].splitlines()
        assert process.returncode == 1 and last[0] == "error: rank 1: was killed by SIGKILL", said
    until = time.monotonic() + 20
    while any(running(rank) for rank in ranks) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(running(rank) for rank in ranks)


def running(process):
    """Whether there is such a process, and it is more than a name in its parent's list."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
