"""What ptxas makes of csrc: projections ask for their weights before they wait for others. Needs nvcc, no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from kernels import native

UNIT = """
#include "fewrows/project.cuh"
using namespace eagle3;
int used(const Projection &p) {
  return launch_project<256, 8, false>(p, 132, nullptr) + launch_project<512, 8, false>(p, 132, nullptr) +
         launch_long<8, false>(p, 132, nullptr) + launch_staged<14, false>(p, 132, nullptr);
}
"""
WEIGHTS, WAIT = "LDG.E.NA", "ACQBULK"


def functions(cubin):
    """{name: machine code, an instruction a line}."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"\.section\s+\.text\.", text)[1:]
    return {part.split(",")[0]: re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", part) for part in parts}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_weights_are_asked_for_before_the_wait(tmp_path):
    """Kills weights loaded by `ld.global.nc`: ptxas moves those behind griddepcontrol.wait."""
    (tmp_path / "unit.cu").write_text(UNIT)
    made = tmp_path / "unit.cubin"
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90a", "-cubin", "-I", native.sources(), "-o", made]
    subprocess.run([*command, tmp_path / "unit.cu"], check=True, capture_output=True)
    found = functions(made)
    assert len(found) >= 8
    for name, code in found.items():
        wait = next(i for i, line in enumerate(code) if WAIT in line)
        early = sum(WEIGHTS in line for line in code[:wait])
        assert early >= 8, f"{name}: {early} loads of weights before the wait"
