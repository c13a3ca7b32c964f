"""What a run needs in memory and what there is, stated before anything is read."""

import os

import torch

from weights.config import Refused

RESERVE = 0.05  # share of the free memory left to the allocator, workspaces and captured graphs


def free_bytes(device, ranks=1):
    """Bytes a process may still take on `device`; `ranks` of this host share its memory, each GPU is one rank's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="ascii") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(available, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // ranks


def statement(weights, cache, has, ranks=1):
    """One line: what is needed and what there is, on each of so many ranks."""
    each = f"each of {ranks} ranks " if ranks > 1 else ""
    return (
        f"memory: {each}needs {(weights + cache) / 1e9:.3f} GB (weights {weights / 1e9:.3f}, cache {cache / 1e9:.3f}), "
        f"has {has / 1e9:.1f} GB"
    )


def demand(weights, cache, has):
    """Refused where weights and cache do not fit into what there is."""
    if weights + cache > has * (1 - RESERVE):
        raise Refused(f"{statement(weights, cache, has)}; lower max_context, max_batch or pages, or use more GPUs")
