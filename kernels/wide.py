"""Launch sizes of products over many rows (kernels.prefill), and the tiles of them that hardware copies.

Which sizes are taken may follow from the number of rows: `depth` alone decides the order of a sum, and a dtype has one.
"""

from dataclasses import dataclass, replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Wide:
    """Launch sizes of a product over many rows: `rows` x `outputs` a program, `depth` columns at a time."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int

    @property
    def constants(self):
        """The kernel's compile-time arguments."""
        return {"BM": self.rows, "BN": self.outputs, "BK": self.depth}

    @property
    def options(self):
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


NARROW = Wide(32, 32, 32, 4, 2)  # in fp32, whose products are IEEE and run on the FMA units
DENSE = {  # and how near to the GPU's arithmetic each comes, about
    Wide(128, 256, 64, 8, 4): 1.0,
    Wide(128, 128, 64, 8, 3): 0.85,
    Wide(64, 128, 64, 4, 3): 0.7,
    Wide(64, 64, 64, 4, 3): 0.5,
}
FEW, MANY = Wide(64, 64, 64, 4, 3), Wide(128, 256, 64, 8, 4)  # pairs an expert
PROCESSORS = 132  # of an H200


def dense(dtype, rows, outputs, gated=False):
    """Sizes of a product over all rows that are through in the fewest rounds over the processors. gated: of two
    products at once, which share a program's outputs."""
    if dtype == torch.float32:
        return NARROW

    def time(sizes):
        programs = triton.cdiv(rows, sizes.rows) * triton.cdiv((1 + gated) * outputs, sizes.outputs)
        return triton.cdiv(programs, PROCESSORS) * sizes.rows * sizes.outputs / DENSE[sizes]

    return halved(min(DENSE, key=time), gated)


def of_experts(dtype, pairs, experts, gated=False):
    """Sizes of a product whose tiles are pairs of one expert."""
    if dtype == torch.float32:
        return NARROW
    if pairs < MANY.rows * experts * 3 // 4:
        return FEW
    return halved(MANY, gated)


def halved(sizes, gated):
    """Half the outputs a program where there are two products of each."""
    return replace(sizes, outputs=sizes.outputs // 2) if gated else sizes


def described(sizes, x, weight, in_order=True):
    """Descriptors of x [N, I] and of all rows of weight [..., I] for tiles that hardware copies (TMA), None of x where
    its rows do not come in order; both None where that does not pay or cannot be: tiles of few rows, odd rows."""
    columns, odd = x.shape[1], x.shape[1] * x.element_size() % 16 or weight.data_ptr() % 16 or x.data_ptr() % 16
    if sizes.rows < 128 or odd:
        return None, None
    tile = TensorDescriptor.from_tensor(x, [sizes.rows, sizes.depth]) if in_order else None
    return tile, TensorDescriptor.from_tensor(weight.view(-1, columns), [sizes.outputs, sizes.depth])
