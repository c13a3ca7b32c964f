"""Text to train on: streams of token ids, and the windows of them that a step sees.

Shapes: L tokens of a window.
"""

import lzma
import math
from pathlib import Path

import numpy as np
import torch

from weights.config import Refused

from .text import Text


class Windows:
    """Training windows: of the corpus, every other one from a file's start, and of the target's own text."""

    def __init__(self, stream, end_ids, length, seed):
        self.stream, self.length, self.seed = stream, length, seed
        ends = torch.tensor(end_ids, dtype=stream.dtype, device=stream.device)
        self.starts = torch.isin(stream[:-length], ends).nonzero()[:, 0] + 1

    def _generator(self, number):
        """A draw depends on (seed, number) alone: resuming changes nothing."""
        return torch.Generator(self.stream.device).manual_seed(self.seed * 1_000_003 + number)

    def corpus(self, count, length, number):
        """[count, length] int64, the draw of that number."""
        draw = self._generator(number)
        device = self.stream.device
        at = torch.randint(len(self.stream) - length, (count,), generator=draw, device=device)
        if len(self.starts):
            first = torch.randint(len(self.starts), (count,), generator=draw, device=device)
            at[::2] = self.starts[first[::2]]
        return self.stream[at[:, None] + torch.arange(length, device=device)].long()

    def mixed(self, step, count, own, share):
        """[count, L] of a training step; `share` of them, in the long run, rows of own [M, L]."""
        windows = self.corpus(count, self.length, step)
        mine = math.floor((step + 1) * count * share) - math.floor(step * count * share)
        if mine:
            draw = self._generator(-1 - step)
            pick = torch.randint(len(own), (mine,), generator=draw, device=own.device)
            windows[count - mine :] = own[pick].long()
        return windows


def read_stream(path, folder, vocabulary):
    """Token ids of a corpus file [tokens] int32: *.bin and *.bin.xz hold little-endian uint16 ids, anything else is
    text for the tokenizer of the target at `folder`. Raises Refused."""
    path = Path(path)
    try:
        stored = lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()
        if path.name.removesuffix(".xz").endswith(".bin"):
            ids = np.frombuffer(stored[: len(stored) // 2 * 2], dtype="<u2").astype(np.int32)
        else:
            text = None if folder is None else Text.find(folder)
            if text is None:
                raise Refused(f"{path}: the target has no tokenizer for text; supported: a *.bin or *.bin.xz of ids")
            ids = np.asarray(text.encode(stored.decode()), dtype=np.int32)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: cannot be read ({error}); supported: ids in *.bin[.xz], or UTF-8 text") from None
    if len(ids) and ids.max() >= vocabulary:
        raise Refused(f"{path}: holds id {ids.max()}; supported: ids below the target's vocabulary of {vocabulary}")
    return torch.from_numpy(ids)


def streams(o, folder, vocabulary):
    """(training, held-out) token ids of --corpus and --heldout. Raises Refused where one is too short."""
    corpus = Path(o.corpus)
    inside = corpus / "train.bin.xz" if corpus.is_dir() else corpus
    beside = inside.with_name("heldout.bin.xz")
    train = read_stream(inside, folder, vocabulary)
    if o.heldout or beside.is_file() and beside != inside:
        held = read_stream(o.heldout or beside, folder, vocabulary)
    else:
        cut = len(train) - max(len(train) // 50, 2 * o.length)
        train, held = train[: max(cut, 0)], train[max(cut, 0) :]
    for name, stream in ((inside, train), (o.heldout or "held-out text", held)):
        if len(stream) < 2 * o.length:
            raise Refused(f"{name}: {len(stream)} tokens; supported: at least two windows of --length {o.length}")
    return train, held
