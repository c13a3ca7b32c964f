"""Arguments for the operations around the layers (a draft's rows, trees, acceptance, draws, commits, sums), as
tests/twin_cases.py has them for those of layers.
"""

import torch
from twin_cases import NOISE, Make

from kernels.sampling import cutoff
from kernels.tree import first_of


def embed(dtype, device):
    make = Make(dtype, device)
    for ids, d in (([3], 64), ([0, -1, 8, 3, 3], 80), ([5, 1], 2100)):
        yield f"{len(ids)}x{d}", (make.ints(ids), make.floats(9, d))


def embed_share(dtype, device):
    make = Make(dtype, device)
    for ids, d, first in (([3], 64, 0), ([0, -1, 8, 3, 3, 5], 80, 3), ([0, -1, 17], 64, 9), ([5, 1], 2100, 4)):
        yield f"{len(ids)}x{d}", (make.ints(ids), make.floats(5, d), first)


def pack_bests(dtype, device):
    make = Make(dtype, device)
    for n, k, first in ((1, 1, 0), (5, 3, 70_000)):
        ids = torch.randint(0, 1000, (n, k), generator=make.generator).to(device)
        values, lse = make.floats(n, k, dtype=torch.float32), make.floats(n, dtype=torch.float32)
        yield f"{n}x{k}", (values, ids, lse, first)


def merge_bests(dtype, device):
    make = Make(dtype, device)
    for ranks, n, c, k in ((2, 1, 1, 1), (4, 5, 3, 3), (8, 3, 2, 4)):
        values = make.floats(ranks, n, c, dtype=torch.float32).sort(-1, descending=True).values
        values[:, 0, 0] = 2.0  # equals on all ranks: the first one's counts
        values[:, -1, -1] = float("-inf")
        ids = torch.randint(0, 90_000, (ranks, n, c), generator=make.generator, dtype=torch.int32).to(device)
        lse = make.floats(ranks, n, 1, dtype=torch.float32)
        lse[0, -1] = NOISE if n == 3 else 1.0
        yield f"{ranks}x{n}x{c}", (torch.cat([values.view(torch.int32), ids, lse.view(torch.int32)], -1), k)


def behind(dtype, device):
    make = Make(dtype, device)
    for seq, backlog, width in (([7], [1], 1), ([12, 900, 0], [3, 4, 0], 4)):
        yield f"{len(seq)}x{width}", (make.ints(seq), make.ints(backlog), width)


def last(dtype, device):
    make = Make(dtype, device)
    for b, t, d, backlog in ((1, 4, 64, [3]), (3, 5, 80, [5, 0, 1]), (2, 2, 2100, [1, 2])):
        yield f"{b}x{t}x{d}", (make.floats(b, t, d), make.ints(backlog))


def draft_input(dtype, device):
    make = Make(dtype, device)
    for ids, m, d, source, normed in (
        ([4], 1, 64, None, False),
        ([4, -1, 0, 8, 8], 5, 80, None, True),
        (None, 3, 64, None, False),
        ([2, 7, 1, 1], 2, 80, [[0, 0], [0, 0]], False),
        ([2, 7, 1, 1, 5, 6], 6, 4100, [[2, 0, 2], [1, 1, 0]], True),
        (None, 4, 64, [[1, 0], [0, 0]], False),
    ):
        table = make.floats(m if ids is None else 9, d)
        where = None if ids is None else make.ints(ids), table
        source, name = None if source is None else make.ints(source), f"{m}x{d}-{source and len(source)}"
        yield name, (*where, make.gain(d), make.floats(m, d), source, make.gain(d), 1e-6, normed)


def record(dtype, device):
    make = Make(dtype, device)
    for b, t, parts, d in ((1, 1, 0, 0), (2, 3, 1, 80), (1, 4, 3, 1300), (2, 2, 6, 80)):
        rows = b * t
        kept = torch.zeros(b, t, dtype=torch.int64, device=device), torch.zeros(b, t, device=device)
        given = make.ints(list(range(rows)))[:, None], make.floats(rows, dtype=torch.float32)
        aux = [make.floats(rows, d) for _ in range(parts)]
        kept_aux = torch.zeros(b, t, parts * d, dtype=dtype, device=device)
        yield f"{b}x{t}x{parts}x{d}", (*given, aux, *kept, kept_aux)


def grow(dtype, device):
    make = Make(dtype, device)
    for b, q, k, step, mapped in ((1, 1, 1, 0, True), (2, 1, 4, 0, False), (2, 4, 4, 1, True), (1, 8, 8, 8, False),
                                  (2, 1, 1, 2, True), (1, 32, 32, 1, True)):  # fmt: skip
        offset = first_of(step, k)
        size = (b, offset + q * k + 3)
        pool = (
            torch.zeros(size, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
        )
        values = make.floats(b, q, k, dtype=torch.float32).sort(-1, descending=True).values
        if k > 1:
            values[0, 0, 1] = values[0, 0, 0]  # a tie
        lse = values.logsumexp(-1) + 0.5
        if q > 1:
            lse[0, 1] = NOISE  # a row that proposes nothing
        ids = torch.randint(0, 1000, (b, q, k), generator=make.generator).to(device)
        beam = None
        if step:
            nodes = torch.randint(-1, offset + 1, (b, q), generator=make.generator).to(device)
            bits = torch.randint(0, 1 << 40, (b, q), generator=make.generator).to(device)
            beam = make.floats(b, q, dtype=torch.float32), nodes, bits
        offsets = torch.randint(0, 90, (1000,), generator=make.generator).to(device) if mapped else None
        n = make.ints([70, 1][:b])
        yield f"{q}x{k}-{step}", (values, ids, lse, offsets, n, beam, pool, step)


def choose(dtype, device):
    make = Make(dtype, device)
    for b, m, t in ((1, 3, 4), (2, 20, 8), (1, 150, 64), (2, 300, 2)):
        parents = torch.tensor([make.tree(m + 1)[1:] for _ in range(b)]).to(device) - 1
        scores, steps = torch.zeros(b, m), torch.rand(b, m, generator=make.generator)
        steps[:, ::3] = 0  # a child that scores like its parent
        for row in range(b):
            for node in range(m):
                parent = int(parents[row, node])
                scores[row, node] = (scores[row, parent] if parent >= 0 else 0) - steps[row, node]
        if m == 20:
            scores[0, 9:] = float("-inf")
        tokens = torch.randint(0, 1000, (b, m), generator=make.generator).to(device)
        tree = [torch.full((b, t), 7, dtype=torch.int64, device=device) for _ in range(2)]
        yield f"{m}-{t}", ((scores.to(device), tokens, parents), make.ints([41, 42][:b]), *tree)


def plant(dtype, device):
    make = Make(dtype, device)
    for b, t in ((1, 1), (2, 7), (1, 64)):
        parents = make.ints([make.tree(t) for _ in range(b)])
        tokens, *outputs = (torch.full((b, t), 7, dtype=torch.int64, device=device) for _ in range(5))
        yield f"{t}", (make.ints([31, 32][:b]), make.ints([5, 900][:b]), tokens, parents, *outputs, t - 1)


def walk(dtype, device):
    make = Make(dtype, device)
    parents = [[0, 0, 0, 1, 2, 4], [0, 0, 1, 2, 3, 4]]
    targets = [[5, 1, 6, 1, 8, 9], [3, 4, 5, 6, 7, 8]]
    tokens = [[0, 4, 5, 1, 6, 8], [9, 3, 4, 5, 6, 7]]
    cases = {
        "walk": {},
        "limit": {"limits": [12, 13]},
        "stop": {"stop": [[6, -1], [5, 7]]},
        "stop-at-limit": {"limits": [13, 12], "stop": [[8, -1], [4, -1]]},
        "fault": {"finite": [[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]},
        "done": {"done": [1, 0], "finite": [[0] * 6, [1] * 6]},
        "empty": {"done": [1, 1], "limits": [0, 0], "seq": [0, 0]},
    }
    for number, (name, case) in enumerate(cases.items()):
        spoilt = (NOISE, float("inf"), float("-inf"))[number % 3]
        for steps in (1, 3, 6):
            report = torch.zeros(2, 70, dtype=torch.int64, device=device)
            report[:, 66] = make.ints(case.get("done", [0, 0]))
            yield (
                f"{name}-{steps}",
                (
                    make.ints(tokens),
                    make.ints(parents),
                    make.ints(targets),
                    torch.where(make.ints(case.get("finite", [[1] * 6] * 2)) > 0, 1.5, spoilt),
                    make.ints(case.get("seq", [10, 10])),
                    make.ints(case.get("limits", [100, 100])),
                    make.ints(case.get("stop", [[-1, -1]] * 2)),
                    torch.zeros(2, steps, dtype=torch.int64, device=device),
                    report[:, :steps],
                    report[:, 64],
                    report[:, 65],
                    report[:, 66],
                    report[:, 67],
                    report[:, 68],
                    report[:, 69],
                    make.ints([77, 78]),
                    None if number == 0 else make.ints([3, 5]),
                    number % 2 == 0,
                ),
            )


def follow(dtype, device):
    make = Make(dtype, device)
    for width, lens, waiting in (
        (24, [3, 0], [4, 2]),
        (1300, [1, 4], [1, 9]),
        (0, [2, 4], [2, 5]),
        (16, [4, 4], [4, 12]),
    ):
        report = make.ints([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
        path = make.ints([[0, 2, 5, 6], [0, 1, 2, 3]])
        backlog = make.ints(waiting)
        tokens = torch.zeros(2, 10, dtype=torch.int64, device=device)
        features = torch.zeros(2, 10, width, dtype=dtype, device=device)
        yield (
            f"{width}",
            (report[:, :4], make.floats(2, 7, width), path, make.ints(lens), backlog, tokens, features),
        )


def uniform(dtype, device):
    make = Make(dtype, device)
    keys = make.ints([0, -1, 0x299F31D0A4093822])
    for width, purpose in ((1, 0), (5, 1), (64, 2)):
        at = torch.arange(3 * width, device=device).view(3, width) * 0x123456789
        yield f"{width}-{purpose}", (keys, at, purpose)


def soften(dtype, device):
    make = Make(dtype, device)
    for n, v, filtered in ((1, 100, False), (5, 333, True), (3, 4400, True), (2, 9000, False)):
        logits = make.floats(n, v, scale=3.0, dtype=torch.float32)
        logits[:, [3, v - 1]] = logits[:, :1].clone()  # ties
        logits[0, v // 2] = float("-inf")
        temperature = torch.tensor([1.0, 0.3, 0.0, 1e-4, 7.0], device=device)[:n].contiguous()
        cut = None
        if filtered:
            settings = torch.tensor([[0, 3, 1, 90, v]]), torch.tensor([[0.9, 1.0, 0.5, 0.01, 0.999]]), torch.zeros(1, 5)
            cut = cutoff(logits, temperature, *(x[0, :n].to(device) for x in settings))
        yield f"{n}x{v}", (logits, temperature, cut)
    settings = torch.tensor([[0.5], [7.0], [0.1]], device=device)  # of one request, as its rows see them
    yield "one for all", (make.floats(5, 70, dtype=torch.float32), settings[0, :1].expand(5), None)


def draw(dtype, device):
    make = Make(dtype, device)
    for n, v, drafted in ((1, 100, False), (9, 333, True), (6, 4400, True), (3, 9000, False)):
        p, q = (make.floats(n, v, scale=2.0, dtype=torch.float32).softmax(-1) for _ in range(2))
        p[:, ::3], q[:, 1::3] = 0, 0
        u = torch.rand(n, generator=make.generator)
        u[0], u[-1] = 0, 1 - 2.0**-24
        p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        if not drafted:
            yield f"{n}x{v}", (p, u.to(device))
            continue
        q[1], q[2] = 0, p[2]  # nothing was drawn; nothing is left over
        tokens = torch.randint(0, v, (n,), generator=make.generator)
        tokens[3], tokens[4], tokens[5] = -1, 3, 2
        coins = torch.rand(n, generator=make.generator)
        coins[4:6] = 0
        yield f"{n}x{v}", (p, u.to(device), q, tokens.to(device), coins.to(device))


def commit(dtype, device):
    make = Make(dtype, device)
    for page, path, lens in (
        (4, [[0, 2, 5, 7], [0, 1, 4, 4]], [4, 3]),  # 0, 2, 5 reads row 2 while row 2 is written
        (1, [[0, 1, 2, 3], [0, 3, 5, 6]], [4, 0]),
        (16, [[0, 1], [0, 63]], [1, 2]),
        (64, [[0], [0]], [1, 1]),
    ):
        pages = make.pages(2, -(-90 // page))
        slots = (int(pages.max()) + 1) * page
        storage = make.floats(2, 2, slots, 2, 20)
        accepted = make.ints(lens)
        yield f"page{page}", (storage, pages, make.ints([3, 9]) + accepted, make.ints(path), accepted, page)


def publish(dtype, device):
    make = Make(dtype, device)
    for width, turn in ((75, 0), (75, 5), (2300, 3)):
        host = torch.full((2, width), 7, dtype=torch.int64, pin_memory=device == "cuda")
        yield f"{width}-{turn}", (make.ints(list(range(width))), host, make.ints([turn]))


def stamp(dtype, device):
    yield "number", (torch.zeros(3, dtype=torch.int64, device=device), 1)


def total(dtype, device):
    make = Make(dtype, device)
    for ranks, n, d, residual in ((2, 1, 64, True), (4, 3, 300, True), (3, 9, 80, False), (8, 2, 128, True)):
        parts, extra = make.floats(ranks, n, d, scale=3.0), make.floats(n, d) if residual else None
        yield f"{ranks}x{n}x{d}", (parts, extra)


CASES = {
    f.__name__: f
    for f in (
        embed,
        embed_share,
        pack_bests,
        merge_bests,
        behind,
        last,
        draft_input,
        grow,
        choose,
        plant,
        record,
        walk,
        follow,
        uniform,
        soften,
        draw,
        commit,
        publish,
        stamp,
        total,
    )
}
