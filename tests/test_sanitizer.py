"""compute-sanitizer over whole cycles at toy sizes: no access out of bounds, no race in shared memory. Needs a GPU.

What racecheck cannot follow, and how such a report is refuted rather than ignored: hazards.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import hazards
import pytest

from kernels import native

ROOT = Path(__file__).parents[1]
MOST_HAZARDS = 500_000_000  # that racecheck looks at; what comes behind its own 10 million would not be reported


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("program", ["cycles", "native"])
def test_launches_are_clean(toys, program, tool, tmp_path):
    """Kills reads and writes past the page table, the trees or the experts' padding, and missing barriers."""
    assert shutil.which("compute-sanitizer"), "compute-sanitizer is not on the PATH; it comes with CUDA"
    if program == "cycles":
        script = ["sanitized.py", toys.history(), toys.random_draft()]
    else:
        script = ["sanitized_native.py"]
    script[0] = str(ROOT / "tests" / script[0])
    command = ["compute-sanitizer", "--tool", tool, "--demangle", "no", "--error-exitcode", "9", sys.executable]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": str(MOST_HAZARDS),
    }
    done = subprocess.run([*command, *map(str, script)], capture_output=True, text=True, env=environment)
    if tool == "racecheck" and done.returncode == 9:
        found = hazards.races(done.stdout)
        shown = re.search(r"RACECHECK SUMMARY: (\d+) hazards? displayed", done.stdout)
        assert shown and len(found) == int(shown[1]), done.stdout[-4000:]
        assert sum(race.hazards for race in found) < MOST_HAZARDS
        left = hazards.left(done.stdout, hazards.machine_code(native.build(), tmp_path))
        assert not left, "\n".join(left)
        return
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout, done.stdout[-2000:]
