"""Text as it comes: stop strings at every offset of a run (B27), caps (B28), characters split inside and across cycles
(B30); and whatever ends a request early, at any line, leaves the engine as it was."""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from test_text import saved
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toys import NEXT, V, cycle_of, follow, pair

from engine import Engine, Refused, Sampling, Shape
from engine.decoding import InOrder, Typewriter
from engine.generate import main
from engine.prompts import Prompt
from engine.text import HALF

ROOT = Path(__file__).parents[1]

CHAINS = [Shape(k, 1, k + 1) for k in range(1, 8)]
TREES = [Shape(k, 2, min(2 * k + 2, 3 + (k - 1) * 4)) for k in range(1, 8)]
PLAIN, CHAIN = Shape(0, 1, 1), Shape(3, 1, 4)
pytestmark = pytest.mark.usefixtures("nan_memory")

TALE = "aaab aab, baaac; aabaab."  # one token a character, each its own, so that the MAP ring spells it
BYTES = [*"é漢字🙂e\u0301".encode(), 0xFF, *b"xyz ~"]
WORDS = "▁the C3 A9 ▁cat E6 BC A2 E5 AD 97 s F0 9F 99 82 ▁x FF ▁y CC 81 ▁ z".split()


def characters():
    """Tokenizer and ring: token i is the i-th character of TALE, told apart by a mark that decoding drops."""
    names = [f"{letter}#{i}" for i, letter in enumerate(TALE)] + [f"?#{i}" for i in range(len(TALE), V)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[-1]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("#[0-9]+"), ""), decoders.Fuse()])
    return tokenizer, range(len(TALE))


def byte_level():
    """Every token a byte of its own, GPT-2's way; one byte is no character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {b: chr(b) for b in printable}
    shown |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    assert sorted(shown.values(), key=ord) == alphabet
    others = [b for b in range(48, 256) if b not in BYTES][: V - len(BYTES)]
    tokenizer = Tokenizer(models.BPE({shown[b]: i for i, b in enumerate(BYTES + others)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, range(len(BYTES))


def byte_fallback():
    """Words, and bytes where no word is; one byte is no character."""
    names = [f"<0x{word}>" if len(word) == 2 and word.isupper() or word[0].isdigit() else word for word in WORDS]
    others = [f"<0x{b:02X}>" for b in range(0x21, 0x7F) if f"<0x{b:02X}>" not in names][: V - len(names)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names + others)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, range(len(names))


class Speaker:
    """An engine whose MAP target spells its ring over and over, and the text of any of its ids."""

    def __init__(self, toys, make):
        tokenizer, ring = make()
        self.after = cycle_of(list(ring))
        target = toys.altered(toys.map(self.after), lambda config, tensors: None)
        self.text = saved(tokenizer, target)
        self.engine = pair(target, toys.map_draft(self.after))

    def expect(self, start, stops, cap):
        """(ids, text, stop) by decoding every beginning of what is spelled after token `start`."""
        ids = follow(start, cap, self.after)
        for count in range(1, cap + 1):
            whole = self.text.decode(ids[:count])
            found = [(whole.find(stop), -len(stop), stop) for stop in stops if stop in whole]
            if found:
                at, _, stop = min(found)
                return ids[:count], whole[:at], stop
        return ids, self.text.decode(ids), None


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=lambda make: make.__name__)
def speaker(request, toys):
    return Speaker(toys, request.param)


@pytest.fixture(scope="module")
def characters_speaker(toys):
    return Speaker(toys, characters)


def ends(speaker, cases, shape, cap):
    """Run cases (start, stops), four at once and the first alone as a stream; all as it should be."""
    sampling = [Sampling(max_new_tokens=cap, stop=stops, logprobs=0) for _, stops in cases]
    results = speaker.engine.generate([[start] for start, _ in cases], sampling, shape=shape)
    for (start, stops), result in zip(cases, results, strict=True):
        ids, text, stop = speaker.expect(start, stops, cap)
        assert (result.token_ids, result.text, result.stop) == (ids, text, stop), (start, stops)
        assert result.finish_reason == ("length" if stop is None else "stop")
        assert result.stats["output_tokens"] == len(ids) == len(result.logprobs)
        assert sum(result.stats["emitted_per_cycle"]) == len(ids) - 1
        assert [entry["token_id"] for entry in result.logprobs] == ids
    events = list(speaker.engine.stream([cases[0][0]], sampling[0], shape=shape, details=False))
    assert "".join(e.text for e in events) == results[0].text
    assert [t for e in events for t in e.tokens] == results[0].token_ids
    assert [len(e.logprobs) for e in events] == [len(e.tokens) for e in events]
    assert speaker.engine.pool.free == speaker.engine.pool.size


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS, *TREES], ids=str)
def test_stop_strings_at_every_offset_of_a_run(characters_speaker, shape):
    """B27: strings of 1, 2 and 5 characters that begin at every place of two runs and of the border between them, four
    at once. Mutants: only the run's end looked at; text cut but ids or log-probabilities not; a window too short for a
    string that began in the cycle before."""
    at_every_offset(characters_speaker, shape)


@pytest.mark.parametrize("shape", [PLAIN, CHAINS[1], CHAINS[4], TREES[2]], ids=str)
def test_stop_strings_among_split_characters(speaker, shape):
    """The same where a token is a part of a character. Mutant: characters of the text counted as tokens."""
    at_every_offset(speaker, shape)


def at_every_offset(speaker, shape):
    reach = 2 * shape.path + 1 if shape in CHAINS else shape.path + 1
    spoken = speaker.text.decode(follow(0, 3 * reach + 20, speaker.after))
    cases = [(0, [spoken[at : at + size], "never"]) for size in (1, 2, 5) for at in range(reach)]
    cases = [case for case in cases if HALF not in case[1][0]]
    stride = 1 if shape in (CHAINS[0], CHAINS[2], CHAINS[6], TREES[2]) else 3
    for at in range(0, len(cases), 4 * stride):
        ends(speaker, cases[at : at + 4], shape, 3 * reach + 8)


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS, *TREES[::3]], ids=str)
def test_stop_strings_that_overlap_themselves(characters_speaker, shape):
    """ "aab" in "aaab", "aabaab" in what begins like it, one that ends inside another. Mutant: after a mismatch the
    search goes on past the string's second chance."""
    starts = [len(TALE) - 1, 0, 4, 8]
    for stops in (["aab"], ["aabaab"], ["baaac", "aaac"], ["b aa", "aab"], ["aa", "aaa"]):
        ends(characters_speaker, [(start, stops) for start in starts], shape, 40)


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS[:5], TREES[2]], ids=str)
def test_characters_are_never_shown_in_halves(speaker, shape):
    """B30: at every cap and start, so that characters split inside and across cycles, at the end and with a stop string
    pending; the pieces join to the decode of all ids. Mutants: bytes decoded cycle by cycle; the last bytes lost at the
    end; held text overtaken by text that came later."""
    engine, ring = speaker.engine, (0, 7, 14)
    for start in ring:
        for stop in ((), ("🙃", "e\u0301!", "漢漢")):
            for cap in (5, 23):
                sampling = Sampling(max_new_tokens=cap, stop=stop)
                events = list(engine.stream([start], sampling, shape=shape, details=False))
                ids = follow(start, cap, speaker.after)
                pieces, whole = [e.text for e in events], speaker.text.decode(ids)
                assert "".join(pieces) == whole
                assert sum(p.count(HALF) for p in pieces) == whole.count(HALF)
                assert [t for e in events for t in e.tokens] == ids


@pytest.mark.parametrize("shape", [PLAIN, *CHAINS, *TREES], ids=str)
def test_caps_with_text(characters_speaker, shape):
    """B28: four caps at once, and one string that is completed by the very token of the cap: it wins. Mutants: the text
    or the log-probabilities of a run that the cap cut; "length" where a stop came in the same place."""
    speaker = characters_speaker
    caps = [0, 1, shape.path, shape.path + 1, shape.path + 2, 2 * shape.path + 1, 20, 7]
    samplings = [Sampling(max_new_tokens=cap, logprobs=1) for cap in caps]
    for result, cap in zip(speaker.engine.generate([[3]] * len(caps), samplings, shape=shape), caps, strict=True):
        ids = follow(3, cap, speaker.after)
        assert (result.token_ids, result.text) == (ids, speaker.text.decode(ids))
        assert len(result.logprobs) == result.stats["output_tokens"] == cap and result.finish_reason == "length"
    for cap in range(3, 12):
        ids, _, _ = speaker.expect(3, ["never"], cap)
        last = speaker.text.decode(ids)[-2:]
        if last not in speaker.text.decode(ids)[:-1]:
            ends(speaker, [(3, [last])], shape, cap)


# ------------------------------------------------------------------ early ends


def pages_add_up(engine):
    """Every page is in one place: free, or in a cached block that nobody holds."""
    pool = engine.pool
    cached = [page for block in pool._blocks.values() for page in block.pages]
    assert sorted([*pool._free, *cached]) == list(range(1, pool.size + 1))
    assert not any(block.users for block in pool._blocks.values()) and not pool._held
    assert pool.free == pool.size
    state = [s for s in engine.programs.states.values()]
    assert all(s.table.eq(0).all() and s.done.eq(1).all() for s in state)


def serves(engine, after=NEXT):
    pages_add_up(engine)
    assert engine.generate([3, 9], Sampling(max_new_tokens=9), shape=CHAIN).token_ids == follow(9, 9, after)


HOST = tuple(f"engine/{name}.py" for name in ("session", "cache", "engine", "asking", "request"))


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in the given files, once."""

    def __init__(self, at, files=HOST):
        self.left, self.files = at, files

    def _line(self, frame, event, _):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line if self.left > 0 else None

    def __call__(self, frame, event, _):
        return self._line if frame.f_code.co_filename.endswith(self.files) else None

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)

    def __exit__(self, *args):
        sys.settrace(self.before)


def test_ctrl_c_at_any_line_leaves_the_engine_usable(toys):
    """Three prompts that share a beginning, in two slots, interrupted at one line after another of the host's code.
    Mutants: pages lost between pool and request; a flag that says busy for ever; a slot that stays seated; a block
    counted as held by a request that is gone."""
    engine = pair(toys.map(), toys.map_draft(), page_size=2, prefill_chunk=4, max_batch=2, pages=60)
    prompts = [follow(5, 10, NEXT) + [7], follow(5, 10, NEXT), follow(5, 10, NEXT) + [9, 8]]

    def run():
        engine.pool.forget()
        return engine.generate(prompts, Sampling(max_new_tokens=6), shape=CHAIN)

    run()
    count = Interrupt(10**9)
    with count:
        run()
    lines = 10**9 - count.left
    assert lines > 300
    interrupted = 0
    for at in range(1, lines, max(1, lines // 80)):
        with contextlib.suppress(KeyboardInterrupt), Interrupt(at):
            run()
            interrupted -= 1
        interrupted += 1
        serves(engine)
    assert interrupted > 70


def test_an_exception_in_the_loop_of_a_caller(toys):
    """B13: at every event of one and of four requests. Mutant: pages given back by the slot's next request only."""
    engine = pair(toys.map(), toys.map_draft())
    for number in range(7):
        with pytest.raises(KeyError):
            for at, _ in enumerate(engine.stream([9], Sampling(max_new_tokens=40), shape=CHAIN)):
                if at == number:
                    raise KeyError("the caller's own")
        serves(engine)
        with pytest.raises(KeyError):
            for at, _ in enumerate(engine.stream_all([[i] for i in range(6)], [Sampling(max_new_tokens=9)] * 6)):
                if at == number:
                    raise KeyError("the caller's own")
        serves(engine)


def test_a_dropped_stream_is_no_stream(toys):
    """A generator that nobody holds any more, one in a cycle of references, one never begun. Mutants: the engine keeps
    the events alive itself; a busy flag set before the first event."""
    engine = pair(toys.map(), toys.map_draft())
    for steps in range(4):
        events = engine.stream([9], Sampling(max_new_tokens=40), shape=CHAIN)
        for _ in range(steps):
            next(events)
        if steps:
            with pytest.raises(Refused, match="in progress"):
                engine.generate([9])
            with pytest.raises(Refused, match="in progress"):
                engine.score([9, 8])
        del events
        serves(engine)
    loop = [engine.stream([9], Sampling(max_new_tokens=40), shape=CHAIN)]
    loop.append(loop)
    next(loop[0])
    del loop
    gc.collect()
    serves(engine)


def test_a_failure_in_a_pass_frees_everything(toys):
    """The device's own error, in prefill and in a cycle. Mutant: only the caller's exceptions are cleaned up after."""
    engine = pair(toys.map(), toys.map_draft())
    forward, calls, fail_at = engine.target.forward, [], [0]

    def failing(*args):
        calls.append(1)
        if len(calls) == fail_at[0]:
            raise RuntimeError("out of memory")
        return forward(*args)

    for fail_at[0] in range(1, 6):
        calls.clear()
        engine.target.forward = failing
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([[9], [8], [7]], Sampling(max_new_tokens=30), shape=CHAIN)
        engine.target.forward = forward
        serves(engine)


# ------------------------------------------------------------------ the command line


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


def test_ctrl_c_while_libraries_are_imported(attended):
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
        sys.argv = ["generate", "--device", "cpu", "x"]
        runpy.run_module("engine.generate", run_name="__main__", alter_sys=True)
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: interrupted\n")


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
