"""What racecheck reports, and which of it the machine code refutes.

The tool (seen with CUDA 13 on Hopper) reports pairs of two kinds although they are ordered, the first by the million:
- slots that are handed over by mbarriers, filled by bulk copies (UBLKCP) or by a warp, of which one lane arrives: ptxas
  leaves the `__syncwarp` before that out where the warp is together, so what orders the other lanes is not in the code;
- what warps leave one another across a barrier of the whole block, behind barriers of some of them (attend.cuh).
A pair is passed over where the code itself shows the order: its branches are followed, and every way between the
accesses has to meet what orders them. That the nth filling waits for the right phase of its barrier no branch shows: of
that only the wait itself is looked for.
"""

import re
from dataclasses import dataclass, field

from disassembly import cubins, disassembled

ACCESS = re.compile(r"(Race reported between|and) (Read|Write) access at (.+?)\+0x([0-9a-f]+)(?:.*\[(\d+) hazards?\])?")
LABEL = re.compile(r"`\((.*?)\)")
RINGS = ("packed_tiles", "combine_down")  # kernels with slots that the tool does not follow
SIDES = ("attend",)  # with barriers of some warps; all threads of a block meet the same barriers of all
BLOCK = re.compile(r"BAR\.SYNC\.DEFER_BLOCKING 0x0$")
WAIT, ARRIVAL, COPY = "SYNCS.PHASECHK", "SYNCS.ARRIVE", "UBLKCP"


@dataclass
class Race:
    """One access, those that it was reported with, and how many hazards that are."""

    kernel: str
    first: int
    others: list = field(default_factory=list)
    hazards: int = 0


def races(report):
    """The analysis reports of a run of racecheck."""
    found = []
    for new, _, kernel, offset, hazards in ACCESS.findall(report):
        if new != "and":
            found.append(Race(kernel, int(offset, 16)))
        else:
            found[-1].others.append(int(offset, 16))
            found[-1].hazards += int(hazards or 0)
    return found


def kernels(disassembly):
    """{name: Code} of what nvdisasm -c prints."""
    parts = re.split(r"^\.text\.(\S+):$", disassembly, flags=re.M)
    return {name: Code(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


class Unreadable(Exception):
    """Where execution goes on from an instruction is not known."""


class Code:
    """A kernel's instructions by offset, and where execution may go on from each."""

    def __init__(self, text):
        self.text, self.labels, waiting = {}, {}, []
        for line in text.splitlines():
            if label := re.match(r"\s*(\S+):$", line):
                waiting.append(label[1])
            elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
                offset = int(found[1], 16)
                self.text[offset] = found[2]
                self.labels |= dict.fromkeys(waiting, offset)
                waiting = []
        self.entry = min(self.text)
        order = sorted(self.text)
        self.behind = {offset: [after] for offset, after in zip(order, order[1:], strict=False)}
        self.joins = [self.targets(offset) for offset in self.all(r"\bBSSY\b")]

    def targets(self, offset):
        return [self.labels[label] for label in LABEL.findall(self.text[offset]) if label in self.labels]

    def next(self, offset):
        """Where execution may go on."""
        guard, name = re.match(r"(@!?U?P\w+\s+)?([A-Z0-9_.]+)", self.text[offset]).groups()
        behind, targets = self.behind.get(offset, []), self.targets(offset)
        if name == "EXIT":
            return behind if guard else []
        if name.startswith("RET"):  # of a function that the compiler adds, which knows no shared memory
            return []
        if name == "BRA" and not guard and re.match(r"BRA\s+`", self.text[offset]):
            return targets
        if name.startswith(("BRA", "WARPSYNC")):
            return targets + behind
        if name.startswith(("BRX", "JMP", "JMX", "BREAK")) or (name == "BSYNC" and behind not in self.joins):
            raise Unreadable(f"{offset:#x}: {self.text[offset]}")
        return behind

    def all(self, pattern):
        """Offsets of the instructions that match."""
        return {offset for offset, text in self.text.items() if re.search(pattern, text)}

    def reach(self, starts, through=frozenset()):
        """What may be executed after `starts`, not going on from what is in `through`."""
        seen, ahead = set(), [n for start in starts for n in self.next(start)]
        while ahead:
            offset = ahead.pop()
            if offset not in seen:
                seen.add(offset)
                ahead += [] if offset in through else self.next(offset)
        return seen

    def ends(self):
        return self.all(r"\bEXIT\b")


def apart(code, a, b):
    """Whether no two threads can be at the accesses between the same barriers of the block: from no barrier of it are
    both reached before the next one."""
    barriers = code.all(BLOCK)
    for start in {code.entry} | barriers:
        behind = code.reach([start], barriers)
        if a in behind and b in behind:
            return False
    return True


def handed_over(code, write, read):
    """Whether who reads waits for an mbarrier before and arrives at one behind, and who writes arrives at one too and
    waits before writing anew."""
    if not re.search(r"\bLDS", code.text[read]) or not re.search(rf"{COPY}|\bSTS", code.text[write]):
        return False
    waits, arrivals, entry = code.all(WAIT), code.all(ARRIVAL), [code.entry]
    copied = COPY in code.text[write]
    waited = read not in code.reach(entry, waits)
    left = not code.reach([read], arrivals) & (waits | code.ends())
    if copied:  # the bytes are expected before they are asked for
        told = write not in code.reach(entry, arrivals)
    else:
        told = not code.reach([write], arrivals) & (waits | code.ends() | {write})
    again = any(write in code.reach([wait]) for wait in waits & code.reach([write]))
    return waited and left and told and again


def refuted(race, code):
    """Whether the machine code shows the order of all pairs of a report."""
    pairs = [(race.first, other) for other in race.others]
    named = [name for name in SIDES + RINGS if f"{len(name)}{name}I" in race.kernel]
    if not named or not pairs:
        return False
    try:
        if named[0] in SIDES:
            return all(apart(code, a, b) for a, b in pairs)
        roles = [(b, a) if re.search(r"\bLDS", code.text[a]) else (a, b) for a, b in pairs]
        return all(handed_over(code, write, read) for write, read in roles)
    except Unreadable:
        return False


def left(report, code):
    """What of a report no kernel's code refutes, a line each; code: {kernel: Code}."""
    rest = [race for race in races(report) if race.kernel not in code or not refuted(race, code[race.kernel])]
    return [describe(race, code.get(race.kernel)) for race in rest]


def describe(race, code):
    def text(offset):
        return f"{offset:#x} {code.text[offset] if code else ''}"

    return f"{race.kernel}: {text(race.first)} with " + ", ".join(map(text, race.others))


def machine_code(library, folder):
    """{kernel: Code} of a library; folder: for its parts."""
    found = {}
    for cubin in cubins(library, folder):
        found |= kernels(disassembled(cubin))
    return found
