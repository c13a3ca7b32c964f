"""What `bench.verify_vs_draft` and `bench.sweep` measure, on the demo pair: clocks, experts, acceptance, refusals."""

import dataclasses
import json
import time

import pytest
import torch

from bench import reading, stages, verify_vs_draft
from bench.oracle import Delayed, Oracle, rates_of, share_embeddings
from bench.spin import DelayedTarget, Spin
from engine import Engine, Shape
from engine.options import DEMO
from engine.profile import Profile
from engine.shape import PLAIN
from kernels import REFERENCE
from weights.config import Refused

CHAIN, TREE = Shape(3, 1, 4), Shape(4, 4, 16)
PROMPT = list(range(40, 72))
STAGES = "draft", "verify", "accept", "commit"
SIZES = dict(architectures=["Qwen3MoeForCausalLM"], hidden_size=128, num_hidden_layers=6, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=32, num_experts=64, num_experts_per_tok=4, moe_intermediate_size=64)
SIZES |= dict(intermediate_size=64, vocab_size=512, max_position_embeddings=256, rms_norm_eps=1e-6, rope_theta=1e4)
SIZES |= dict(model_type="qwen3_moe", norm_topk_prob=True, tie_word_embeddings=False, eos_token_id=0)


class Bar:
    def update(self, n):
        pass


@pytest.fixture
def engine():
    pair = str(DEMO / "target"), str(DEMO / "draft")
    return Engine.load(*pair, device="cpu", max_batch=1, max_context=256, prefix_cache=False)


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.ns = 0

    def stamp(self, stamps, number):
        stamps[number] = self.ns

    def spin(self):
        self.ns += 5_000_000


@pytest.mark.parametrize("stage", ["verify", "draft"])
def test_a_delay_is_booked_where_it_was_put(stage):
    """Fault B52, exact on a clock of its own; by the device's clock it is bench.verify_vs_draft --inject-spin.

    Mutants: stamps one stage late; draft and verify swapped; the gap counted into a stage; prompts delayed too."""
    clock, pair = Clock(), (str(DEMO / "target"), str(DEMO / "draft"))
    ops = dataclasses.replace(REFERENCE, stamp=clock.stamp)
    engine = Engine.load(*pair, device="cpu", max_batch=1, max_context=256, prefix_cache=False, ops=ops)
    if stage == "verify":
        engine.parts.target = DelayedTarget(engine.parts.target, clock.spin)
    else:
        engine.drafter = Delayed(engine.drafter, clock.spin)
    profile = Profile()
    engine.generate(PROMPT, stages.sampling(16), shape=CHAIN, profile=profile)
    spent = dict.fromkeys(("draft", "verify", "accept", "commit", "gap", "cycle"), 0.0)
    assert profile.medians() == spent | {stage: 5.0, "cycle": 5.0}
    assert clock.ns == 5_000_000 * len(profile.rows)


@pytest.mark.gpu
def test_a_delay_is_booked_where_it_was_put_by_the_clock_of_a_gpu():
    """Fault B52: that stage rises by the delay, no other does; stages add up to the cycle, cycles and gaps to the time
    that decoding took. Mutants: stamps that do not wait for the stage; launches counted as work."""
    engine = Engine.load(str(DEMO / "target"), str(DEMO / "draft"), graphs="required", max_batch=1, prefix_cache=False)
    target, drafter, spin = engine.target, engine.drafter, Spin(5, engine.parts.device)

    def times():
        engine.programs.drop(engine.drafter)
        for _ in range(2):  # captured, then measured
            profile = Profile()
            result = engine.generate(PROMPT, stages.sampling(200), shape=CHAIN, profile=profile)
        found, series = profile.medians(), profile.series()
        assert sum(found[stage] for stage in STAGES) == pytest.approx(found["cycle"], rel=0.03)
        launched = len(result.cycles)  # the one ahead of the end is not waited for
        assert sum(series["cycle"][:launched] + series["gap"][:launched]) == pytest.approx(result.decode_ms, rel=0.03)
        return found

    before = times()
    engine.parts.target = DelayedTarget(target, spin)
    verify = times()
    engine.parts.target, engine.drafter = target, Delayed(drafter, spin)
    for stage, found in (("verify", verify), ("draft", times())):
        for name in (*STAGES, "gap"):
            rise, allowed = found[name] - before[name], 0.3 if name == stage else 0.1
            assert abs(rise - 5.0 * (name == stage)) < allowed, (stage, name, before, found)


def test_a_spin_takes_its_time():
    """Mutant: microseconds for milliseconds."""
    spin, began = Spin(20, torch.device("cpu")), time.perf_counter()
    spin()
    assert 0.02 <= time.perf_counter() - began < 2


def test_a_delay_of_the_target_is_not_for_prompts(engine):
    """Mutant: every pass spins."""
    calls = []
    engine.parts.target = DelayedTarget(engine.parts.target, lambda: calls.append(1))
    result = engine.generate(PROMPT, stages.sampling(6), shape=PLAIN)
    assert len(calls) == len(result.cycles) == 5


def test_experts_are_counted_and_nothing_else_changes(engine):
    """Rows that all hold the root's token read few experts, random rows many; a single row reads its own four.

    Mutants: experts of one layer counted for all; a prompt's passes counted; ids counted more than once."""
    target, found = engine.target, {}
    ids = engine.generate(PROMPT, stages.sampling(12), shape=TREE).token_ids
    for routing in ("text", "independent", "repeated"):
        engine.drafter = engine.parts.drafter if routing == "text" else engine.drafter
        o = verify_vs_draft.parse(["--routing", routing])
        real = engine.drafter
        verify_vs_draft.route(o, engine, PROMPT, 12)
        counts = stages.routed(engine, target, PROMPT, 12, [PLAIN, TREE], Bar())
        assert counts[PLAIN] == [4.0] * 7 and len(counts[TREE]) == 7
        found[routing] = sum(counts[TREE]) / 7
        engine.drafter = real
    assert found["repeated"] + 2 < found["text"] <= found["independent"] <= 16, found
    assert engine.generate(PROMPT, stages.sampling(12), shape=TREE).token_ids == ids


def test_embeddings_with_a_part_in_common_overlap(tmp_path):
    """Experts of four random rows of a random model lie between those of rows alike and of independent ones, the more
    of the embedding is shared the fewer; the run says how much. Mutants: a share of the size for one of the square;
    rows that grow; another part for each rank's rows; the share not said."""
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    shared = weight.clone()
    share_embeddings(shared, 0.6)
    lengths = shared.square().mean(-1)
    alike = torch.nn.functional.cosine_similarity(shared[:-1], shared[1:])
    assert lengths.mean() == pytest.approx(1, abs=0.03) and alike.mean() == pytest.approx(0.6, abs=0.03)
    other = torch.randn(512, 256)
    share_embeddings(other, 0.6)
    assert torch.nn.functional.cosine_similarity(other.mean(0), shared.mean(0), 0) > 0.95

    config = {"target": SIZES}
    (tmp_path / "random.json").write_text(json.dumps(config))
    words = ["--random", str(tmp_path / "random.json"), "--rows", "4", "--shapes", "--rounds", "1", "--repeats", "1"]
    words += ["--tokens", "8", "--context", "24", "--device", "cpu", "--json", str(tmp_path / "run.json")]
    found = {}
    for routing in ("independent", "overlap:0.3", "overlap:.6", "repeated"):
        assert verify_vs_draft.main([*words, "--routing", routing]) == 0
        run = reading.read(str(tmp_path / "run.json"))
        assert run["workload"]["routing"].startswith(routing.replace(":.", ":0."))
        found[routing] = next(f["experts"] for f in run["figures"] if f["name"] == "verify.4")
    a, b, c, d = found.values()
    assert a > b + 0.5 and b > c + 0.5 and c > d + 0.5, found


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
def test_synthetic_acceptance_is_what_was_asked_for(shape, engine):
    """Mutants: decoys that are right; the branch's depth off by one."""
    engine.drafter = oracle = Oracle(None, [], 6144, 256, engine.parts.device)
    text = engine.generate(PROMPT, stages.sampling(64), shape=PLAIN).token_ids
    for length, tokens in ((1.0, 16), (2.2, 64), (shape.path, 24)):
        oracle.seat([*PROMPT, *text])
        oracle.aim(rates_of(length, shape.path - 1))
        result = engine.generate(PROMPT, stages.sampling(tokens), shape=shape)
        emitted = [n for n, _, _ in result.cycles[:-1]]  # the cap may cut the last
        assert result.token_ids == text[:tokens]
        assert sum(emitted) / len(emitted) == pytest.approx(length, abs=0.0 if length in (1.0, shape.path) else 0.35)


@pytest.mark.parametrize("shape", [Shape(1, 4, 5), Shape(3, 2, 7), TREE, Shape(5, 8, 64)], ids=str)
def test_a_made_up_tree_begins_with_its_likeliest_nodes(shape):
    """The right branch is of first children, or a shape that chooses itself learns that chains are wrong where trees
    are right; its nodes are spread, so that accepted rows move. Mutants: a decoy before it; a chain with decoys."""
    oracle = Oracle(None, [], 100, 32, torch.device("cpu"))
    parents, depths, right = (x.tolist() for x in oracle.layout(shape))
    path = [node for node, on in enumerate(right) if on]
    assert len(path) == shape.path and [depths[node] for node in path] == list(range(shape.path))
    assert all(parents.index(above, 1) == node for above, node in zip(path, path[1:], strict=False))
    assert path[-1] == shape.draft_tokens - 1 or shape.path == 2


def test_rates_of_a_length():
    """Mutants: the bonus token not counted; shares of cycles taken for chances given that the token before was kept."""
    oracle = Oracle(None, [0.6, 0.3, 0.3, 0.0], 100, 32, torch.device("cpu"))
    assert oracle.chances[:5].tolist() == pytest.approx([0.6, 0.5, 1.0, 0.0, 0.0])
    assert sum(rates_of(2.1, 3)) + 1 == pytest.approx(2.1) and rates_of(1, 3) == pytest.approx([0] * 3, abs=1e-9)
    with pytest.raises(Refused, match="emit 1 to 4"):
        rates_of(4.2, 3)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--shapes", "0-1-1"], "0-1-1"),
        (["--rows", "65"], "--rows 65"),
        (["--routing", "best"], "--routing best"),
        (["--random", "qwen3-30b-a3b", "--routing", "overlap:1.0"], "overlap:1.0"),
        (["--random", "qwen3-30b-a3b", "--routing", "overlap"], "overlap:SHARE"),
        (["--routing", "overlap:0.6"], "with --random"),
        (["--inject-spin", "-1"], "--inject-spin"),
        (["--target", "a", "--random", "b"], "--random"),
        (["--random", "qwen3-30b-a3b", "--inject-spin", "5", "--inject-stage", "draft"], "--inject-stage draft"),
    ],
)
def test_what_verify_vs_draft_refuses(argv, said, capsys):
    """One line, exit code 2, before anything is loaded."""
    assert verify_vs_draft.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error


def test_requests_at_once(tmp_path):
    """Mutants: one request measured whatever was asked; all requests' rows counted as one's; the same rows in each."""
    path, found = tmp_path / "run.json", []
    argv = "--rows 1 --shapes 2-1-3 --rounds 1 --repeats 1 --tokens 8 --context 24 --device cpu --routing independent"
    for batch in ("1", "3"):
        assert verify_vs_draft.main([*argv.split(), "--batch", batch, "--json", str(path)]) == 0
        run = reading.read(str(path))
        assert run["workload"]["batch"] == int(batch)
        found.append({figure["name"]: figure for figure in run["figures"]})
    one, three = found
    assert three["verify.2-1-3"]["experts"] > one["verify.2-1-3"]["experts"]
    assert three["verify_bytes.1"]["value"] > one["verify_bytes.1"]["value"]


def test_verify_vs_draft_measures_what_it_says(tmp_path, capsys):
    """Mutant: a figure left out of the document, or named otherwise; a floor from another pass."""
    path = tmp_path / "run.json"
    argv = ["--rows", "1", "2", "4", "--shapes", "4-4-16", "--rounds", "1", "--repeats", "2", "--tokens", "12"]
    assert verify_vs_draft.main([*argv, "--context", "24", "--device", "cpu", "--json", str(path)]) == 0
    run = reading.read(str(path))
    figures = {figure["name"]: figure for figure in run["figures"]}
    stage = {f"{s}.4-4-16" for s in ("verify", "draft", "accept", "commit", "cycle", "gap", "wall", "break_even")}
    whole = {"plain", "gap", "wall", "verify.1", "verify.2", "verify.4", "read_bandwidth", "prefill.24", "draft_step"}
    assert stage | whole | {"alone.verify.4-4-16", "alone.draft.3-1-4", "verify_fit.a"} <= set(figures)
    assert figures["verify.1"]["experts"] == 4 < figures["verify.2"]["experts"] < figures["verify.4"]["experts"] < 16
    nbytes = [figures[f"verify_bytes.{n}"]["value"] for n in (1, 2, 4)]
    assert nbytes == sorted(nbytes) and 15 < nbytes[0] < 40  # MB; of 8.5 million parameters
    speed = figures["read_bandwidth"]["value"]
    assert figures["verify.2"]["floor"] == pytest.approx(nbytes[1] / speed * 1e-3)
    assert "text" in run["workload"]["routing"] and run["environment"]["graphs"].startswith("CUDA graphs need")
    assert torch.get_num_threads() == 1 and json.dumps(run)
    assert "break_even.4-4-16" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["unstamped", "alone"])
def test_what_was_measured_is_kept(tmp_path, monkeypatch, part):
    """When a later part fails, with the floors of the experts that were read. Mutants: everything is written at the
    end, or nothing before all rounds and what follows them are through; floors that leave the experts out."""
    monkeypatch.setattr(verify_vs_draft.stages, part, lambda *_: 1 / 0)
    argv = ["--rows", "1", "--rounds", "1", "--tokens", "8", "--context", "24", "--device", "cpu", "--json"]
    with pytest.raises(ZeroDivisionError):
        verify_vs_draft.main([*argv, str(tmp_path / "run.json")])
    figures = {figure["name"]: figure for figure in reading.read(str(tmp_path / "run.json"))["figures"]}
    assert {"plain", "verify.1", "draft.3-1-4", "cycle.3-1-4"} <= set(figures)
    assert "alone.verify.3-1-4" not in figures and figures["verify.1"]["experts"] == 4
