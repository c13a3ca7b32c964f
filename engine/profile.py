"""Where a cycle's time goes: stamps of the device's clock around each stage, written by the cycle itself."""

import statistics

from .cycle import Cycle


class Stamped:
    """A cycle that stamps the clock before its first stage and after each one; what is captured is the same cycle."""

    def __init__(self, cycle, stamp):
        self.cycle, self.state, self.tree, self.stamp = cycle, cycle.state, cycle.tree, stamp

    def run(self, stages=Cycle.stages):
        """Run the named stages in order."""
        stamps = self.state.stamps
        self.stamp(stamps, 0)
        for number, stage in enumerate(stages):
            self.cycle.run((stage,))
            self.stamp(stamps, number + 1)
        if stages == Cycle.stages:
            self.cycle.publish()


class Profile:
    """Stamps collected over a request, in nanoseconds: one row a cycle, the start and the end of each stage."""

    def __init__(self):
        self.rows = []

    def add(self, stamps):
        """Take one cycle's stamps (list of ints)."""
        self.rows.append(stamps)

    def series(self):
        """{name: [ms a cycle]} of every stage, `cycle` (first to last stamp) and `gap` (idle before the next cycle)."""
        found = {name: [(r[i + 1] - r[i]) / 1e6 for r in self.rows] for i, name in enumerate(Cycle.stages)}
        found["cycle"] = [(r[-1] - r[0]) / 1e6 for r in self.rows]
        found["gap"] = [(b[0] - a[-1]) / 1e6 for a, b in zip(self.rows, self.rows[1:], strict=False)]
        return found

    def medians(self):
        """{name: median ms}, None where nothing was measured."""
        return {name: statistics.median(values) if values else None for name, values in self.series().items()}
