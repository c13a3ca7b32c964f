"""What is in a compiled library, as text: by the disassemblers that come with Triton."""

import subprocess
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def disassembled(cubin):
    """Machine code of a cubin, an instruction a line behind its offset."""
    return subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout


def cubins(library, folder):
    """Paths of a library's cubins, taken out into `folder`."""
    subprocess.run([TOOLS / "cuobjdump", "-xelf", "all", library], cwd=folder, check=True, capture_output=True)
    return sorted(Path(folder).glob("*.cubin"))
