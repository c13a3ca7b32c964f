"""compute-sanitizer over whole cycles at toy sizes: no access out of bounds, no race in shared memory. Needs a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("program", ["cycles", "native"])
def test_launches_are_clean(toys, program, tool):
    """Kills reads and writes past the page table, the trees or the experts' padding, and missing barriers."""
    assert shutil.which("compute-sanitizer"), "compute-sanitizer is not on the PATH; it comes with CUDA"
    if program == "cycles":
        script = ["sanitized.py", toys.history(), toys.random_draft()]
    else:
        script = ["sanitized_native.py"]
    script[0] = str(ROOT / "tests" / script[0])
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, *map(str, script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout, done.stdout[-2000:]
