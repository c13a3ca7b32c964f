"""What ptxas makes of csrc: kernels ask for their weights and gains before they wait for others. Needs nvcc, no GPU."""

import re
import shutil
import subprocess

import pytest
from disassembly import disassembled

from kernels import native

PROJECTIONS = """
#include "fewrows/project.cuh"
using namespace eagle3;
int used(const Projection &p) {
  return launch_project<256, 8, false>(p, 132, nullptr) + launch_project<512, 8, false>(p, 132, nullptr) +
         launch_project<480, 6, false>(p, 132, nullptr) +
         launch_project<256, 4, false>(p, 132, nullptr) + launch_long<8, false>(p, 132, nullptr) +
         launch_staged<14, false>(p, 132, nullptr);
}
"""
SUMS = """
#include "allreduce/allreduce.cuh"
using namespace eagle3;
int used(const Links &l, const Reduction &r) { return reduce<2>(l, r, 0, 132, 0) + reduce<8>(l, r, 0, 132, 0); }
"""
TILES = """
#include "fewrows/fp4.cuh"
using namespace eagle3;
int used(const Fp4Experts &p) { return fp4_experts(p, 132, nullptr); }
"""
DIGITS = """
#include "fewrows/int4.cuh"
"""
WAIT = "ACQBULK"


def functions(cubin):
    """{name: machine code, an instruction a line}."""
    parts = re.split(r"\.section\s+\.text\.", disassembled(cubin))[1:]
    return {part.split(",")[0]: re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", part) for part in parts}


def compiled(unit, folder):
    """`functions` of a unit of csrc."""
    (folder / "unit.cu").write_text(unit)
    made = folder / "unit.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90a", "-cubin", "-I", native.sources(), "-o", made]
    subprocess.run([*command, folder / "unit.cu"], check=True, capture_output=True)
    return functions(made)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
@pytest.mark.parametrize(
    "unit, kernel, count, load, least", [(PROJECTIONS, "", 14, "LDG.E.NA", 8), (SUMS, "reduce_rows", 4, "LDG.E.128", 1)]
)
def test_weights_are_asked_for_before_the_wait(unit, kernel, count, load, least, tmp_path):
    """Of projections; and the gains of a sum's norm. Kills weights loaded by `ld.global.nc`, which ptxas may move
    behind griddepcontrol.wait, and gains loaded after it."""
    found = {name: code for name, code in compiled(unit, tmp_path).items() if kernel in name}
    assert len(found) >= count
    for name, code in found.items():
        wait = next(i for i, line in enumerate(code) if WAIT in line)
        early = sum(load in line for line in code[:wait])
        assert early >= least, f"{name}: {early} loads of weights before the wait"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_tiles_keep_their_registers(tmp_path):
    """Packed experts by bulk copies. Kills one register too many: what is spilled is loaded back behind the rows that a
    warp has asked for, expert after expert."""
    found = {name: code for name, code in compiled(TILES, tmp_path).items() if "_tiles" in name}
    assert sum("down_tiles" in name for name in found) == 1 and len(found) == 4
    for name, code in found.items():
        spilled = [line for line in code if re.search(r"\b(STL|LDL)\b", line)]
        assert not spilled, name


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_int4_tiles_keep_their_registers(tmp_path):
    """Gate and up of INT4 experts. Kills a register that is loaded back while codes are on their way: it comes behind
    them; products that are not of whole numbers."""
    found = {
        name: code
        for name, code in compiled(DIGITS, tmp_path).items()
        if "packed_gate_up" in name and "Li7168E" in name
    }
    assert len(found) == 4
    for name, code in found.items():
        products = [i for i, line in enumerate(code) if "IMMA.16832" in line]
        assert len(products) == 2 * 4 * 4, name  # two tiles of four spans of four groups
        spilled = [line for line in code[products[0] : products[-1]] if re.search(r"\b(STL|LDL)\b", line)]
        assert not spilled, name
