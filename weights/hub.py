"""A directory of a checkpoint from a path or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from weights.fields import Refused, shown

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve(path_or_hub_id: str | Path) -> Path:
    """A directory as it is; otherwise the hub repository of that id through huggingface_hub's cache, which also works
    offline. Refused: neither is found."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_hub_id)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or path.exists():
        raise Refused(f"{name}: no such directory")
    from huggingface_hub import snapshot_download  # here: a local run has no use for it

    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=["*/*"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(
                snapshot_download(name, allow_patterns=[*FILES, "pytorch_model.bin"], ignore_patterns=["*/*"])
            )
    except Exception as error:  # the library's types differ by version and by what failed: network, name, cache
        reason = shown(str(error).strip().split("\n")[0])
        raise Refused(
            f"{name}: no such directory, and not found as a hub id ({type(error).__name__}: {reason})"
        ) from error
    return folder
