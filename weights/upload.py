"""From mapped files to a GPU: threads copy to page-locked memory, each on a CUDA stream of its own."""

import threading
from collections.abc import Iterator

import torch

BUFFER = 16 << 20  # bytes of a thread's page-locked buffer, of which it has two


def pieces(place: torch.Tensor, stored: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of place, part of stored) of at most `most` bytes each, cut along the first dimensions."""
    if stored.nbytes <= most:
        yield place, stored
        return
    rows = most // (stored.nbytes // stored.shape[0])
    if not rows:
        for part in range(stored.shape[0]):
            yield from pieces(place[part], stored[part], most)
        return
    yield from zip(place.split(rows), stored.split(rows), strict=True)


class Lane:
    """One thread's way to a GPU."""

    def __init__(self, device: torch.device):
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self.ends = [torch.cuda.Event() for _ in self.buffers]
        self.turn = 0

    def put(self, place: torch.Tensor, stored: torch.Tensor) -> None:
        """Copy `stored`, of the CPU, to `place` and convert its dtype there; what this thread does with `place` on its
        current stream comes after."""
        current = torch.cuda.current_stream(place.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for part, piece in pieces(place, stored, BUFFER):
                self.turn ^= 1
                buffer, end = self.buffers[self.turn], self.ends[self.turn]
                end.synchronize()  # the copy before the last has left it
                held = buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
                held.copy_(piece)
                part.copy_(held.to(place.device, non_blocking=True))
                end.record()
        current.wait_stream(self.stream)


class Lanes(threading.local):
    """The lanes of each thread, by device."""

    def __init__(self):
        self.lanes: dict[torch.device, Lane] = {}

    def put(self, place: torch.Tensor, stored: torch.Tensor) -> None:
        """As Lane.put."""
        if place.device not in self.lanes:
            self.lanes[place.device] = Lane(place.device)
        self.lanes[place.device].put(place, stored)
