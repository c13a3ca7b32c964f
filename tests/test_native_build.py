"""The CUDA C++ library is compiled once and found again; without a compiler there is one line that says so; what it
learns of the order of operations. No GPU."""

import pytest
import torch

from kernels import native

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "$VERSION"; exit 0; fi
while [ "$1" != -o ]; do shift; done
if [ -n "$BROKEN" ]; then echo "x.cuh(3): error: a missing semicolon" >&2; exit 1; fi
echo library > "$2"
echo run >> {log}
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that writes down its runs; -> the file of them."""
    log, nvcc = tmp_path / "log", tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(COMPILER.format(log=log))
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}:/usr/bin:/bin")
    monkeypatch.setenv("VERSION", "13.0")
    return log


def test_compiled_once(compiler, tmp_path, monkeypatch):
    """Mutants: compiled at every start; a library of another compiler's found; silence while it compiles."""
    said, place = [], tmp_path / "kept"
    first = native.build(place, said.append)
    assert native.build(place, said.append) == first and first.read_text() == "library\n"
    assert compiler.read_text() == "run\n" and len(said) == 1
    monkeypatch.setenv("VERSION", "13.1")
    assert native.build(place) != first
    assert sorted(path.name for path in place.iterdir()) == sorted({first.name, native.build(place).name})


def test_one_line_where_it_cannot_be(compiler, tmp_path, monkeypatch):
    """No compiler, one that fails, nowhere to keep the library, no home. Mutants: the compiler's whole output; a
    traceback."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(native.Unavailable, match=r"could not compile csrc: .*semicolon"):
        native.build(tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())
    monkeypatch.delenv("BROKEN")
    with pytest.raises(native.Unavailable, match="file"):
        native.build(tmp_path / "file")
    monkeypatch.setattr(native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.raises(native.Unavailable, match="no home"):
        native.build()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.Unavailable, match="not on the PATH"):
        native.build(tmp_path / "kept")


def test_what_follows_experts_is_learnt():
    """Mutants: weights that are gone are kept alive, or named all the same; what comes two operations later."""
    library = native.Library.__new__(native.Library)
    library.behind, library.following = None, {}
    first, second, third = (torch.zeros(4) for _ in range(3))
    library.follows(first)
    assert library.following == {}
    library.behind = 7
    library.follows(second)
    library.follows(third)
    assert library.following[7]() is second and library.behind is None
    library.behind = 7
    library.follows(third)
    del third
    assert library.following[7]() is None
