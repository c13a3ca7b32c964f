"""Arguments for the operations of latent attention, as tests/twin_cases.py has them for all others."""

import torch
from twin_cases import Make, fill

from kernels.attention import causal_bits

QKV = (  # B, T, D, heads, plain, turned, latent, query latent, page size, with a norm
    (1, 1, 64, 4, 16, 16, 32, 24, 16, True),
    (2, 5, 80, 3, 12, 8, 40, None, 1, True),
    (3, 4, 96, 2, 24, 6, 70, 48, 4, False),
)
REAL_QKV = (
    (1, 1, 7168, 8, 128, 64, 512, 1536, 64, True),
    (2, 4, 7168, 64, 128, 64, 512, 1536, 16, True),
    (1, 9, 14336, 8, 128, 64, 512, 1536, 64, False),  # a head's first layer
    (1, 5, 2048, 16, 128, 64, 512, None, 64, True),  # V2-Lite
)
ATTENTION = (  # B, T, heads, latent, turned, value, page size, prefixes, kind
    (1, 1, 4, 32, 16, 16, 1, [0], "tree"),
    (2, 1, 3, 40, 8, 10, 4, [150, 7], "tree"),
    (2, 5, 8, 32, 8, 24, 16, [140, 63], "chain"),
    (1, 40, 6, 64, 16, 16, 16, [97], "tree"),
    (1, 64, 2, 16, 4, 16, 16, [70], "tree"),
    (2, 6, 40, 16, 16, 12, 4, [79, 80], "causal"),
    (1, 2, 2, 16, 4, 8, 16, [2200], "chain"),  # more splits than lanes
    (1, 70, 4, 70, 6, 16, 64, [30], "causal"),
)


def mla_qkv(dtype, device, cases=QKV):
    make = Make(dtype, device)
    for b, t, d, h, nope, turned, latent, q_rank, page, normed in cases:
        columns = -(-40 // page)
        pages = make.pages(b, columns)
        (plane,) = make.planes(1, pages, page, 1, latent + turned)
        start = torch.randint(0, 20, (b, 1), generator=make.generator).to(device)
        at = start + torch.arange(t, device=device)
        index = torch.where(torch.arange(t, device=device) == t - 1, -1, at) if t > 1 else at
        rows = h * (nope + turned)
        down = make.weight((q_rank or rows) + latent + turned, d)
        query = (make.gain(q_rank), make.weight(rows, q_rank)) if q_rank else (None, None)
        up = make.weight(h, nope + 5, latent)[:, :nope]
        angle = make.floats(64, turned // 2, scale=3.0, dtype=torch.float32)
        table = torch.cat([angle.cos(), angle.sin()], 1)
        first = make.gain(d) if normed else None
        rest = (make.gain(latent), up, table, at, index, pages, page, plane)
        yield f"b{b}t{t}page{page}", (make.floats(b * t, d), first, 1e-6, down, *query, *rest)


def mla_attention(dtype, device, cases=ATTENTION):
    make = Make(dtype, device)
    for b, t, h, latent, turned, value, page, prefix, kind in cases:
        columns = -(-(max(prefix) + t + 3) // page)
        pages = make.pages(b, columns)
        (plane,) = make.planes(1, pages, page, 1, latent + turned)
        fill(make, [plane], pages, page, [n + t for n in prefix])
        tree = None
        if kind == "chain":
            tree = causal_bits(t, device).expand(b, t)
        elif kind == "tree":
            tree = make.ints([make.path_bits(make.tree(t)) for _ in range(b)])
        up = make.weight(h, 7 + value, latent)[:, 7:]
        q, scale = make.floats(b * t, h, latent + turned), (latent + turned) ** -0.5
        yield f"{kind}{t}-{prefix[0]}-page{page}", (q, plane, up, pages, make.ints(prefix), tree, page, scale)


CASES = {"mla_qkv": mla_qkv, "mla_attention": mla_attention}
