"""`python -m bench.peers`: the same prompts and token counts, greedy, on this engine, on Hugging Face transformers, and
on vLLM and SGLang where they are installed: plain and EAGLE-3, one table.

The others run in processes of their own that cannot see this repository: our package `kernels` has the name of one that
transformers may import. What is not installed, or cannot do the job, is named as such.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from engine import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch
from tqdm import tqdm

from engine import Engine
from engine.options import DEMO, Parser, least
from engine.shape import PLAIN, Shape
from weights import resolve
from weights.config import Refused

from . import command, results, stages
from .peer_scripts import COMMON, SCRIPTS
from .results import Figure
from .texts import several

LIMIT = 3600  # seconds one engine may take


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given. Raises Refused."""
    p = Parser("python -m bench.peers", __doc__.split("\n\n")[0])
    add = p.add_argument
    add("--target", metavar="DIR|HUB_ID", help="default: the demo pair")
    add("--draft", metavar="DIR|HUB_ID|none", help="an EAGLE-3 head; default: the demo draft with the demo target")
    add("--shape", metavar="S-K-D", help="steps, topk, draft tokens in every engine; default 3-1-4")
    add("--engines", nargs="+", choices=tuple(SCRIPTS), default=list(SCRIPTS), help="beside ours; default: all")
    add("--prompts", metavar="FILE", help="default: the demo's")
    add("--count", type=least(1), default=3, metavar="N", help="the first N prompts; default %(default)s")
    add("--context", type=least(2), default=512, metavar="N", help="most tokens of a prompt; default %(default)s")
    add("--new-tokens", type=least(4), default=48, metavar="N", help="for each prompt; default %(default)s")
    add("--repeats", type=least(1), default=3, metavar="N", help="of all prompts; default %(default)s")
    add("--device", metavar="cpu|cuda", help="default: CUDA where there is a GPU")
    add("--dtype", metavar="float32|float16|bfloat16", help="default: bfloat16 on CUDA, float32 on the CPU")
    add("--graphs", choices=("auto", "required", "off"), default="auto", help="of this engine; default %(default)s")
    add("--json", metavar="FILE", help="write the run there, as JSON")
    o = p.parse_args(argv)
    asked, o.shape, o.random = o.shape, Shape.parse(o.shape or "3-1-4"), None
    if o.shape == PLAIN:
        raise Refused("--shape 0-1-1: plain decoding is always measured; supported: shapes that draft")
    if o.target is None:
        o.target, o.draft = str(DEMO / "target"), o.draft or str(DEMO / "draft")
    o.draft = None if o.draft == "none" else o.draft
    if asked and o.draft is None:
        raise Refused(f"--shape {asked}: there is no draft; supported: with --draft DIR|HUB_ID")
    results.writable(o.json)
    return o


def ours(o, engine: Engine, prompts: list[list[int]], shape: Shape, bar) -> dict:
    """This engine's answer to the job: ids of the last repeat, tokens/s of each."""
    how, speeds, ids = stages.sampling(o.new_tokens), [], []
    stages.warm(engine, prompts[0], [shape])
    for _ in range(o.repeats):
        done = [engine.generate(prompt, how, shape=shape) for prompt in prompts]
        ids = [result.token_ids for result in done]
        tokens = sum(len(i) - 1 for i in ids)
        speeds.append(tokens / sum(result.decode_ms for result in done) * 1e3)
    bar.update(1)
    return {"speeds": speeds, "ids": ids}


def peer(name: str, job: dict) -> dict:
    """Another engine's answer: {speeds, ids, version}, or {absent: why}. It runs in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        script, answer = Path(folder) / "peer.py", Path(folder) / "answer.json"
        script.write_text(COMMON.replace("REPOSITORY", repr(str(results.ROOT))) + SCRIPTS[name], encoding="utf-8")
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        try:
            words = [sys.executable, "-P", str(script), str(Path(folder) / "job.json"), str(answer)]
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return {"absent": f"no answer within {LIMIT} s"}
        if answer.exists():
            return json.loads(answer.read_text(encoding="utf-8"))
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"absent": f"failed with exit code {done.returncode}: {last[:200]}"}


def job_of(o, engine: Engine, prompts: list[list[int]], shape: Shape) -> dict:
    """What the other processes are told."""
    parts = engine.parts
    return {
        "target": str(Path(resolve(o.target)).absolute()),
        "draft": None if shape == PLAIN else str(Path(resolve(o.draft)).absolute()),
        "steps": shape.steps,
        "topk": shape.topk,
        "draft_tokens": shape.draft_tokens,
        "prompts": prompts,
        "new_tokens": o.new_tokens,
        "repeats": o.repeats,
        "device": parts.device.type,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "max_len": max(map(len, prompts)) + o.new_tokens + 64,
    }


def agreement(ids: list[list[int]], wanted: list[list[int]]) -> float:
    """Share of prompts with the same ids."""
    return sum(a == b for a, b in zip(ids, wanted, strict=True)) / len(wanted)


def lines(answers: dict[tuple[str, str], dict], wanted: list[list[int]]) -> list[str]:
    """The table."""
    out = [f"{'engine':34} {'decoding':10} {'tokens/s':>9} {'ms a token':>11}  ids as ours"]
    for (name, way), answer in answers.items():
        if "absent" in answer:
            out.append(f"{name:34} {way:10} {'-':>9} {'-':>11}  {answer['absent']}")
            continue
        speed = statistics.median(answer["speeds"])
        label = f"{name} {answer['version']}" if answer.get("version") else name
        same = f"{100 * agreement(answer['ids'], wanted):.0f} %"
        out.append(f"{label:34} {way:10} {speed:9.1f} {1e3 / speed:11.2f}  {same}")
    return out


def figures(answers: dict[tuple[str, str], dict], wanted: list[list[int]]) -> list[Figure]:
    """tokens_per_second.SHAPE of ours, ENGINE.tokens_per_second.plain|eagle3 of the others."""
    found = []
    for (name, way), answer in answers.items():
        if "absent" not in answer:
            note = (
                f"{name} {answer.get('version', '')}; {100 * agreement(answer['ids'], wanted):.0f} % of prompts as ours"
            )
            found.append(
                Figure.of(f"tokens_per_second.{name.split()[0]}.{way}", "tokens/s", answer["speeds"], note=note)
            )
    return found


def run(o, command: str) -> list[str]:
    """Measure, keep, and say what came out."""
    words = {"device": o.device, "dtype": o.dtype, "graphs": o.graphs}
    engine = Engine.load(o.target, o.draft, max_batch=1, prefix_cache=False, **words)
    if engine.parts.device.type == "cpu":
        torch.set_num_threads(1)  # as the others do
    prompts = several(o, engine, o.count, o.context)
    if max(map(len, prompts)) + o.new_tokens > engine.parts.max_context:
        raise Refused(f"--new-tokens {o.new_tokens}: prompt and answer pass the context of {engine.parts.max_context}")
    ways = {"plain": PLAIN} | ({} if o.draft is None else {"eagle3": o.shape})
    answers = {}
    with tqdm(total=len(ways) * (1 + len(o.engines)), desc="engines", unit="", disable=None, leave=False) as bar:
        for way, shape in ways.items():
            answers["ours", way] = ours(o, engine, prompts, shape, bar)
        jobs = {way: job_of(o, engine, prompts, shape) for way, shape in ways.items()}
        load = stages.workload(o, engine, "text", prompts, o.new_tokens)
        environment, wanted = stages.environment(engine), answers["ours", "plain"]["ids"]
        del engine  # the others need the memory
        for name in (None, *o.engines):  # what there is, is kept after each: another one may take an hour
            for way, job in jobs.items() if name else ():
                answers[name, way] = peer(name, job)
                bar.update(1)
            if o.json:
                results.write(o.json, results.document(command, environment, load, figures(answers, wanted)))
    return [f"{len(prompts)} prompts, {o.new_tokens} new tokens each, EAGLE-3 {o.shape}", *lines(answers, wanted)]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command.main("bench.peers", parse, run, argv)
