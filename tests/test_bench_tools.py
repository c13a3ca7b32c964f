"""The page of `bench.report`, and what the smaller bench commands say of the demo pair and of packed experts."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from packers import FP8
from toys import target_config

from bench import accept, chain, classes, experts, ops, reading, recorder, report, results
from bench.oracle import random_prompt
from bench.results import Figure, Workload
from engine import Engine, Shape
from engine.options import DEMO
from engine.train_head import hits
from kernels import REFERENCE, Ops

LOAD = Workload("t<b>", "d", 7, 1, None, 512, 1, "float32", "text; SYNTHETIC acceptance, 2 tokens a cycle", "0")


def kept(path):
    """A run with something for every plot."""
    made = Figure.of
    figures = [made("plain", "ms", [10.0, 11.0]), made("tokens_per_second.0-1-1", "tokens/s", [90.0, 91.0])]
    for n in (1, 2, 4, 8):
        figures.append(made(f"verify.{n}", "ms", [10.0 + n, 11.0 + n], floor=2.0, experts=2.0 + n))
        figures.append(made(f"verify_fit.residual.{n}", "ms", 0.1))
    for shape, gain in (("3-1-4", 1.2), ("4-4-16", 0.7)):
        for name, value in (("draft", 2.0), ("verify", 14.0), ("accept", 0.3), ("commit", 0.1), ("gap", 0.2)):
            figures.append(made(f"{name}.{shape}", "ms", value))
        for name, value in (("cycle", 17.0), ("predicted_cycle", 16.5)):
            figures.append(made(f"{name}.{shape}", "ms", [value, value + 1]))
        figures.append(made(f"tokens_per_second.{shape}", "tokens/s", [90 * gain, 91 * gain]))
        figures += [made(f"accept_rate.{shape}.{d}", "share", 0.9 / d) for d in (1, 2, 3)]
        figures += [made(f"speedup.{shape}", "times plain", gain), made(f"class_rate.{shape}.name_part", "share", 0.4)]
    figures.append(made("recommended", "times plain", 1.2, note="recommended: 3-1-4 & more"))
    environment = {"format": results.FORMAT, "gpu": None, "cpu": "a processor"}
    results.write(path, results.document("python -m bench.x", environment, LOAD, figures))
    return str(path)


def test_the_page_holds_everything(tmp_path, capsys):
    """Mutants: pictures linked, not held; text not escaped; a plot left out; synthetic acceptance unlabelled; no
    viewport, which makes a phone show a page for desktops."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "page.html"
    assert report.main([kept(tmp_path / "a.json"), kept(tmp_path / "b.json"), "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count('src="data:image/png;base64,') == 12 == len(list(tmp_path.glob("page-*.png")))
    assert "http" not in page and "<script" not in page and 'name="viewport"' in page
    assert "t&lt;b&gt;" in page and "t<b>" not in page and "3\u20111\u20114 &amp; more" in page
    assert page.count("<b>Synthetic acceptance.</b>") == 2 and page.count("Verifying 4 rows takes") == 2
    for path in tmp_path.glob("page-*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_page_says_when_a_shape_changed(tmp_path):
    """Mutants: what chose itself left out of the bars; a made-up draft's figure without the word for it."""
    pytest.importorskip("matplotlib")
    from bench import plots

    made = [Figure.of(f"tokens_per_second.{way}", "tokens/s", 90.0) for way in ("0-1-1", "3-1-4", "auto")]
    when = "SYNTHETIC; of plain decoding's speed after 64 tokens; 2 changes: 3-1-4 from cycle 0, 0-1-1 from cycle 90"
    made += [
        Figure.of("auto_of_best", "share", 0.97, note="of the best fixed shape, 3-1-4; 2 shapes taken, mostly 3-1-4")
    ]
    made.append(Figure.of("good_then_bad", "share", 1.2, note=when))
    results.write(tmp_path / "run.json", results.document("x", {"gpu": None}, LOAD, made))
    run = reading.read(str(tmp_path / "run.json"))
    said = report.short(run)
    assert any("chooses itself reaches 0.970 of the best fixed shape" in line for line in said)
    assert any("(SYNTHETIC)" in line and "0-1-1 from cycle 90" in line and "1.200 of plain" in line for line in said)
    assert [bar.get_text() for bar in plots.speed(run).axes[0].get_yticklabels()] == ["3-1-4", "auto"]


def test_a_run_with_nothing_to_plot_is_a_table(tmp_path):
    """Mutant: an empty plot, or a crash, for figures that are not there."""
    pytest.importorskip("matplotlib")
    run = results.document("x", {"gpu": None}, LOAD, [Figure.of("load", "ms", 3.0)])
    results.write(tmp_path / "run.json", run)
    assert report.main([str(tmp_path / "run.json"), "--out", str(tmp_path / "page.html")]) == 0
    assert "All 1 figures" in (tmp_path / "page.html").read_text() and not list(tmp_path.glob("*.png"))


def test_what_a_report_refuses(tmp_path, capsys):
    (tmp_path / "old.json").write_text(json.dumps({"environment": {"format": 0}, "figures": []}))
    for argv, said in (
        ([str(tmp_path / "old.json")], "old.json: results of format 0"),
        (["nowhere.json"], "nowhere.json"),
        (["x.json", "--out", "nowhere/page.html"], "--out nowhere/page.html"),
    ):
        assert report.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and said in error


@pytest.fixture(scope="module")
def engine():
    return Engine.load(str(DEMO / "target"), str(DEMO / "draft"), device="cpu", max_batch=1)


def test_teacher_forcing_agrees_with_the_training_form(engine):
    """The engine's drafter and the head as it is trained are two programs for one arithmetic.

    Mutants: a row's later passes see another row's; positions off by one; compared with the text, not the target."""
    from bench.demo import Head, boundaries, load_target, open_draft, open_target
    from engine.forced import Teacher, due, guesses
    from engine.loading import Options
    from weights import Checkpoint

    options = Options(target=str(DEMO / "target"), draft=str(DEMO / "draft"))
    opened, config = open_target(options), open_draft(options).config
    device = torch.device("cpu")
    target = load_target(opened, boundaries(config, opened.config.layers), 256, device)
    checkpoint = Checkpoint.open(DEMO / "draft")
    weights = {name: checkpoint.read(name, "cpu") for name in checkpoint.names()}
    head = Head(config, weights["d2t"] + torch.arange(config.draft_vocab), target, 256)
    head.load_state_dict(weights)

    ids = engine.encode(
        (DEMO / "train_target.py").name + " = import os\nclass A:\n    def f(self, x):\n        return x\n" * 4
    )
    ids = ids[:90]
    lesson = Teacher(target, 1, 192, device).lesson(torch.tensor([ids]), head.draft_ids)
    passed = Teacher(target, 1, 192, device).read(ids, 32)
    found = guesses(engine.drafter, ids, passed.features, 4, 1, device, torch.float32)[..., 0]
    wanted = passed.best[torch.arange(len(ids) - 4)[:, None] + torch.arange(1, 5)]
    assert torch.equal(passed.best, lesson.best[0]) and torch.equal(due(passed.best, 4), wanted)
    assert torch.equal(found == wanted, hits(head, lesson, 4)[0])


def test_classes_of_tokens():
    """Mutants: an indented word called white space; an underscore called punctuation."""
    texts = [" name", "name_", " 12", "\n    ", "):", "x=", "", " self._x"]
    classes = ["word", "name part", "digits", "white space", "punctuation", "other", "other", "other"]
    assert [accept.kind(text) for text in texts] == classes


def test_what_is_kept_of_each_class():
    """By hand: a cycle of three steps that kept two and missed a digit, one that kept all, one that missed at once, one
    of plain decoding. Mutants: the bonus token of a full path as a miss; the prompt's own token; what lies behind a
    miss."""
    words = {1: " a", 2: "7", 3: "(", 4: "  "}
    chain, plain = Shape(3, 1, 4), Shape(0, 1, 1)
    ids, cycles = [3, 1, 1, 2, 3, 1, 3, 4, 1, 4], [(3, 2, 3), (4, 3, 3), (1, 0, 3), (1, 0, 0)]
    result = SimpleNamespace(token_ids=ids, cycles=cycles, shapes=[chain, chain, chain, plain])
    found = classes.kept([result], lambda ids: words[ids[0]])
    assert found == {"word": (3, 4), "digits": (0, 1), "punctuation": (2, 2)}


def test_accept_says_what_it_measured(tmp_path, capsys):
    """Mutant: a class or a pass left out."""
    path = tmp_path / "run.json"
    assert accept.main(["--count", "1", "--window", "64", "--device", "cpu", "--json", str(path)]) == 0
    values = {f["name"]: f["value"] for f in json.loads(path.read_text())["figures"]}
    assert {"top1.1", "top1.4", "top4.1", "forced_accept_length.4-1-5", "outside_draft_vocabulary"} < set(values)
    assert all(values[f"top4.{j}"] >= values[f"top1.{j}"] > 0 for j in (1, 2, 3, 4)) and "top1.1.punctuation" in values
    for argv, said in (
        (["--steps", "0"], "--steps"),
        (["--draft", "none"], "--draft"),
        (["--topk", "9999"], "--topk 9999"),
    ):
        assert accept.main(argv) == 2
        assert said in capsys.readouterr().err


def test_packed_experts_are_timed(tmp_path, capsys):
    """Mutants: bytes counted unpacked, or of all experts; a share's width taken for the whole."""
    path, sizes = tmp_path / "run.json", {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}
    (tmp_path / "some.json").write_text(json.dumps({"target": target_config(3, **sizes, quantization_config=FP8)}))
    given = ["--random", str(tmp_path / "some.json"), "--device", "cpu", "--layers", "2", "--repeats", "2"]
    assert experts.main([*given, "--tp-slice", "2", "--rows", "1", "8", "--json", str(path)]) == 0
    run = json.loads(path.read_text())
    figures = {f["name"]: f for f in run["figures"]}
    one = figures["experts_fp8.256x128-16.1.reference"]
    assert one["experts"] == 2 and run["workload"]["tp_slice"] == 2
    assert f"{(2 * 3 * (256 * 128 + 4 * 2) + 2 * 4 * 256) / 1e6:.4g} MB packed" in one["note"]
    assert 2 < figures["experts_fp8.256x128-16.8.reference"]["experts"] <= 16
    for argv, said in (
        (["--random", "qwen3-30b-a3b"], "plain"),
        ([*given, "--tp-slice", "4"], "sizes that work: 1, 2"),
    ):
        assert experts.main(["--device", "cpu", *argv]) == 2
        assert said in capsys.readouterr().err


def test_every_operation_is_timed():
    """Mutants: a field that no cycle calls is skipped in silence; what a call changes is not put back."""
    o = ops.parse(["--small", "--device", "cpu", "--shapes", "3-1-4", "2-2-5", "--context", "24", "--repeats", "1"])
    engine, recorder = ops.load(o)
    ops.record(o, engine, recorder, random_prompt(24, 6144))
    elsewhere = {f.name for f in dataclasses.fields(Ops) if f.name.startswith(("experts_", "mla_", "moe_"))}
    assert {field for field, _ in recorder.calls} == {f.name for f in dataclasses.fields(Ops)} - elsewhere
    layers = [
        calls for (field, sizes), calls in recorder.calls.items() if field == "experts" and sizes.startswith("4x")
    ]
    assert len({call.args[3].data_ptr() for call in layers[0]}) == 7  # one layer's weights after the other's
    (follow,) = [calls for (field, sizes), calls in recorder.calls.items() if field == "follow" and "1x4" in sizes]
    backlog = follow[0].args[4].clone()
    for _ in range(2):
        assert len(ops.timed(REFERENCE.follow, follow, 3, torch.device("cpu"))) == 3
    assert int(follow[0].args[4]) <= int(backlog) + 4


def test_chains_of_layers(tmp_path, capsys, monkeypatch):
    """Mutants: rows that do not pass on from layer to layer; experts of one layer counted for all; a piece's bytes
    without its cache rows, or all experts read; a share that is the whole; tables not of the context asked for."""
    (tmp_path / "toy.json").write_text(json.dumps({"target": target_config(layers=3)}))
    argv = f"--random {tmp_path}/toy.json --layers 3 --rows 1 4 --context 20 --repeats 2 --device cpu".split()
    assert chain.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    found = {f["name"]: f for f in json.loads((tmp_path / "out.json").read_text())["figures"]}
    assert set(found) == {"read_bandwidth"} | {f"{p}.{n}.engine" for p in ("attention", "mlp", "layer") for n in (1, 4)}
    assert "2.00 different experts" in found["mlp.1.engine"]["note"]
    engine = Engine.load(random=str(tmp_path / "toy.json"), device="cpu", max_context=64, max_batch=1)
    layer = engine.target.layers[0]
    expert = sum(t.nbytes // 8 for t in vars(layer.mlp.experts).values())
    other = 4 * (64 + 8 * 64)  # norm, router
    assert chain.nbytes(engine, "mlp", 2.0, 21) == other + 2 * expert
    own = 4 * (64 + (4 + 2 * 2) * 16 * 64 + 2 * 16 + 64 * 64)  # norm, projections in and out, head norms
    assert chain.nbytes(engine, "attention", 0.0, 21) == own + 21 * 2 * 2 * 16 * 4
    made, seen = chain.chain(engine, engine.target, 20, 2), []
    step = made.step(lambda layer, x: seen.append(x) or layer.mlp(x))
    for _ in range(2):
        for layer in engine.target.layers:
            step(layer)
    assert seen[0] is seen[3] is made.x and not torch.equal(seen[1], seen[0]) and torch.equal(seen[1], seen[4])
    assert chain.main([*argv, "--tp-slice", "2", "--json", str(tmp_path / "out.json")]) == 0
    share = json.loads((tmp_path / "out.json").read_text())
    assert share["workload"]["tp_slice"] == 2
    assert chain.main([*argv, "--rows", "65"]) == 2
    assert made.batch.pages.tolist() == [[1]]
    assert chain.chain(engine, engine.target, 63, 2, 5).batch.pages.tolist() == [[1, 2, 0, 0, 0]]
    monkeypatch.setattr(chain, "chain", lambda *a, real=chain.chain: seen.append(real(*a)) or seen[-1])
    seen.clear()
    assert chain.main([*argv, "--max-context", "200", "--json", str(tmp_path / "out.json")]) == 0
    assert {one.batch.pages.shape[1] for one in seen} == {1, 5}  # experts are counted over the shortest; 200 + 64 rows
    long = {f["name"]: f for f in json.loads((tmp_path / "out.json").read_text())["figures"]}
    assert "page tables of 320 positions" in long["mlp.1.engine"]["note"]
    assert chain.main([*argv, "--max-context", "23"]) == 2


def test_bytes_of_a_call():
    """Mutants: all experts read, packed ones too; the whole cache read; a weight not counted; a window not seen."""
    x, ids = torch.zeros(2, 8), torch.tensor([[0, 1], [1, 2]])
    experts = x, ids, torch.zeros(2, 2), torch.zeros(10, 6, 8), torch.zeros(10, 8, 3), "silu", None
    own = x.nbytes + ids.nbytes + 16
    assert recorder.traffic("experts", experts, x) == own + x.nbytes + 3 * (48 + 24) * 4
    plane, q = torch.zeros(1000, 2, 4), torch.zeros(3, 2, 4)
    prefix = torch.tensor([50])
    args = q, plane, plane, torch.zeros(1, 99, dtype=torch.int32), prefix, None, 16, 0.5
    assert recorder.traffic("attention", args, q) == 2 * q.nbytes + prefix.nbytes + 2 * 53 * 32
    assert recorder.traffic("attention", (*args, 20), q) == 2 * q.nbytes + prefix.nbytes + 2 * 23 * 32
    assert recorder.traffic("embed", (torch.tensor([1, 2]), torch.zeros(10, 4)), q[:2, 0]) == 16 + 2 * 16 + 2 * 16
    stacks = [torch.zeros(10, *sizes, dtype=torch.uint8) for sizes in ((6, 4), (6, 1), (8, 2), (8, 1))]
    packed = x, ids, torch.zeros(2, 2), *stacks, "silu", None
    assert recorder.traffic("experts_int4", packed, x) == own + x.nbytes + 3 * (24 + 6 + 16 + 8)
    latents, up = torch.zeros(1000, 1, 6), torch.zeros(2, 4, 4)
    seen = recorder.traffic("mla_attention", (q, latents, up, args[3], prefix, None, 16, 0.5), q)
    assert seen == 2 * q.nbytes + up.nbytes + prefix.nbytes + 53 * 24
