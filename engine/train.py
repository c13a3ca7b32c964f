"""`python -m engine.train`: trains a one-layer EAGLE-3 head on a target's own hidden states, which the engine's own
target code computes. Exit codes: 0; 2 for what is refused (one line on stderr); 1 for a failure.

Shapes: B sequences, L tokens of a window, N = L - steps rows trained of it, V vocabulary, Vd draft vocabulary.
"""

import contextlib
import json
import math
import sys
import time
from pathlib import Path

from . import interrupt

if __name__ == "__main__":  # before what takes long to import
    sys.exit(interrupt.start(__spec__.name))

import torch

from weights.config import Eagle3Config, Refused
from weights.deepseek import language

from .device import device_of
from .forced import PAGE
from .lessons import FromDump, FromText
from .loading import Options
from .opening import open_target
from .options import Parser, least, number
from .train_head import Head, describe, draft_vocabulary, losses

OWN = 16384  # self-generated windows by default
WARM_UP = 0.03  # share of the run in which the rate rises
DECAY = 0.8  # weight of a step's loss against the step before it
FIXED = (
    "target corpus dump heldout capture_layers draft_vocab intermediate batch length ttt seed lr self_generated sharpen"
).split()  # options that a resumed run must share with the run it goes on with


class Schedule:
    """Progress of the run in [0, 1], by the step or by the clock, and the learning rate there."""

    def __init__(self, o, seconds):
        self.steps, self.minutes, self.peak = o.steps, o.minutes, o.lr
        self.began = time.monotonic() - seconds

    @property
    def seconds(self):
        """Since training began, earlier tries counted."""
        return time.monotonic() - self.began

    def progress(self, step):
        """0 at the start, 1 when all is done."""
        return step / self.steps if self.steps else min(1.0, self.seconds / (60 * self.minutes))

    def rate(self, progress):
        """Linear up, then a cosine to zero."""
        return self.peak * min((progress + 1e-3) / WARM_UP, (1 + math.cos(math.pi * progress)) / 2)


class Trainer:
    """The head, its optimizer and where they stand; `state` and `restore` are the checkpoint of a run."""

    def __init__(self, head, o, own):
        fused = o.device.type == "cuda"
        self.head, self.o, self.own = head, o, own
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.step, self.seconds, self.curve = 0, 0.0, []

    def state(self):
        """Everything that `--resume` needs."""
        state = {"draft_ids": self.head.draft_ids, "own": self.own, "head": self.head.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "step": self.step, "seconds": self.seconds}
        return state | {"curve": self.curve, "settings": settings(self.o)}

    def restore(self, state):
        """Go on from a state."""
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]

    def run(self, study, autocast, save, say):
        """Train to the end of the schedule; `save` every --save-every seconds, `say` a line every --log-every."""
        o, head = self.o, self.head
        weight = DECAY ** torch.arange(o.ttt, device=o.device)
        weight /= weight.sum()
        schedule, draft_ids = Schedule(o, self.seconds), head.draft_ids
        printed = saved = time.monotonic()
        seen, total = self.step, torch.zeros(2, o.ttt, device=o.device)
        while (progress := schedule.progress(self.step)) < 1:
            for group in self.optimizer.param_groups:
                group["lr"] = schedule.rate(progress)
            lesson = study.lesson(self.step, draft_ids)
            with autocast():
                loss, agree = losses(head, lesson, o.ttt)
            (loss * weight).sum().backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            total += torch.stack([loss.detach(), agree])
            self.step += 1
            now = time.monotonic()
            if now - printed >= o.log_every or schedule.progress(self.step) >= 1:
                each = (total / (self.step - seen)).tolist()
                mean = sum(w * x for w, x in zip(weight.tolist(), each[0], strict=True))
                if not math.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} at step {self.step}; lower --lr")
                rate = (self.step - seen) / (time.monotonic() - printed)
                self.seconds = schedule.seconds
                self.curve.append([self.step, round(mean, 4), *(round(x, 4) for x in each[1])])
                top = " ".join(f"{x:.3f}" for x in each[1])
                say(
                    f"step {self.step}  {self.seconds:.0f} s  {100 * progress:.1f} %  "
                    f"lr {schedule.rate(progress):.2e}  loss {mean:.4f}  top-1 {top}  {rate:.1f} steps/s"
                )
                printed, seen = time.monotonic(), self.step
                total.zero_()
            if now - saved >= o.save_every:
                self.seconds = schedule.seconds
                save()
                saved = time.monotonic()
        self.seconds = schedule.seconds


def settings(o):
    """The options that a resumed run must share with the run it goes on with."""
    return {name: getattr(o, name) for name in (*FIXED, "windows")}


def parser():
    """Every option."""
    p = Parser("python -m engine.train", __doc__.split("\n\n")[0])
    add = p.add_argument
    add("--target", required=True, metavar="DIR|HUB_ID", help="the target")
    add("--corpus", metavar="FILE|DIR", help="ids in *.bin[.xz], text, or DIR/train.bin.xz")
    add(
        "--dump", metavar="DIR", help="in place of a corpus: hidden states that engine.dump wrote, and their boundaries"
    )
    add("--heldout", metavar="FILE", help="default: heldout.bin.xz beside the corpus, else its last 2 %%")
    add("--out", required=True, metavar="DIR", help="where the head goes")
    add("--capture-layers", metavar="boundary:A,B,C|output:A,B,C", help="layers that feed the head; default: three")
    add("--draft-vocab", type=least(1), default=2048, metavar="N", help="ids that it can name; default %(default)s")
    add("--intermediate", type=least(1), default=512, metavar="N", help="width of the MLP; default %(default)s")
    add("--steps", type=least(1), metavar="N", help="train that many steps")
    add("--minutes", type=number, metavar="M", help="train that long instead; generation and evaluation not counted")
    add("--batch", type=least(1), default=32, metavar="B", help="windows a step; default %(default)s")
    add("--length", type=least(8), default=512, metavar="L", help="tokens of a window; default %(default)s")
    add("--ttt", type=least(1), default=6, metavar="N", help="draft passes unrolled in training; default %(default)s")
    add("--lr", type=number, default=2e-3, metavar="R", help="peak learning rate; default %(default)s")
    add("--sharpen", type=number, default=1.0, metavar="F", help="factor on the target's logits; default %(default)s")
    own = "share of windows whose text the target itself writes; default %(default)s"
    add("--self-generated", type=number, default=0.0, metavar="SHARE", help=own)
    add("--windows", type=least(1), metavar="N", help=f"that the target writes, before training; default {OWN}")
    add("--seed", type=least(0), default=0, metavar="N", help="of weights and windows; default %(default)s")
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--resume", action="store_true", help="go on with the interrupted run in --out")
    add("--save-every", type=number, default=60.0, metavar="S", help="seconds between saves; default %(default)s")
    add("--log-every", type=number, default=5.0, metavar="S", help="seconds between lines; default %(default)s")
    return p


def parse(argv):
    """Options as given. Raises Refused."""
    o, unknown = parser().parse_known_args(argv)
    if unknown:
        raise Refused(f"{unknown[0]}: there is no such option; --help lists all")
    if (o.corpus is None) == (o.dump is None):
        raise Refused("--corpus FILE|DIR and --dump DIR: supported: exactly one of them")
    for name in ("heldout", "capture_layers", "self_generated"):
        if o.dump is not None and getattr(o, name):
            option = f"--{name.replace('_', '-')}"
            raise Refused(f"{option} {getattr(o, name)}: a dump holds what it holds; supported: with --corpus")
    if (o.steps is None) == (o.minutes is None):
        raise Refused("--steps N and --minutes M: supported: exactly one of them")
    for name in ("minutes", "lr"):
        if getattr(o, name) is not None and not 0 < getattr(o, name) < math.inf:
            raise Refused(f"--{name} {getattr(o, name)}: supported: a number above 0")
    for name in ("save_every", "log_every"):
        if not 0 <= getattr(o, name):
            raise Refused(f"--{name.replace('_', '-')} {getattr(o, name)}: supported: a number from 0")
    if not 0 <= o.self_generated <= 1:
        raise Refused(f"--self-generated {o.self_generated}: supported: 0 to 1")
    if o.windows and not o.self_generated:
        raise Refused(f"--windows {o.windows}: supported: with --self-generated SHARE above 0")
    o.windows = o.windows or OWN
    if o.length < 2 * o.ttt + 2 or o.self_generated and o.length < 3 * PAGE:
        fewest = max(2 * o.ttt + 2, 3 * PAGE if o.self_generated else 0)
        raise Refused(f"--length {o.length}: supported with these options: from {fewest}")
    o.device = device_of(o.device)
    if Path(o.out).is_file():
        raise Refused(f"--out {o.out}: it is a file; supported: a directory")
    return o


def saved_state(o):
    """The state of the interrupted run in --out, None without --resume. Raises Refused."""
    path = Path(o.out) / "training.pt"
    if not o.resume:
        return None
    if not path.is_file():
        raise Refused(f"--resume: {path} does not exist; supported: without it, a new run")
    try:
        state = torch.load(path, map_location=o.device, weights_only=True)
    except Exception as error:  # the reader raises a different type for each way of being broken
        raise Refused(f"--resume: {path} cannot be read ({str(error).splitlines()[0]})") from None
    for name, value in settings(o).items():
        if (had := state["settings"].get(name)) != value:
            raise Refused(f"--resume: --{name.replace('_', '-')} is {value}, the interrupted run had {had}")
    return state


def run(o, argv):
    """Train, evaluate and save as `o`, the parsed options, says."""
    began, state = time.monotonic(), saved_state(o)
    opened = open_target(Options(target=o.target))
    if o.length > opened.config.max_positions:
        raise Refused(f"--length {o.length}: supported: up to the target's {opened.config.max_positions} positions")
    study = FromDump(o, opened) if o.dump else None
    override = o.capture_layers if study is None else study.override
    said = language(opened.checkpoint.config, opened.checkpoint.where).raw
    raw, capture = describe(opened.config, said, o.draft_vocab, o.intermediate, override)
    config = Eagle3Config.read(raw, "the head")
    study = study or FromText(o, opened, capture, say, None if state is None else state["own"])
    say(f"capture layers: boundaries {list(capture.boundaries)} ({capture.why}); {study.about}")
    if state is not None:
        say(f"resumed at step {state['step']}, {state['seconds']:.0f} s")

    torch.manual_seed(o.seed)
    draft_ids = draft_vocabulary(study.shares, o.draft_vocab) if state is None else state["draft_ids"]
    covered = float(study.shares[draft_ids].sum())
    say(f"draft vocabulary: {o.draft_vocab} ids, {100 * covered:.2f} % of the text trained on")
    trainer = Trainer(Head(config, draft_ids, study.target, o.length).to(o.device), o, study.own)
    if state is not None:
        trainer.restore(state)

    out = Path(o.out)
    out.mkdir(parents=True, exist_ok=True)

    def autocast():
        on = o.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on else contextlib.nullcontext()

    def save():
        part = out / "training.pt.part"
        torch.save(trainer.state(), part)
        part.replace(out / "training.pt")
        trainer.head.save(raw, out)

    trainer.run(study, autocast, save, say)
    trainer.head.rounded()
    figures = study.evaluate(trainer.head)
    trainer.head.save(raw, out)
    record = {
        "command": " ".join(["python -m engine.train", *argv]),
        "seed": o.seed,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "seconds_in_all": round(time.monotonic() - began, 1),
        "hardware": torch.cuda.get_device_name(o.device) if o.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "boundaries": list(capture.boundaries),
        "parameters": sum(p.numel() for p in trainer.head.parameters()),
        "train_tokens": trainer.step * o.batch * o.length,
        "draft_vocab_coverage": round(covered, 4),
        "self_generated_windows": 0 if study.own is None else len(study.own),
        **figures,
        "loss_and_top1_by_step": trainer.curve,
    }
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    (out / "training.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    (out / "training.pt").unlink(missing_ok=True)
    for name, figure in figures.items():
        say(f"{name}: {figure}")
    say(f"saved to {out}; the same run again: --steps {trainer.step} in place of --minutes")


def say(line):
    """One line of progress."""
    print(line, flush=True)


def command(argv):
    """The command line; returns the exit code."""
    try:
        o = parse(argv)
        if o.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        run(o, argv)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv=None):
    """The command line; returns the exit code, 1 where it was interrupted."""
    return interrupt.command(lambda _: command(sys.argv[1:] if argv is None else argv))
