"""The structs of csrc as ctypes sees them have the sizes and places that nvcc gives them. Needs nvcc, no GPU."""

import ctypes
import re
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
    """Every field by its name. Kills one added, left out, moved or swapped on one side only: the kernel would read its
    neighbour."""
    wanted = {struct.__name__: struct for struct in COMPARED}
    lines = [f'#include "{native.sources()}/{name}.cuh"' for name in STRUCTS]
    lines += ["#include <cstddef>", "#include <cstdio>", "int main() {"]
    for name, struct in wanted.items():
        lines.append(f'std::printf("{name} %zu\\n", sizeof(eagle3::{name}));')
        for field, _ in struct._fields_:
            place = re.sub(r"(\d+)$", r"[\1]", field)  # a rank's inbox is one of an array
            lines.append(f'std::printf("{name}.{field} %zu\\n", offsetof(eagle3::{name}, {place}));')
    (tmp_path / "sizes.cu").write_text("\n".join([*lines, "}"]))
    alone = "-gencode=arch=compute_90,code=compute_90"  # the host runs it: nothing for a GPU to assemble
    command = ["nvcc", "-std=c++17", alone, "-o", str(tmp_path / "sizes"), str(tmp_path / "sizes.cu")]
    subprocess.run(command, check=True, capture_output=True)
    said = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout
    found = {name: int(number) for name, number in map(str.split, said.splitlines())}
    own = {name: ctypes.sizeof(struct) for name, struct in wanted.items()}
    own |= {f"{name}.{field}": getattr(s, field).offset for name, s in wanted.items() for field, _ in s._fields_}
    assert found == own


def test_every_struct_is_compared():
    """Kills a struct that nobody looks at."""
    named = [
        value
        for module in (native, native_latent, native_packed, native_routing, peers)
        for value in vars(module).values()
    ]
    assert {v for v in named if isinstance(v, type) and issubclass(v, ctypes.Structure)} == COMPARED


SIZES = {  # of csrc and of the Python that sizes buffers by them or keeps other sizes from its kernels
    "kAbiVersion": native.ABI,
    "kMostExperts": native_routing.MOST_EXPERTS,
    "kChoices": native.MOST_CHOICES,
    "kEarly": native.EARLY,
    "kWidest": max(native.WIDTHS),
    "kTile": native.TILE,
    "kFewer": native.RANKS[0],
    "kRanks": native.RANKS[1],
    "kVectors": native.VECTORS,
    "kDealt": native.DEALT,
    "kHanded": native.HANDED,
    "kGroupChoices": native_packed.MOST_CHOICES,
    "kGroupChosen": native_packed.CHOSEN,
    "kRouterChoices": native_routing.MOST_CHOICES,
    "kPlain": native_latent.PLAIN,
    "kTurned": native_latent.TURNED,
    "kLatent": native_latent.LATENT,
    "kHeadValues": native_latent.VALUES,
    "kLatentTile": native_latent.TILE,
    "kLatentLanes": native_latent.LANES,
    "kHeadBlock": native_latent.HEADS,
}


@pytest.mark.parametrize("name, own", SIZES.items(), ids=SIZES)
def test_sizes_are_those_of_csrc(name, own):
    """Kills a limit raised on one side: packets past a buffer's end, a kernel for sizes it was not built for."""
    lines = [line for path in sorted(native.sources().rglob("*.cuh")) for line in path.read_text().splitlines()]
    stated = [line for line in lines if re.match(r"\s*(inline )?constexpr (int|unsigned|uint32_t) ", line)]
    found = [int(n) for line in stated for n in re.findall(rf"\b{name} = (\d+)\b", line)]
    assert found == [own]
