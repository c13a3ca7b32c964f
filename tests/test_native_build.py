"""The CUDA C++ library is compiled once and found again; without a compiler there is one line that says so. No GPU."""

import pytest

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
