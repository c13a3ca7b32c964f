"""What every bench command writes: one JSON document of a run, its figures with their spread, whole or not at all."""

import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.tp import environment as nccl
from engine.tp import launched
from weights.config import Refused

from .command import Failed

ROOT = Path(__file__).parents[1]
FORMAT = 1  # of the documents; a change of their keys or of what a figure means takes the next number


@dataclass(frozen=True)
class Workload:
    """What was run. target, draft: directory in the repository, hub id, or name of random weights; tp_slice: the size
    whose one rank's share was run, None where the whole model was; context: positions a request may have; routing: how
    rows came to their experts ("text", "random ids", …); prompts_hash: of `prompts_hash`."""

    target: str
    draft: str | None
    layers: int
    tp: int
    tp_slice: int | None
    context: int
    batch: int | list[int]
    dtype: str
    routing: str
    prompts_hash: str


@dataclass(frozen=True)
class Figure:
    """One measured quantity: `value` is the median of `repeats`, p10 and p90 their spread (None where there is one).

    floor: what the hardware would allow, in the same unit; fraction: how much of that is reached, 1 at the floor.
    experts: different experts that the rows were routed to, a mean per layer; None where they were not counted.
    """

    name: str
    unit: str
    value: float
    p10: float | None
    p90: float | None
    repeats: list[float]
    floor: float | None = None
    fraction: float | None = None
    experts: float | None = None
    note: str | None = None

    @classmethod
    def of(cls, name, unit, repeats: float | Iterable[float], *, floor=None, experts=None, note=None) -> "Figure":
        """From one number, or one a repeat. The unit says what is better: a rate ("…/s") grows, anything else with a
        floor shrinks."""
        several = [float(repeats)] if isinstance(repeats, int | float) else [float(x) for x in repeats]
        value, fraction = statistics.median(several), None
        if floor is not None:
            fraction = value / floor if unit.endswith("/s") else floor / value
        p10, p90 = (quantile(several, 0.1), quantile(several, 0.9)) if len(several) > 1 else (None, None)
        return cls(name, unit, value, p10, p90, several, floor, fraction, experts, note)

    def line(self) -> str:
        """For a person."""
        spread = "" if self.p10 is None else f"  ({self.p10:.4g} to {self.p90:.4g}, {len(self.repeats)} repeats)"
        reached = "" if self.fraction is None else f"  {100 * self.fraction:.0f} % of {self.floor:.4g}"
        return f"{self.name:28} {self.value:10.4g} {self.unit}{spread}{reached}{f'  {self.note}' if self.note else ''}"


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the order statistics."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def prompts_hash(prompts: list[list[int]]) -> str:
    """First 16 hex digits of the SHA-256 of the prompts' token ids."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def environment(device: torch.device, dtype: torch.dtype, tp: int = 1) -> dict:
    """The machine and the libraries; load_average: the machine's over the last minute, at this moment."""
    return {
        "format": FORMAT,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": importlib.metadata.version("triton"),
        "tp": tp,
        "dtype": str(dtype).removeprefix("torch."),
        **nccl(),
    }


def _processor() -> str:
    """The CPU's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*words: str) -> str | None:
    """What git says of this repository, None outside a checkout."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def document(command: str, environment: dict, workload: Workload, figures: list[Figure]) -> dict:
    """The run as JSON. dirty: files of the checkout, kept results left out, differ from the commit or are not in it."""
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return {
        "command": command,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": environment,
        "workload": asdict(workload),
        "figures": [asdict(figure) for figure in figures],
    }


def writable(path: str | None) -> None:
    """Raises Refused where `write` could not, before a long run."""
    if path is None:
        return
    if Path(path).exists() and not Path(path).is_file() or not Path(path).absolute().parent.is_dir():
        raise Refused(f"--json {path}: supported: a file in an existing directory")
    try:
        with tempfile.TemporaryFile(dir=Path(path).absolute().parent):
            pass
    except OSError as error:
        raise Refused(
            f"--json {path}: {error.strerror} in its directory; supported: one where files can be made"
        ) from None


def write(path: str | Path, run: dict) -> None:
    """Write a document, on rank 0; a run killed here leaves the old file whole. Lists of numbers stay on one line.
    Where the disk refuses it, it is kept where temporary files go, and Failed says so."""
    if launched() is not None and launched()[0]:
        return
    path, text = Path(path), {key: json.dumps(value, allow_nan=False) for key, value in run.items()}
    text["figures"] = "[\n  " + ",\n  ".join(json.dumps(f, allow_nan=False) for f in run["figures"]) + "\n ]"
    part = path.with_name(path.name + ".part")
    lines = ",\n".join(f" {json.dumps(key)}: {value}" for key, value in text.items())
    try:
        part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        kept = Path(tempfile.mkdtemp(prefix="bench-"), path.name)
        kept.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        raise Failed(f"--json {path}: {error.strerror}; the run is kept in {kept}") from None
