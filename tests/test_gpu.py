"""The engine on a GPU: law 1 to the bit, one graph launch a cycle, no host inside it, flat memory. CI has no GPU."""

import collections
import json
from pathlib import Path

import pytest
import torch
from oracles import Replay

import kernels
from bench.chain import chain
from engine import Engine, Sampling, Shape
from engine.cycle import Cycle
from engine.profile import Profile
from engine.session import NonFinite, Session
from engine.shape import PLAIN

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).parents[1] / "weights" / "demo"
SHAPES = [Shape(1, 1, 2), Shape(3, 1, 4), Shape(7, 1, 8), Shape(4, 4, 16), Shape(5, 8, 64)]
TOKENS = 300


@pytest.fixture(scope="module")
def demo():
    return Engine.load(DEMO / "target", DEMO / "draft")


@pytest.fixture(scope="module")
def qwen():
    """Qwen3-30B-A3B shapes cut to 8 layers; the page size does not divide the splits, prompts cross chunks."""
    sizes = dict(max_context=1024, max_batch=4, page_size=16, prefill_chunk=128)
    return Engine.load(draft="random:qwen3-30b-a3b-eagle3", random="qwen3-30b-a3b", layers=8, **sizes)


def prompts_of(engine):
    """Four prompts of different lengths, across page, split and chunk borders; the last one outgrows short tables."""
    draw = torch.Generator().manual_seed(7)
    vocabulary = engine.target.head.vocabulary
    return [torch.randint(0, vocabulary, (n,), generator=draw).tolist() for n in (33, 127, 200, 700)]


def greedy(*counts):
    """How so many tokens are asked for, whatever they are."""
    return [Sampling(max_new_tokens=n, ignore_eos=True) for n in counts]


def decoded(engine, prompts, shape, sampling=None):
    """ids of each prompt, the logits after each emitted token but the prefill's, and the mean accept length."""
    ids, logits = [[] for _ in prompts], [[] for _ in prompts]
    sampling = sampling or greedy(*[TOKENS] * len(prompts))
    cycles = 0
    for event in engine.stream_all(prompts, sampling, shape=shape, details=True):
        ids[event.request.index] += event.tokens
        if event.tree is not None:
            logits[event.request.index].append(event.tree.logits[event.accepted])
            cycles += 1
    return ids, [torch.cat(x) for x in logits], sum(len(x) - 1 for x in ids) / cycles


def lossless(engine, prompts, shape, plain):
    """Batch 1 and 4 give the ids and the logits of plain decoding, bit by bit. Returns the mean accept length."""
    want_ids, want_logits = plain
    for group in ([0], [0, 1, 2, 3]):
        ids, logits, accepted = decoded(engine, [prompts[i] for i in group], shape)
        for at, i in enumerate(group):
            assert ids[at] == want_ids[i], (shape, len(group), i)
            assert torch.equal(logits[at], want_logits[i]), (shape, len(group), i)
    return accepted


@pytest.fixture(scope="module")
def plain_demo(demo):
    return decoded(demo, prompts_of(demo), PLAIN)[:2]


@pytest.fixture(scope="module")
def plain_qwen(qwen):
    ids, logits, _ = decoded(qwen, prompts_of(qwen), PLAIN)
    texts = [prompt + out for prompt, out in zip(prompts_of(qwen), ids, strict=True)]
    qwen.drafter = Replay(texts, qwen.target.head.vocabulary, right=0.7, batch=4, device="cuda")
    for shape in SHAPES:
        qwen.drafter.prepare(shape)
    return ids, logits


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES], ids=str)
def test_demo_pair_is_lossless_to_the_bit(demo, plain_demo, shape):
    """Kills any row arithmetic that depends on the rows beside it."""
    lossless(demo, prompts_of(demo), shape, plain_demo)


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES], ids=str)
def test_scattered_paths_are_lossless_to_the_bit(qwen, plain_qwen, shape):
    """The standing test of law 1: an oracle right 70 % a node, its branch scattered over the tree. Kills keys of path
    nodes in node order, commits that move wrong rows, splits that follow the sequence's length."""
    accepted = lossless(qwen, prompts_of(qwen), shape, plain_qwen)
    assert shape.steps < 4 or accepted > 2.5


@pytest.mark.parametrize("shape", [PLAIN, Shape(3, 1, 4), Shape(4, 4, 16)], ids=str)
def test_short_tables_are_left_without_a_trace(demo, shape, monkeypatch):
    """A request that outgrows the programs of short tables, and a short one beside it that goes back to them: ids and
    logits of programs over the whole table, all of them captured before the first cycle. Kills a table's width that
    changes a bit, a view of the table read with its own width as stride, rows past a short table."""
    prompts = [torch.randint(0, demo.target.head.vocabulary, (n,)).tolist() for n in (890, 40)]
    programs = demo.programs

    def replays():
        """Of this shape's cycles, by the width of their tables."""
        counts = collections.Counter()
        for key, cycle in programs.cycles.items():
            if key[1] == shape:
                counts[key[3]] += demo.graphs.entries[key[0], key[1], id(cycle), Cycle.stages].replays
        return counts

    for group, needed in (([0], programs.widths[-2:]), ([0, 1], programs.widths)):
        own, how = [prompts[i] for i in group], greedy(TOKENS, 2 * TOKENS)[: len(group)]  # the short one ends last
        events = demo.stream_all(own, how, shape=shape, details=True)
        next(events)
        captured, before = set(programs.cycles), replays()
        events.close()
        ids, logits, _ = decoded(demo, own, shape, how)
        assert set(programs.cycles) == captured
        assert set(replays() - before) == set(needed)
        with monkeypatch.context() as patch:
            patch.setattr(programs, "widths", (programs.columns,))
            want_ids, want_logits, _ = decoded(demo, own, shape, how)
        assert ids == want_ids and all(map(torch.equal, logits, want_logits))


def test_one_graph_launch_a_cycle(demo):
    """Kills eager work between graphs that would launch its own, and captures of the same program twice; so for
    prompts."""
    prompt = prompts_of(demo)[0]
    shapes = [PLAIN, Shape(3, 1, 4), Shape(4, 4, 16)]
    for shape in shapes:
        demo.generate(prompt, Sampling(max_new_tokens=8), shape=shape)
    before, captured = {e["shape"]: e for e in demo.graphs.report() if e["batch"] == 1}, len(demo.graphs.entries)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for shape in shapes:
            demo.generate(prompt, Sampling(max_new_tokens=50), shape=shape)
    after = {e["shape"]: e for e in demo.graphs.report() if e["batch"] == 1}
    launches = sum(e.count for e in profiler.key_averages() if "GraphLaunch" in e.key)
    replays = sum(after[str(s)]["replays"] - before[str(s)]["replays"] for s in shapes)
    assert launches == replays + len(shapes) > len(shapes)  # each prompt is one piece
    assert sum(e["eager"] for e in after.values()) == 0
    assert len(demo.graphs.entries) == captured


def test_no_host_synchronisation_inside_a_cycle(demo, monkeypatch):
    """Kills any wait of the host between a cycle's launch and the next one's."""
    prompt, sampling = prompts_of(demo)[1], Sampling(max_new_tokens=60)
    demo.generate(prompt, sampling, shape=Shape(3, 1, 4))
    launch = Session._launch

    def strict(session):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(session)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Session, "_launch", strict)
    demo.generate(prompt, sampling, shape=Shape(3, 1, 4))


def test_nothing_lies_between_two_cycles(qwen):
    """What a streamed request has on the device, cycle after cycle, stamped and not: graphs. Kills copies, fills and
    kernels launched between them, and a host that is late with the next launch."""
    prompt, shape, profile = prompts_of(qwen)[0], Shape(3, 1, 4), Profile()
    sampling = Sampling(max_new_tokens=120, ignore_eos=True)
    for way in (None, profile):
        qwen.generate(prompt, sampling, shape=shape, profile=way)
    for way in (None, profile):
        events = qwen.stream_all([prompt], [sampling], shape=shape, profile=way)
        for _ in range(4):
            next(events)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(10):
                next(events)
        events.close()
        names = {e.key for e in profiler.key_averages() if e.key.startswith("cu")}
        allowed = ("GraphLaunch", "EventRecord", "EventSynchronize", "StreamIsCapturing", "GetDevice")
        assert not {name for name in names if not any(word in name for word in allowed)}
    assert profile.medians()["gap"] < 0.015


def test_memory_is_flat_over_a_thousand_cycles(demo):
    """Kills captures under too weak or too strong a key, and buffers allocated a cycle (B47, B48). The GPU's own count,
    which sees what torch's allocator does not: nobody else may use the GPU meanwhile."""
    prompts, shapes = prompts_of(demo), [PLAIN, Shape(1, 1, 2), Shape(3, 1, 4), Shape(4, 4, 16)]

    def turn():
        ids = []
        for shape in shapes:
            ids.append(demo.generate(prompts[0], Sampling(max_new_tokens=60), shape=shape).token_ids)
        assert all(x == ids[0] for x in ids)

    turn()
    torch.cuda.synchronize()
    free, entries = torch.cuda.mem_get_info()[0], len(demo.graphs.entries)
    while sum(e["replays"] for e in demo.graphs.report()) < 1000 + 300:
        turn()
        block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # other people's allocations come and go
        del block
    assert len(demo.graphs.entries) == entries
    assert torch.cuda.mem_get_info()[0] >= free - (1 << 29)


def test_stages_add_up_to_the_cycle(demo):
    """Stamps are written by the graph itself: stages sum to the cycle, and nothing in it took no time."""
    profile = Profile()
    demo.generate(prompts_of(demo)[0], Sampling(max_new_tokens=100), shape=Shape(3, 1, 4), profile=profile)
    found = profile.medians()
    stages = [found[name] for name in ("draft", "verify", "accept", "commit")]
    assert abs(sum(stages) / found["cycle"] - 1) < 0.05
    assert min(stages) >= 0 and found["verify"] > found["accept"]


def test_prefill_kernels_agree_with_the_reference(demo):
    """kernels.PREFILL in fp32 writes what the reference writes: the same ids after prompts across chunk borders."""
    sizes = dict(dtype="float32", prefill_chunk=128, max_batch=1)
    plain = Engine.load(DEMO / "target", DEMO / "draft", ops=kernels.REFERENCE, **sizes)
    wide = Engine.load(DEMO / "target", DEMO / "draft", prompt_ops=kernels.PREFILL, **sizes)
    for prompt in prompts_of(demo):
        want, got = (e.generate(prompt, Sampling(max_new_tokens=40)) for e in (plain, wide))
        assert (got.token_ids, got.cycles) == (want.token_ids, want.cycles)


def test_a_prompt_has_the_same_rows_in_any_pieces():
    """Prompt kernels make a row's bits of the row alone, whatever tiles a pass takes: what lets short blocks of a
    prompt be reused though passes are long. Kills sums whose order follows the tile, masks that change a product."""
    sizes = dict(layers=2, max_context=4096, max_batch=1, capture_layers="boundary:1,2")
    engine = Engine.load(random="qwen3-30b-a3b", **sizes)
    assert (engine.parts.prefill_chunk, engine.parts.prefix_unit) == (8192, 512)
    ids = torch.randint(0, 100_000, (4001,), generator=torch.Generator().manual_seed(3)).tolist()
    found = {}
    for engine.parts.prefill_chunk in (8192, 2048, 700, 128):
        found[engine.parts.prefill_chunk] = engine.score(ids)
    want = found.pop(8192)
    for chunk, got in found.items():
        assert torch.equal(got.logprobs, want.logprobs) and torch.equal(got.boundaries, want.boundaries), chunk


def test_high_pages_read_the_same(demo):
    """Kills slot arithmetic in 32 bits (B49): a cache of more than 2^31 elements, the request on its last pages."""
    rows = 2**31 // (2 * 7 * 2 * 64) // 64 + 64
    high = Engine.load(DEMO / "target", DEMO / "draft", pages=rows, max_batch=1)
    high.pool._free.reverse()
    prompt, sampling = prompts_of(demo)[0], Sampling(max_new_tokens=40)
    for shape in (Shape(3, 1, 4), Shape(4, 4, 16)):
        want = demo.generate(prompt, sampling, shape=shape)
        got = high.generate(prompt, sampling, shape=shape)
        assert (got.token_ids, got.cycles) == (want.token_ids, want.cycles)


def test_statistics_name_the_captures(demo, tmp_path):
    """The command's report: captured, replays counted, nothing eager."""
    from engine.generate import main

    file = tmp_path / "stats.json"
    assert main(["def f(x):", "--max-new-tokens", "40", "--graphs", "required", "--profile", "--stats", str(file)]) == 0
    stats = json.loads(file.read_text())
    assert [(e["captured"], e["eager"]) for e in stats["graphs"]] == [(True, 0)]
    assert stats["ms"]["verify"] > 0


@pytest.mark.parametrize("shape", [PLAIN, Shape(3, 1, 4), Shape(4, 4, 16)], ids=str)
def test_a_request_that_turns_to_nan_ends_alone(qwen, shape):
    """The others' ids are those of a run without it. Mutants: a NaN row that reaches the rows beside it in a kernel, or
    those of later cycles through pages or a slot."""
    prompts, how = prompts_of(qwen), [Sampling(max_new_tokens=60, ignore_eos=True)] * 4
    fine = [r.token_ids for r in qwen.generate(prompts, how, shape=shape)]
    others = {t for ids in (*prompts, fine[0], fine[2], fine[3], fine[1][:5]) for t in ids}
    at, token = next((at, t) for at, t in enumerate(fine[1]) if t not in others)
    weight = qwen.target.embedding.weight
    kept = weight[token].clone()
    weight[token] = float("nan")
    try:
        with pytest.raises(NonFinite, match=f"position {len(prompts[1]) + at} of request 1$") as found:
            qwen.generate(prompts, how, shape=shape)
    finally:
        weight[token] = kept
    assert [r and r.token_ids for r in found.value.results] == [fine[0], None, fine[2], fine[3]]
    assert qwen.generate(prompts[1], how[0], shape=shape).token_ids == fine[1]


def test_layers_in_sequence():
    """Kills races between kernels that follow one another, which none of them shows alone: rows of a pass that hang on
    the rows beside them, on the run, or on whether the host launches them one by one."""
    engine = Engine.load(random="qwen3-30b-a3b", layers=4, page_size=64, max_context=600, max_batch=1)
    for rows in engine.parts.cache.storage.values():
        rows.normal_()
    wanted, results = None, []
    for n in (16, 8, 4, 1):
        own = chain(engine, engine.target, 512, n)
        wanted = own.x if wanted is None else wanted
        own.x = wanted[:n].contiguous()

        def run(own=own):
            x = own.x
            for layer in engine.target.layers:
                x = layer(x, x, *own.sees(layer))
            return x

        found = [run() for _ in range(20)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        for _ in range(20):
            graph.replay()
            found.append(y.clone())
        results.append(found[0])
        assert all(torch.equal(x, results[0][:n]) for x in found), n
