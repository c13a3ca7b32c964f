"""`python -m bench.accept`: how often a head guesses its target's own next token on a text, for each draft pass and by
class of token. Teacher-forced: nothing is generated; it says what a head knows, not what a shape keeps.

Row i of the head pairs the target's features at i with token i + 1. Pass 0 sees true features; pass j goes on from the
hidden of pass j - 1 with token i + j + 1, as the drafter does in a chain, and is asked for the target's next choice.
"""

import argparse
import sys
import time

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import Engine
from engine.forced import Teacher, due, guesses
from engine.loading import SHORT
from engine.options import DEMO, Parser, capture_option, least
from engine.train_head import chain_length
from weights.config import Refused

from . import command, results, stages
from .classes import CLASSES, kind
from .results import Figure
from .texts import several


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.accept", __doc__.split("\n\n")[0])
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID", help="an EAGLE-3 head; default: the demo draft with the demo target")
    capture_option(add)
    add("--prompts", metavar="FILE", help="the texts: *.jsonl, or one text; default: the demo's prompts")
    add("--count", type=least(1), metavar="N", help="the first N texts; default all")
    add("--window", type=least(8), default=512, metavar="N", help="most tokens of a text; default %(default)s")
    add("--steps", type=least(1), default=4, metavar="S", help="draft passes; default %(default)s")
    add("--topk", type=least(1), default=4, metavar="K", help="among the head's K best; default %(default)s")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", metavar="float32|float16|bfloat16", help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--json", metavar="FILE", help="write the run there, as JSON")
    o = p.parse_args(argv)
    if o.target is None:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    if o.draft in (None, "none"):
        raise Refused("--draft: there is no head to measure; supported: DIR, HUB_ID")
    o.random = None
    results.writable(o.json)
    return o


def measured(o, engine: Engine, prompts: list[list[int]], bar) -> list[Figure]:
    """Agreement of every pass, over all rows and by class of the token that was due."""
    hits, among, best, parts = [], [], [], engine.parts
    began = time.perf_counter()
    for ids in prompts:
        teacher = Teacher(parts.target, 1, len(ids), parts.device, parts.dtype)
        passed = teacher.read(ids, min(SHORT, parts.prefill_chunk))
        found = guesses(engine.drafter, ids, passed.features, o.steps, o.topk, parts.device, parts.dtype)
        wanted = due(passed.best, o.steps)
        hits.append(found[..., 0] == wanted)
        among.append((found == wanted[..., None]).any(-1))
        best.append(wanted)
        bar.update(1)
    seconds, count = time.perf_counter() - began, sum(len(h) for h in hits)
    lengths = [chain_length(h[None], o.steps) for h in hits if len(h)]
    right, near, ids = torch.cat(hits), torch.cat(among), torch.cat(best)
    note, made = f"{count} positions, teacher-forced", Figure.of
    figures = [made("positions_per_second", "positions/s", count / seconds)]
    for step in range(o.steps):
        figures.append(made(f"top1.{step + 1}", "share", float(right[:, step].float().mean()), note=note))
        figures.append(made(f"top{o.topk}.{step + 1}", "share", float(near[:, step].float().mean()), note=note))
    mean = sum(lengths) / len(lengths)
    words = "along the text, as if it were the target's own; mean over texts"
    figures.append(made(f"forced_accept_length.{o.steps}-1-{o.steps + 1}", "tokens a cycle", mean, note=words))
    return figures + by_class(engine, right, near, ids, o.topk)


def by_class(engine: Engine, right: torch.Tensor, near: torch.Tensor, ids: torch.Tensor, k: int) -> list[Figure]:
    """Agreement of the first pass for each class of token, and how many of the tokens due the head cannot say."""
    figures, flat, drafter = [], ids[:, 0].tolist(), engine.drafter
    if drafter.to_target is not None:
        known = set((torch.arange(len(drafter.to_target), device=ids.device) + drafter.to_target).tolist())
        outside = sum(i not in known for i in flat) / len(flat)
        figures.append(Figure.of("outside_draft_vocabulary", "share", outside, note="of the tokens that were due"))
    if engine.parts.text is None:
        return figures
    kinds = {i: kind(engine.parts.text.decode([i])) for i in set(flat)}
    for name in CLASSES:
        rows = torch.tensor([kinds[i] == name for i in flat], device=ids.device)
        if rows.any():
            note = f"{int(rows.sum())} positions, {100 * float(rows.float().mean()):.0f} % of all"
            for word, table in (("top1", right), (f"top{k}", near)):
                value = float(table[rows, 0].float().mean())
                figures.append(Figure.of(f"{word}.1.{name.replace(' ', '_')}", "share", value, note=note))
    return figures


def run(o, command: str) -> list[Figure]:
    """Measure and keep."""
    words = {name: getattr(o, name) for name in ("device", "dtype", "capture_layers")}
    engine = Engine.load(o.target, o.draft, max_batch=1, **words)
    if engine.parts.device.type == "cpu":
        torch.set_num_threads(1)
    for name in ("forward", "best", "to_target"):
        if not hasattr(engine.drafter, name):
            kind_ = type(engine.drafter).__name__
            raise Refused(f"--draft {o.draft}: a {kind_} does not recycle its hidden; supported: EAGLE-3 heads")
    if o.topk > engine.drafter.config.draft_vocab:
        raise Refused(f"--topk {o.topk}: the draft vocabulary has {engine.drafter.config.draft_vocab} ids")
    given = several(o, engine, o.count, min(o.window, engine.parts.max_context))
    prompts = [ids for ids in given if len(ids) > o.steps]
    if not prompts:
        raise Refused(f"--prompts: no text is longer than --steps {o.steps} tokens")
    with tqdm(total=len(prompts), desc="texts", unit="", disable=None, leave=False) as bar:
        figures = measured(o, engine, prompts, bar)
    if o.json:
        load = stages.workload(o, engine, "text, teacher-forced", prompts, 0)
        results.write(o.json, results.document(command, stages.environment(engine), load, figures))
    return figures


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.accept", parse, run, argv)
