"""What a request draws depends on its seed, index and positions alone (B20, B42), not on its neighbours; greedy rows
among sampled ones; numbers that are not finite (B22)."""

import os

import pytest
import torch
from test_cycle_program import NoHost
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import NEXT, V, follow, pair

from engine import Sampling, Shape, loading, spawn
from engine.buffers import State, Tree
from engine.cache import Cache
from engine.cycle import Cycle
from engine.rules import Filtered, Greedy, Sampled, rule_of
from kernels import FUSED, REFERENCE
from weights.capture import boundaries

PLAIN, CHAIN, TREE = Shape(0, 1, 1), Shape(3, 1, 4), Shape(3, 3, 9)
SHAPES = [PLAIN, CHAIN, TREE]
PROMPT = [9, 8, 7, 40, 2, 5, 33]


@pytest.fixture(scope="module")
def history(toys):
    return pair(toys.history(), toys.random_draft())


def ids_of(engine, prompts, samplings, shape):
    return [r.token_ids for r in engine.generate(prompts, samplings, shape=shape)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiny_temperatures_are_greedy(history, shape):
    """0 and 1e-9, filters on or off, alone and beside sampled rows. Mutants: a division by zero; a draw among equals;
    a sampled neighbour that changes a greedy row."""
    greedy = Sampling(max_new_tokens=20)
    tiny = [Sampling(max_new_tokens=20, temperature=t, seed=5, top_k=2, top_p=0.5, min_p=0.1) for t in (0, 1e-9, 9e-6)]
    warm = Sampling(max_new_tokens=20, temperature=1.5, top_k=9)
    assert rule_of(tiny) == Greedy() and rule_of([*tiny, warm]) == Filtered()
    (want,) = ids_of(history, [PROMPT], [greedy], PLAIN)
    assert ids_of(history, [PROMPT] * 3, tiny, shape) == [want] * 3
    mixed = ids_of(history, [PROMPT] * 4, [*tiny, warm], shape)
    assert mixed[:3] == [want] * 3 and mixed[3] != want
    assert ids_of(history, [PROMPT], [Sampling(max_new_tokens=20, temperature=1e-4)], shape) == [want]


def test_equal_logits_at_tiny_temperatures(toys):
    """All ids equally likely: the lowest. Mutant: 1e-9 as a temperature like others."""
    engine = pair(toys.coin([1 / V] * V))
    for temperature in (0, 1e-9):
        assert engine.generate([5], Sampling(max_new_tokens=9, temperature=temperature)).token_ids == [0] * 9


WARM = dict(max_new_tokens=24, temperature=1.0)


@pytest.mark.parametrize("how", [{}, dict(top_k=20, top_p=0.95)], ids=["all", "filtered"])
def test_a_tree_draws_what_plain_decoding_draws(history, how):
    """Same seed, same ids, whatever the tree holds. Mutants: the position of the node, not of its depth; one number a
    cycle; a sibling's number."""
    prompts, each = [PROMPT, PROMPT[:3], [4]], Sampling(**WARM, **how, seed=3)
    want = ids_of(history, prompts, each, PLAIN)
    for shape in (TREE, Shape(4, 8, 40), Shape(2, 2, 5)):
        assert ids_of(history, prompts, each, shape) == want
    assert len({tuple(ids) for ids in want}) == 3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_seed_gives_the_same_ids(history, shape):
    """Twice, after other requests, alone in its batch or among four, in another slot, with neighbours under other
    settings. Mutants: a generator of the process; numbers by slot, by batch or by cycle; the index left out."""
    four = [Sampling(**WARM, seed=11)] * 4
    prompts = [PROMPT, [1, 2], [3], PROMPT]
    want = ids_of(history, prompts, four, shape)
    assert ids_of(history, prompts, four, shape) == want
    torch.manual_seed(0)
    ids_of(history, [[9, 9]], [Sampling(**WARM, seed=12)], shape)
    history.options, before = loading.Options(**{**vars(history.options), "max_batch": 1}), history.options
    try:
        assert ids_of(history, prompts, four, shape) == want  # one after the other, all in slot 0
    finally:
        history.options = before
    others = [four[0], Sampling(max_new_tokens=9, temperature=0.3, top_k=4), Sampling(max_new_tokens=3), four[3]]
    mixed = ids_of(history, prompts, others, shape)
    assert [mixed[0], mixed[3]] == [want[0], want[3]]
    assert want[0] != want[3]  # one prompt, two places in the list
    assert ids_of(history, prompts, [Sampling(**WARM, seed=12)] * 4, shape)[0] != want[0]


def record(paths, ranks=1):
    engine = pair(*paths, tp=ranks)
    each = [Sampling(**WARM, seed=s, top_k=k) for s, k in ((1, 0), (2, 9), (3, 0))]
    return [ids_of(engine, [PROMPT, [1, 2], [3]], each, shape) for shape in SHAPES]


def worker(paths):
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    return record(paths), record(paths, 2)


def test_other_processes_and_ranks_draw_the_same(toys):
    """Another process, alone and as one of two ranks (fp32). Mutants: Python's hash of the seed; a draw over a rank's
    own share of the vocabulary; each rank for itself."""
    paths = toys.history(), toys.random_draft()
    want = record(paths)
    assert spawn(worker, 2, paths) == [(want, want)] * 2


def test_settings_need_no_new_program(toys):
    """Temperature, filters and seeds change, the programs stay; greedy sessions keep neither logits nor q. Mutants: a
    setting in the key; every session sampled."""
    engine = pair(toys.history(), toys.random_draft())

    def programs():
        return {key: program.tree for key, program in engine.programs.cycles.items()}

    engine.generate([5], Sampling(max_new_tokens=9))
    (tree,) = programs().values()
    assert tree.rule == Greedy() and tree.logits is None and tree.q is None
    for temperature in (0.5, 1.0):
        for seed in (1, 2):
            engine.generate([5], Sampling(max_new_tokens=9, temperature=temperature, seed=seed))
            engine.generate([5], Sampling(max_new_tokens=9, temperature=temperature, top_k=seed, top_p=0.9))
    engine.generate([5], Sampling(max_new_tokens=9))
    assert [t.rule for t in programs().values()] == [Greedy(), Sampled(), Filtered()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_host_in_a_sampled_cycle(history, shape):
    """Mutants: a rejection loop; a bool mask as index; .item() anywhere."""
    events = history.stream(PROMPT, Sampling(max_new_tokens=9, temperature=1.0, top_k=5, top_p=0.9), shape=shape)
    next(events)
    with NoHost():
        history.programs.cycle(1, shape, history.drafter, detail=True, stamped=False, rule=Filtered()).run()
    events.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_static_shapes(toys, shape):
    """A sampled cycle on tensors without values."""
    options = loading.Options(target=toys.history(), draft=toys.random_draft())
    target, draft = loading.open_target(options), loading.open_draft(options)
    capture, cpu = boundaries(draft.config, target.config.layers), torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=False):
        plan = loading.Plan(target, draft, capture, 128, REFERENCE, loading.TP(), torch.float32)
        model, _, drafter, _ = plan.build(cpu)
        kinds = {"target": model.cache_rows, "draft": drafter.cache_rows}
        cache = Cache(kinds, 20, 4, torch.float32, cpu)
        state = State.allocate(3, 12, model.features, torch.float32, cpu)
        tree = Tree.allocate(3, shape, model.features, torch.float32, cpu, V, Filtered())
        Cycle(model, drafter, cache, state, tree, REFERENCE).run()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draft_rows_that_are_not_finite(toys, shape):
    """B22 under sampling: nothing is proposed, the draws are plain decoding's. Mutant: a token drawn from NaN."""

    def spoil(config, tensors):
        tensors["lm_head.weight"][5] = float("nan")

    engine, warm = pair(toys.history(), toys.random_draft()), Sampling(**WARM)
    want = ids_of(engine, [PROMPT], warm, PLAIN)
    engine = pair(toys.history(), toys.altered(toys.random_draft(), spoil))
    assert ids_of(engine, [PROMPT], warm, shape) == want
    for event in engine.stream(PROMPT, Sampling(**WARM), shape=shape):
        assert event.tree is None or set(event.tree.tokens[1:].tolist()) <= {-1}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_target_rows_that_are_not_finite(toys, shape):
    """B22 under sampling: the error names the position. Mutants: NaN drawn from; an id outside the vocabulary."""

    def spoil(config, tensors):
        tensors["model.embed_tokens.weight"][follow(9, 3, NEXT)[-1]] = float("nan")

    engine, seen = pair(toys.altered(toys.map(), spoil), toys.map_draft()), []
    with pytest.raises(RuntimeError, match=r"non-finite logits at position 4\b"):
        for event in engine.stream([4, 9], Sampling(max_new_tokens=20, temperature=0.5), shape=shape, details=False):
            seen += event.tokens
    assert seen == follow(9, 3, NEXT) and engine.pool.free == engine.pool.size


def test_draws_do_not_outlive_their_request(toys):
    """A sampled request, then a greedy one in its slot, then the other way round. Mutants: a slot that keeps its
    temperature; one that loses it when it is seated."""
    engine = pair(toys.history(), toys.random_draft(), max_batch=1)
    warm, cold = Sampling(**WARM), Sampling(max_new_tokens=24)
    alone = [engine.generate([PROMPT, PROMPT], [s, s]) for s in (warm, cold)]
    assert all(a != b for a, b in zip(alone[0][0].token_ids[:9:4], alone[1][0].token_ids[:9:4], strict=True))
    mixed = engine.generate([PROMPT, PROMPT], [warm, cold]), engine.generate([PROMPT, PROMPT], [cold, warm])
    assert mixed[0][0].token_ids == alone[0][0].token_ids and mixed[1][1].token_ids == alone[0][1].token_ids
    assert mixed[0][1].token_ids == mixed[1][0].token_ids == alone[1][0].token_ids
    assert float(engine.programs.state(1).draws.temperature[0]) == 0


@pytest.mark.interpreter
def test_the_fused_table_draws_the_same(toys):
    """A chain of two requests in Triton's interpreter. Mutants: arguments of a fused draw in another order; rows of a
    batch that share a number."""
    both, each = [], Sampling(max_new_tokens=3, temperature=1.0, top_k=9, top_p=0.9)
    for table in (REFERENCE, FUSED):
        engine = pair(toys.history(), toys.random_draft(), ops=table)
        both.append(ids_of(engine, [[4, 5], [4]], each, Shape(2, 1, 3)))
    assert both[0] == both[1]


@pytest.mark.gpu
def test_captured_draws(toys):
    """In one graph a cycle: twice the same, a tree draws what plain decoding draws, alone what it draws among four, and
    other settings need no other capture. Mutants: a draw fixed at capture; a sum whose order follows the batch."""
    engine, prompts = pair(toys.history(), toys.random_draft(), device="cuda", graphs="required"), [PROMPT, [1], [3, 4]]
    each, found = [Sampling(max_new_tokens=60, temperature=1.0, seed=s, top_p=0.98) for s in (1, 2, 3)], {}
    for shape in SHAPES:
        found[shape] = ids_of(engine, prompts, each, shape)
        engine.options, before = loading.Options(**{**vars(engine.options), "max_batch": 1}), engine.options
        assert ids_of(engine, prompts, each, shape) == found[shape]
        engine.options = before
    assert found[PLAIN] == found[TREE] != found[CHAIN]
    captured = [entry["captured"] for entry in engine.graphs.report()]
    assert all(captured)
    others = [Sampling(max_new_tokens=60, temperature=0.7, seed=9, top_k=30, min_p=0.01)] * 3
    assert ids_of(engine, prompts, others, CHAIN) != found[CHAIN]
    assert len(engine.graphs.report()) == len(captured)
