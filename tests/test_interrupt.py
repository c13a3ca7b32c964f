"""Ctrl-C of every command, wherever it comes: one line, exit code 1, what has come on stdout."""

import ast
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from test_help import COMMANDS, FILES
from test_streaming import TALE, characters
from test_text import saved
from toys import cycle_of, follow

from engine import Engine
from engine.decoding import InOrder, Typewriter
from engine.generate import main
from engine.prompts import Prompt

pytestmark = pytest.mark.usefixtures("nan_memory")


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("batch", [1, 2])
def test_ctrl_c_on_the_command_line(toys, batch, capsys, monkeypatch, tmp_path):
    """What has come is on stdout, ended by a line's end, the reason on stderr, exit code 1. Mutants: held texts of a
    batch lost; a traceback."""
    target = toys.altered(toys.map(cycle_of(range(len(TALE)))), lambda config, tensors: None)
    text = saved(characters()[0], target)
    writer = (Typewriter, InOrder)[batch - 1]
    show, shown = writer.show, []

    def interrupted(self, event):
        show(self, event)
        shown.append(event.text)
        if len(shown) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer, "show", interrupted)
    file = tmp_path / "ids.jsonl"
    file.write_text('{"token_ids": [0]}\n{"token_ids": [4]}\n')
    argv = ["--prompt-file", str(file), "--target", target, "--device", "cpu", "--max-context", "64"]
    assert main([*argv, "--batch", str(batch), "--max-new-tokens", "30"]) == 1
    out, err = capsys.readouterr()
    after = cycle_of(range(len(TALE)))
    come = [(0, 5)] if batch == 1 else [(0, 3), (4, 2)]
    want = [text.decode(follow(start, count, after)) for start, count in come]
    assert out == "".join(line + "\n" for line in want)
    assert err.endswith("error: interrupted\n") and "Traceback" not in err


@pytest.fixture
def attended():
    """SIGINT as at a terminal, also where the tests are a shell's background job, for whom it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


class Mourned:
    """Ctrl-C comes while it is destroyed."""

    def __del__(self):
        ctrl_c()


def in_a_destructor():
    Mourned()


def in_a_weak_reference():
    thing = set()
    reference = weakref.ref(thing, lambda _: ctrl_c())
    del thing
    assert reference() is None


def in_a_callback():
    ctypes.CFUNCTYPE(None)(ctrl_c)()


@pytest.mark.usefixtures("attended")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", [ctrl_c, in_a_destructor, in_a_weak_reference, in_a_callback])
def test_ctrl_c_where_python_forgets_exceptions(toys, place, capsys, monkeypatch):
    """It ends the run after the cycle in which it comes, and before the first one where it came while loading. Mutants:
    Python's own handler; the flag not asked between cycles, or not before the first."""
    target = toys.altered(toys.map(cycle_of(range(len(TALE)))), lambda config, tensors: None)
    text = saved(characters()[0], target)
    argv = ["x", "--target", target, "--device", "cpu", "--max-context", "64", "--max-new-tokens", "30"]
    monkeypatch.setattr("engine.decoding.encode", lambda engine, prompt: [0])
    show, shown = Typewriter.show, []

    def showing(self, event):
        show(self, event)
        shown.append(event)
        if len(shown) == 5:
            place()

    monkeypatch.setattr(Typewriter, "show", showing)
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == text.decode(follow(0, 5, cycle_of(range(len(TALE))))) + "\n"
    assert err.endswith("error: interrupted\n") and "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    real = Engine.load
    monkeypatch.setattr(Engine, "load", lambda *args, **words: (real(*args, **words), place())[0])
    assert main(argv) == 1 and len(shown) == 5
    out, err = capsys.readouterr()
    assert not out and err.endswith("error: interrupted\n")


@pytest.mark.usefixtures("attended")
@pytest.mark.parametrize("place", [ctrl_c, in_a_destructor, in_a_weak_reference, in_a_callback])
@pytest.mark.parametrize("name", ["diagnose", "dump", "train", "chain", "auto", "demo"])
def test_ctrl_c_ends_every_command(name, place, capsys, monkeypatch):
    """While it loads, wherever it comes. Mutants: Python's own handler; what is forgotten stays so; a command without
    the common entry."""
    module = importlib.import_module(f"{'engine' if name in ('diagnose', 'dump', 'train') else 'bench'}.{name}")
    hook = sys.unraisablehook

    def loads(*_):
        place()
        for _ in range(1000):
            time.sleep(0.01)
        raise AssertionError("it was forgotten")

    monkeypatch.setattr(module, "parse", loads)
    assert module.main([]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: interrupted") and err.count("\n") == 1
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == (signal.default_int_handler, hook)


def test_ctrl_c_that_nobody_waits_for(toys, capsys, monkeypatch, attended):
    """A background job goes on. Mutant: the handler put in where SIGINT is ignored."""
    monkeypatch.setattr(Typewriter, "show", lambda self, event: ctrl_c())
    argv = ["--prompt-file", "ids.jsonl", "--target", toys.map(), "--device", "cpu", "--max-context", "64"]
    monkeypatch.setattr("engine.prompts.read", lambda path: [Prompt([0], "")])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert main([*argv, "--max-new-tokens", "5"]) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_second_ctrl_c_ends_at_once(attended):
    """Whatever the first one waits for. Mutant: it waits too."""
    script = """if True:
        import runpy, signal
        Interruptions = runpy.run_path("engine/interrupt.py")["Interruptions"]
        with Interruptions() as stop:
            for number in stop.between(iter(range(2))):
                print(number, flush=True)
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                print("not here")
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "0\n", "")


@pytest.mark.parametrize("name", ["engine.generate", "engine.train", "bench.accept"])
def test_ctrl_c_while_libraries_are_imported(name, attended):
    """Torch's import forgets it, as its import of numpy does. Mutants: a handler that comes after the imports, or that
    raises among them."""
    script = """if True:
        import runpy, signal, sys

        class Forgetting:
            def find_spec(self, name, *_):
                try:
                    if name == "torch":
                        signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:
                    print("raised")

        sys.meta_path.insert(0, Forgetting())
        sys.argv = [sys.argv[1], "--device", "cpu", "x"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    """
    done = subprocess.run([sys.executable, "-c", script, name], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: interrupted\n")


@pytest.mark.parametrize("path", FILES, ids=COMMANDS)
def test_every_command_takes_ctrl_c_before_its_imports(path):
    """Above the line that starts it there are only the standard library and what that line calls. Mutants: torch
    imported above it; a command that starts otherwise."""
    if path.stem == "generate":
        return  # it imports nothing else
    body = ast.parse(path.read_text()).body
    at = next(number for number, node in enumerate(body) if isinstance(node, ast.If))
    assert ast.unparse(body[at].body[0]) == "sys.exit(interrupt.start(__spec__.name))"
    for node in body[1:at]:
        name = getattr(node, "module", None) or node.names[0].name
        assert name.split(".")[0] in sys.stdlib_module_names or [a.name for a in node.names] == ["interrupt"], name


def test_ctrl_c_in_a_text_that_is_executed(tmp_path, attended):
    """As dataclasses execute theirs while modules load. Mutant: Python's own end by SIGINT in place of the code."""
    (tmp_path / "run.py").write_text("""if True:
        import signal, sys, types
        from engine import generate

        command = lambda argv, stop: exec("signal.raise_signal(signal.SIGINT)")
        sys.modules["engine.decoding"] = types.SimpleNamespace(command=command)
        sys.exit(generate.main([]))
    """)
    argv, paths = [sys.executable, "-m", "run"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=paths, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: interrupted\n")


@pytest.mark.timeout(120)
def test_ctrl_c_to_a_process(toys, tmp_path, attended):
    """The real signal while text streams. Mutant: an exit code of a signal's death, or a traceback."""
    after = cycle_of(range(len(TALE)))
    target = toys.altered(toys.map(after), lambda config, tensors: config.update(max_position_embeddings=100000))
    saved(characters()[0], target)
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [0]}')
    argv = [sys.executable, "-m", "engine.generate", "--prompt-file", str(tmp_path / "ids.jsonl")]
    argv += ["--target", target, "--device", "cpu"]
    argv += ["--max-context", "60000", "--max-new-tokens", "50000", "--page-size", "512"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and first and out.endswith("\n"), (first, err)
    assert err.endswith("error: interrupted\n") and "Traceback" not in err


def children(pid):
    """Ids of the processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.timeout(120)
def test_ctrl_c_while_ranks_import(attended):
    """As a terminal sends it, to all processes. Mutant: ranks that print where they were."""
    argv = [sys.executable, "-m", "bench.lockstep", "--device", "cpu"]
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(argv, cwd=ROOT, **words)
    while len(children(process.pid)) < 3 and process.poll() is None:  # two ranks and what sweeps up behind them
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "", "error: interrupted\n")
