"""The options of `python -m engine.generate`: each works or is refused in one line, and one that goes by another
engine's name is answered with ours."""

import argparse
import re
from pathlib import Path

from weights.config import Refused

from .auto import AUTO
from .device import DTYPES
from .graph import MODES
from .loading import Options
from .plan import DRAFT_TP
from .request import Sampling
from .shape import MAX_NODES, PLAIN, Shape
from .tp import ranks_started

DESCRIPTION = "Generate text with a target and its EAGLE-3 draft. Exit codes: 0; 2 refused; 1 failed."
DEMO = Path(__file__).parents[1] / "weights" / "demo"

# What SGLang, vLLM and TensorRT-LLM call what we have, with "_" written "-".
SHAPE, GRAPHS = "--steps S --topk K --draft-tokens D", "--graphs off"
FOREIGN = {
    "--model": "--target DIR|HUB_ID",
    "--model-path": "--target DIR|HUB_ID",
    "--model-dir": "--target DIR|HUB_ID",
    "--draft-model-dir": "--draft DIR|HUB_ID",
    "--speculative-draft-model-path": "--draft DIR|HUB_ID",
    "--speculative-model": "--draft DIR|HUB_ID",
    "--speculative-model-dir": "--draft DIR|HUB_ID",
    "--speculative-algorithm": "--draft DIR|HUB_ID (the checkpoint says what kind it is)",
    "--spec-decode-algo": "--draft DIR|HUB_ID (the checkpoint says what kind it is)",
    "--speculative-config": f"--draft DIR|HUB_ID {SHAPE}",
    "--speculative-num-steps": "--steps",
    "--speculative-eagle-topk": "--topk",
    "--speculative-num-draft-tokens": "--draft-tokens (the root counted)",
    "--num-speculative-tokens": "--steps N (a chain of N; draft tokens N + 1)",
    "--spec-decode-max-draft-len": "--steps N (a chain of N; draft tokens N + 1)",
    "--max-draft-len": "--steps N (a chain of N; draft tokens N + 1)",
    "--eagle3-layers-to-capture": "--capture-layers boundary:A,B,C | output:A,B,C",
    "--max-tokens": "--max-new-tokens",
    "--context-length": "--max-context",
    "--max-model-len": "--max-context",
    "--max-seq-len": "--max-context",
    "--max-running-requests": "--batch",
    "--max-num-seqs": "--batch",
    "--max-batch-size": "--batch",
    "--chunked-prefill-size": "--prefill-chunk",
    "--max-num-batched-tokens": "--prefill-chunk",
    "--max-num-tokens": "--prefill-chunk",
    "--block-size": "--page-size",
    "--tokens-per-block": "--page-size",
    "--num-gpu-blocks-override": "--pages",
    "--max-total-tokens": "--pages (tokens / page size)",
    "--mem-fraction-static": "--pages",
    "--gpu-memory-utilization": "--pages",
    "--kv-cache-fraction": "--pages",
    "--kv-cache-free-gpu-memory-fraction": "--pages",
    "--tp-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--ep-size": "--expert-parallel",
    "--moe-ep-size": "--expert-parallel",
    "--enable-expert-parallel": "--expert-parallel",
    "--disable-cuda-graph": GRAPHS,
    "--enforce-eager": GRAPHS,
    "--use-cuda-graph": "--graphs required",
    "--load-format": "--random NAME (for random weights)",
    "--random-seed": "--seed",
}


class Parser(argparse.ArgumentParser):
    """argparse that raises Refused instead of leaving the process, and takes no option by its beginning alone. A
    module's docstring describes its command without the name, which stands in the line above."""

    def __init__(self, prog, description):
        said = re.sub(r"^`python -m [^`]*`:? ", "", description)
        super().__init__(prog=prog, allow_abbrev=False, description=said[0].upper() + said[1:])

    def error(self, message):
        raise Refused(message.removeprefix("argument "))


def least(bound: int):
    """argparse type: whole numbers from `bound`."""

    def whole(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < bound:
            raise argparse.ArgumentTypeError(f"{text!r} is not supported; supported: whole numbers from {bound}")
        return int(text)

    return whole


def number(text: str) -> float:
    """argparse type: a number; its range is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def capture_option(add):
    """Add --capture-layers, as every command with a draft has it; add: a parser's add_argument."""
    add(
        "--capture-layers",
        metavar="boundary:A,B,C|output:A,B,C",
        help="layers that feed the draft, in place of its config's",
    )


def parser() -> Parser:
    """Every option, in the order of the README."""
    p = Parser("python -m engine.generate", DESCRIPTION)
    add = p.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the prompt, a text")
    add("--prompt-file", metavar="FILE", help="*.jsonl: a line each with prompt, token_ids or messages; else one text")
    add("--chat", action="store_true", help="apply the chat template to text prompts")
    add("--target", metavar="DIR|HUB_ID", help="default: the bundled demo target")
    add(
        "--draft", metavar="DIR|HUB_ID|random:NAME|none", help="default: the demo draft with the demo target, else none"
    )
    add("--random", metavar="NAME|CONFIG.json", help="random weights of that architecture in place of a target")
    add("--layers", type=least(1), metavar="N", help="with --random: so many layers only")
    capture_option(add)
    add("--steps", type=least(0), metavar="S", help="draft passes a cycle; default 3; 0 is plain decoding")
    add("--topk", type=least(1), metavar="K", help="candidates a draft pass; default 1, a chain")
    nodes = "nodes verified, the root counted; default 1 + steps * topk, 64 at most"
    add("--draft-tokens", type=least(1), metavar="D", help=nodes)
    add("--shape", metavar="auto", help="choose before each cycle the shape of most expected tokens per second")
    add(
        "--max-new-tokens",
        type=least(0),
        default=Sampling.max_new_tokens,
        metavar="N",
        help="of each answer; default %(default)s",
    )
    add("--stop", action="append", default=[], metavar="STR", help="end the text before STR; repeatable")
    add("--stop-id", action="append", default=[], type=least(0), metavar="N", help="end with token N; repeatable")
    add("--ignore-eos", action="store_true", help="the checkpoint's own end tokens do not end the text")
    add("--temperature", type=number, metavar="T", help="draw from softmax(logits / T); default 0, greedy")
    add("--top-k", type=least(0), metavar="N", help="draw from the N likeliest tokens; default 0, all")
    add("--top-p", type=number, metavar="P", help="of those, from the likeliest that together reach P; default 1, all")
    add("--min-p", type=number, metavar="P", help="and at least P times as likely as the likeliest; default 0, all")
    add("--seed", type=least(0), metavar="N", help="of the draws; default 0; a prompt's own in the file comes first")
    add("--logprobs", type=least(0), metavar="N", help="each token's log-probability and the N greatest, in --stats")
    add("--batch", type=least(1), default=1, metavar="N", help="prompts at once; default %(default)s")
    add(
        "--max-context",
        type=least(2),
        metavar="N",
        help="positions of a prompt and its answer; default: the model's, 8192 at most",
    )
    add(
        "--pages",
        type=least(2),
        metavar="N",
        help="pages of the cache; default: enough for --batch requests of --max-context",
    )
    add(
        "--page-size",
        type=least(1),
        default=Options.page_size,
        metavar="N",
        help="positions a page; default %(default)s",
    )
    add(
        "--prefill-chunk",
        type=least(1),
        metavar="N",
        help="prompt tokens a pass; default: 8192 on one GPU with room for it, else 512",
    )
    add(
        "--no-prefix-cache",
        action="store_true",
        help="compute a prompt's beginning anew where an earlier one shares it",
    )
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", choices=tuple(DTYPES), help="default: bfloat16 on CUDA, float32 on the CPU")
    add(
        "--graphs",
        choices=MODES,
        default="auto",
        help="capture cycles as CUDA graphs; required: or be refused; default %(default)s",
    )
    add(
        "--tp",
        type=least(1),
        metavar="N",
        help="ranks, a GPU each; default 1, under torchrun all that it started",
    )
    add(
        "--expert-parallel",
        action="store_true",
        help="deal out whole experts to the ranks; default: every expert is cut by its width",
    )
    add(
        "--draft-tp",
        choices=DRAFT_TP,
        default="auto",
        help="the draft cut over the ranks or whole on each; default: whichever is faster",
    )
    add(
        "--tp-slice",
        type=least(2),
        metavar="N",
        help="with --random: what one rank of N computes, alone, its collectives left out",
    )
    add(
        "--no-check",
        action="store_true",
        help="read an ambiguous head as most servers do, without measuring which reading is right",
    )
    add("--compare", action="store_true", help="decode plainly, then with speculation, and print the speed-up")
    add("--profile", action="store_true", help="time the stages of every cycle: draft, verify, accept, commit")
    add("--stats", metavar="FILE.json", help="write the statistics of the run there")
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """Options as given, those of no effect refused. Raises Refused."""
    p = parser()
    options, unknown = p.parse_known_args(argv)
    if unknown:
        raise Refused(_unknown(p, unknown[0]))
    options.tp = options.tp or ranks_started()
    for refused, message in _conflicts(options):
        if refused:
            raise Refused(message)
    return options


def _unknown(p: Parser, argument: str) -> str:
    given = argument.split("=")[0]
    name = "--" + given.lstrip("-").replace("_", "-").lower()
    if not given.startswith("-"):
        return f"{argument!r} after the prompt: a prompt is one argument; put it in quotes"
    if name in FOREIGN or name[2:].replace("-", "_") in vars(p.parse_args([])):
        return f"{given} is {FOREIGN.get(name, name)} here"
    return f"{given}: there is no such option; --help lists all"


def _conflicts(o: argparse.Namespace):
    """(whether it is so, what to say) of every pair of options that cannot both count."""
    stats = Path(o.stats or "stats.json")
    yield o.prompt is None and o.prompt_file is None, "no prompt: give PROMPT or --prompt-file FILE"
    yield o.prompt is not None and o.prompt_file is not None, "both PROMPT and --prompt-file are given; supported: one"
    yield o.random and o.target, f"--random {o.random} and --target {o.target}: supported: one of them"
    yield o.layers and not o.random, f"--layers {o.layers}: supported with --random only"
    nothing = o.no_check and pair(o)[1] == "none"
    yield nothing, "--no-check: there is no draft to check; supported: with --draft DIR|HUB_ID"
    one = o.tp == 1 and not o.tp_slice
    yield o.tp_slice and not o.random, f"--tp-slice {o.tp_slice}: supported with --random only"
    yield o.tp_slice and o.tp > 1, f"--tp-slice {o.tp_slice} and --tp {o.tp}: supported: one of them"
    yield one and o.draft_tp != "auto", f"--draft-tp {o.draft_tp}: needs --tp above 1; supported: auto"
    alone = o.draft_tp != "auto" and pair(o)[1] == "none"
    yield alone, f"--draft-tp {o.draft_tp}: there is no draft; supported: with --draft DIR|HUB_ID"
    yield one and o.expert_parallel, "--expert-parallel: needs --tp above 1; supported: leave it out"
    yield o.shape not in (None, AUTO), f"--shape {o.shape}: supported: {AUTO}; a shape is {SHAPE}"
    for name in ("steps", "topk", "draft_tokens"):
        given, option = getattr(o, name), f"--{name.replace('_', '-')}"
        yield o.shape and given is not None, f"--shape {o.shape} and {option} {given}: supported: one of them"
    for name in ("top_k", "top_p", "min_p", "seed"):
        value, option = getattr(o, name), f"--{name.replace('_', '-')}"
        yield (
            not o.temperature and value is not None,
            f"{option} {value}: decoding is greedy without --temperature; supported: with --temperature above 0",
        )
    yield o.logprobs is not None and o.stats is None, f"--logprobs {o.logprobs}: they go to --stats FILE.json; give it"
    yield stats.is_dir() or not stats.parent.is_dir(), f"--stats {o.stats}: supported: a file in an existing directory"


def pair(o: argparse.Namespace) -> tuple[str | None, str]:
    """(target, None with random weights; draft, "none" where nothing is drafted)."""
    demo = not o.random and not o.target
    target = None if o.random else o.target or str(DEMO / "target")
    return target, o.draft or (str(DEMO / "draft") if demo else "none")


def shape(o: argparse.Namespace, draft: str) -> Shape | str:
    """The Shape asked for, or AUTO. Raises Refused where it cannot be, or where nothing is drafted."""
    asked = {name: getattr(o, name) for name in ("steps", "topk", "draft_tokens") if getattr(o, name) is not None}
    if o.shape == AUTO and draft != "none":
        return AUTO
    if draft == "none":
        if o.shape == AUTO:
            raise Refused(f"--shape {AUTO}: there is no draft; supported: with --draft DIR|HUB_ID")
        for name, value in asked.items():
            if value > (name != "steps"):
                raise Refused(
                    f"--{name.replace('_', '-')} {value}: there is no draft; supported: with --draft DIR|HUB_ID"
                )
        if o.compare:
            raise Refused("--compare: there is no draft to compare with; supported: with --draft DIR|HUB_ID")
        return PLAIN
    steps, topk = asked.get("steps", 3), asked.get("topk", 1)
    if steps == 0 and o.compare:
        raise Refused("--compare: --steps 0 is plain decoding itself; supported: --steps from 1")
    return Shape(steps, topk, asked.get("draft_tokens", _nodes(steps, topk)))


def _nodes(steps: int, topk: int) -> int:
    """Nodes of a tree by default: as many as `steps` rows of `topk`, the root and 63 others at most."""
    return min(MAX_NODES, 1 + steps * topk)
