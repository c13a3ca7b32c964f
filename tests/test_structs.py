"""The structs of csrc as ctypes sees them have the sizes and places that nvcc gives them. Needs nvcc, no GPU."""

import ctypes
import shutil
import subprocess

import pytest

from kernels import native, native_latent, native_packed, native_routing, peers

STRUCTS = {
    "fewrows/project": [native.Projection],
    "fewrows/attention": [native.Attention],
    "fewrows/head": [native.Vocabulary],
    "fewrows/experts": [native.Experts],
    "fewrows/latent": [native_latent.LatentQueries, native_latent.LatentAttention],
    "fewrows/router": [native_routing.Router],
    "fewrows/int4": [native_packed.Int4Experts],
    "fewrows/fp4": [native_packed.Fp4Experts],
    "allreduce/allreduce": [peers.Links, peers.Reduction],
}
COMPARED = {struct for several in STRUCTS.values() for struct in several}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
def test_structs_are_those_of_csrc(tmp_path):
    """Kills a field added, left out or moved on one side only: the kernel would read its neighbour."""
    wanted = {struct.__name__: struct for struct in COMPARED}
    lines = [f'#include "{native.sources()}/{name}.cuh"' for name in STRUCTS]
    lines += ["#include <cstddef>", "#include <cstdio>", "int main() {"]
    for name, struct in wanted.items():
        last = struct._fields_[-1][0]
        lines.append(f'std::printf("{name} %zu %zu\\n", sizeof(eagle3::{name}), offsetof(eagle3::{name}, {last}));')
    (tmp_path / "sizes.cu").write_text("\n".join([*lines, "}"]))
    alone = "-gencode=arch=compute_90,code=compute_90"  # the host runs it: nothing for a GPU to assemble
    command = ["nvcc", "-std=c++17", alone, "-o", str(tmp_path / "sizes"), str(tmp_path / "sizes.cu")]
    subprocess.run(command, check=True, capture_output=True)
    said = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout
    found = {name: (int(size), int(last)) for name, size, last in map(str.split, said.splitlines())}
    own = {n: (ctypes.sizeof(s), getattr(s, s._fields_[-1][0]).offset) for n, s in wanted.items()}
    assert found == own


def test_every_struct_is_compared():
    """Kills a struct that nobody looks at."""
    named = [
        value
        for module in (native, native_latent, native_packed, native_routing, peers)
        for value in vars(module).values()
    ]
    assert {v for v in named if isinstance(v, type) and issubclass(v, ctypes.Structure)} == COMPARED
