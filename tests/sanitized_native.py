"""What compute-sanitizer watches of csrc/fewrows: every kernel at small sizes, one group of rows and several."""

import torch
from latent_cases import mla_attention, mla_qkv
from test_native import Quick, packed, packed_mxfp4, whole_int4
from twin_cases import Make, attend, moe

from kernels import FUSED, native
from kernels.routing import Routing

SHAPES = (
    (1, 1, 256, 8, 2, 64, 64, 16, [40], "tree", None, True),
    (2, 9, 256, 4, 2, 64, 64, 16, [70, 3], "tree", 40, True),
    (1, 4, 256, 8, 1, 128, 128, 4, [62], "beam", None, True),
    (1, 20, 512, 4, 4, 128, 64, 16, [130], "causal", None, False),
    (1, 3, 256, 8, 1, 64, 64, 16, [1030], "tree", None, True),
)


def main():
    """Launch everything once; what is wrong is the tool's to say."""
    dtype, table, make = torch.bfloat16, native.table(FUSED, torch.device("cuda")), Make(torch.bfloat16, "cuda")
    for rows in (1, 9):
        x, residual = make.floats(rows, 256), make.floats(rows, 80)
        table.linear(x, make.weight(80, 256), make.floats(80), residual)
        table.linear(make.floats(rows, 1536), make.weight(48, 1536))
        table.mlp(x, make.gain(256), 1e-6, make.weight(2 * 512, 256), make.weight(256, 512), "silu", x)
        table.head(x, make.gain(256), 1e-6, make.weight(333, 256), 1, torch.empty(rows, 333, device="cuda"))
    for rule in (Routing(4, True, "sigmoid", 4, 2, 2), Routing(2, False, "logits")):
        correction = torch.zeros(16, device="cuda")
        table.route(make.floats(9, 256), make.gain(256), 1e-6, make.weight(16, 256), rule, None, correction)
    for rows in (1, 9):
        shared = make.floats(rows, 256), make.weight(256, 256)
        table.experts_int4(*packed(Quick(), rows, 256, 8, 256, 4), *shared)
        table.moe_int4(*whole_int4(Quick(), rows, 256, 8, 256, Routing(4, True, "sigmoid"), 256))
        for width in (96, 1440):
            table.experts_mxfp4(*packed_mxfp4(Quick(), rows, 320, 8, width, 2))
    for _, arguments in mla_qkv(dtype, "cuda", ((2, 9, 256, 3, 128, 64, 512, 256, 16, True),)):
        table.mla_qkv(*arguments)
    latent = (1, 3, 8, 512, 64, 128, 16, [40], "tree"), (2, 5, 16, 512, 64, 128, 4, [70, 62], "chain")
    for _, arguments in mla_attention(dtype, "cuda", latent):
        table.mla_attention(*arguments)
    for _, arguments in attend(dtype, "cuda", SHAPES):
        table.attend(*arguments)
    for _, arguments in moe(dtype, "cuda", ((1, 256, 16, 64, 4, True), (9, 256, 140, 128, 8, False))):
        table.moe(*arguments)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
