"""What every test shares: `gpu` needs a CUDA device, `interpreter` a run of its own; torch keeps to one thread."""

import json
import os
import platform

if os.environ.get("TRITON_INTERPRET") == "1" and platform.machine() in ("x86_64", "AMD64"):
    # Interpreted products are NumPy's. On CPUs without AVX-512 its OpenBLAS rounds a row by where it lies among others,
    # which law 1 rules out for the kernels themselves; its SSE code does not, and is read when NumPy is imported.
    os.environ.setdefault("OPENBLAS_CORETYPE", "Nehalem")

import pytest
import torch
from toys import Toys

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compile.py"] if INTERPRETING else []  # interpreted functions cannot be compiled


def pytest_collection_modifyitems(config, items):
    """Skip `gpu` tests without a GPU; leave `interpreter` tests out unless Triton interprets (it decides at import)."""
    elsewhere = [item for item in items if item.get_closest_marker("interpreter") and not INTERPRETING]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)  # toys are so small that a second thread mostly waits


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """The toy checkpoints, written once a run."""
    return Toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture
def nan_memory():
    """Memory that nobody has written yet holds NaN (integers: their greatest value)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """Toy checkpoints that a file of tests may add to."""
    return Toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def pair(kit):
    """MAP target with a tokenizer, and its always-right draft."""
    from served import SMALL, spell  # transformers takes a while to import

    target = kit.map()
    spell(target)
    return ["--target", target, "--draft", kit.map_draft(), *SMALL]


@pytest.fixture
def cli(capsys, tmp_path):
    """Runs the command; gives exit code, stdout, stderr and the statistics (None where none were written)."""

    from engine.generate import main

    def run(*argv):
        stats = tmp_path / "stats.json"
        code = main([*map(str, argv), *([] if "--stats" in argv else ["--stats", str(stats)])])
        out, err = capsys.readouterr()
        return code, out, err, json.loads(stats.read_text()) if stats.exists() else None

    return run
