"""What the bench commands share: the options of device and results, refusals in one line, exit codes."""

import shlex
import sys

from engine import interrupt, launch
from engine.links import REDUCTIONS
from engine.options import least
from engine.plan import DRAFT_TP
from engine.tp import launched, ranks_started
from weights.config import Refused


class Failed(RuntimeError):
    """What was run did not do what it must: one line, exit code 1."""


def device_options(add):
    """Add --device, --dtype, --graphs and --json through `add`, a parser's add_argument."""
    add("--device", metavar="cpu|cuda|cuda:N", help="default: CUDA where there is a GPU")
    add("--dtype", metavar="float32|float16|bfloat16", help="default: bfloat16 on CUDA, float32 on the CPU")
    add(
        "--graphs",
        choices=("auto", "required", "off"),
        default="auto",
        help="capture cycles as CUDA graphs; required: or be refused; default %(default)s",
    )
    add("--json", metavar="FILE", help="write the run there, as JSON")


def parallel_options(add, sliced=True):
    """Add the options of several ranks; sliced: --tp-slice too."""
    add("--tp", type=least(1), default=ranks_started(), metavar="N", help="ranks, a GPU each; default %(default)s")
    add(
        "--draft-tp",
        choices=DRAFT_TP,
        default="auto",
        help="the draft cut over the ranks or whole on each; default: whichever is faster",
    )
    add("--expert-parallel", action="store_true", help="deal out whole experts to the ranks")
    if sliced:
        alone = "with --random: what one rank of N computes, alone, its collectives left out"
        add("--tp-slice", type=least(2), metavar="N", help=alone)
    add(
        "--reduction",
        choices=REDUCTIONS,
        default="auto",
        help="sums over ranks: auto by peer memory where that works, library always by NCCL",
    )


def parallel(o):
    """The options of several ranks as Engine.load takes them."""
    names = ("tp", "tp_slice", "draft_tp", "expert_parallel", "reduction")
    return {name: getattr(o, name) for name in names if hasattr(o, name)}


def options(parser, argv):
    """Options as given. Raises Refused for one that does not exist."""
    o, unknown = parser.parse_known_args(argv)
    if unknown:
        raise Refused(f"{unknown[0]}: there is no such option; --help lists all")
    return o


def main(name, parse, run, argv, ranks=True):
    """Run `python -m name`, as ranks where --tp or torchrun says so; returns the exit code: 0; 1 for what
    Failed or was interrupted; 2 for what is refused.

    Args:
        parse: argv -> options; run: (options, command as it would be typed) -> figures or lines to print.
        ranks: False for a command that starts them itself.
    """
    argv = sys.argv[1:] if argv is None else argv

    def body(o):
        said = run(o, shlex.join(["python", "-m", name, *argv]))
        print("\n".join(line if isinstance(line, str) else line.line() for line in said))
        return 0

    def answer(_):
        try:
            o = parse(argv)
            if launched() is not None:
                return launch.guarded(lambda: body(o))
            if ranks and getattr(o, "tp", 1) > 1:
                return launch.command(name, argv, o.tp)
            return body(o)
        except (Refused, Failed) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, Refused) else 1

    return interrupt.command(answer)
