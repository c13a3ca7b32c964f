"""Ways of decoding beside each other in one process: they take turns, so that drift favours none, and every round is
kept, so that their spread shows. `engine.generate --compare` and `bench.sweep` both measure like this."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from .report import Acceptance


@dataclass
class Taken:
    """What one way took: tokens after the first of each request, cycles and ms of each round; acceptance; whether all
    ids were those it was compared with."""

    tokens: list[int] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    acceptance: Acceptance = Acceptance()
    same: bool = True

    @property
    def speed(self) -> list[float]:
        """Tokens/s of each round; empty where nothing was decoded."""
        return [1e3 * tokens / ms for tokens, ms in zip(self.tokens, self.ms, strict=True) if tokens and ms > 0]

    @property
    def cycle(self) -> list[float]:
        """ms a cycle of each round, host and idle gaps counted."""
        return [ms / cycles for ms, cycles in zip(self.ms, self.cycles, strict=True)]

    def add(self, turn: int, results: list, ms: float, expected: list[list[int]]) -> None:
        """Take requests (engine.request.Result) that took `ms` together in round `turn`; expected: their ids."""
        while len(self.ms) <= turn:
            self.tokens.append(0), self.cycles.append(0), self.ms.append(0.0)
        self.tokens[turn] += sum(max(0, len(result.token_ids) - 1) for result in results)
        self.cycles[turn] += sum(len(result.cycles) for result in results)
        self.ms[turn] += ms
        self.acceptance += sum((Acceptance.of(result.cycles) for result in results), Acceptance())
        self.same = self.same and [result.token_ids for result in results] == expected


def turns(ways: Sequence, units: int, rounds: int) -> Iterator[tuple]:
    """(round, unit, way) of every way on every unit of work, `rounds` times; each unit begins with another way."""
    ways = list(ways)
    for turn in range(rounds):
        for unit in range(units):
            first = (turn * units + unit) % len(ways)
            for way in ways[first:] + ways[:first]:
                yield turn, unit, way


def comparison(plain: Taken, speculative: Taken, drawn: bool = False) -> dict:
    """Both ways of decoding the same requests: medians over rounds, and the speed-up of each round; null where nothing
    was measured. `drawn`: tokens were sampled, so that other ids say nothing (identical null)."""
    before, after = (median(taken.speed) if taken.speed else None for taken in (plain, speculative))
    ratios = [b / a for a, b in zip(plain.speed, speculative.speed, strict=True)]
    return {
        "plain_tokens_per_second": before,
        "speculative_tokens_per_second": after,
        "speedup": after / before if ratios else None,
        "speedup_by_round": ratios,
        "identical": True if speculative.same and plain.same else None if drawn else False,
    }
