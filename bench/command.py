"""What the bench commands share: the options of device and results, refusals in one line, exit codes."""

import shlex
import sys

from weights.config import Refused


def device_options(add):
    """Add --device, --dtype, --graphs and --json through `add`, a parser's add_argument."""
    add("--device", metavar="cpu|cuda|cuda:N")
    add("--dtype", metavar="float32|float16|bfloat16")
    add("--graphs", choices=("auto", "required", "off"), default="auto", help="CUDA graphs; default %(default)s")
    add("--json", metavar="FILE", help="where the results go")


def options(parser, argv):
    """Options as given. Raises Refused for one that does not exist."""
    o, unknown = parser.parse_known_args(argv)
    if unknown:
        raise Refused(f"{unknown[0]}: there is no such option; --help lists all")
    return o


def main(name, parse, run, argv):
    """Run `python -m name`; returns the exit code: 0, or 2 for what is refused.

    Args:
        parse: argv -> options; run: (options, command as it would be typed) -> figures or lines to print.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        said = run(parse(argv), shlex.join(["python", "-m", name, *argv]))
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(line if isinstance(line, str) else line.line() for line in said))
    return 0
