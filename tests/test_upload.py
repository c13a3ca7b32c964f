"""Weights on their way to a GPU: cut to the page-locked buffers, converted there, by several threads at once."""

import pytest
import torch
from safetensors.torch import save_file

from weights import Checkpoint, Source, upload

SHAPES = {"whole": (3, 5), "rows": (700, 33), "wide": (3, 40, 90), "one": (1,), "row": (1, 9000)}


@pytest.mark.parametrize("shape", [*SHAPES.values(), (), (0, 4), (2, 3, 4, 500)], ids=str)
@pytest.mark.parametrize("most", [8, 100, 4000])
def test_pieces_are_all_of_it(shape, most):
    """Mutants: a last piece dropped; pieces longer than the buffer; rows out of order."""
    stored = torch.arange(float(torch.tensor(shape).prod()) if shape else 1.0).view(shape)
    place, got = torch.full(shape, -1.0), list(upload.pieces(stored, stored, most))
    assert all(piece.nbytes <= most for _, piece in got)
    for part, piece in upload.pieces(place, stored, most):
        part.copy_(piece)
    assert torch.equal(place, stored)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_fill_a_gpu(tmp_path, monkeypatch, dtype):
    """Mutants: a buffer filled while its copy runs; a place read before it is written; a stream that nobody awaits."""
    monkeypatch.setattr(upload, "BUFFER", 5000)
    draw = torch.Generator().manual_seed(0)
    tensors = {f"{name}.{i}": torch.randn(shape, generator=draw).bfloat16() for name, shape in SHAPES.items()
               for i in range(20)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = Source(Checkpoint.open(tmp_path), "cuda", dtype)
    places = {name: source.take(name, x.shape, gain=2.0) for name, x in tensors.items()}
    joined = source.stack([[(f"rows.{i}", SHAPES["rows"])] for i in range(20)])
    source.fill()
    for name, x in tensors.items():
        assert torch.equal(places[name].cpu(), 2 * x.to(dtype)), name
    assert torch.equal(joined.cpu(), torch.stack([tensors[f"rows.{i}"] for i in range(20)]).to(dtype))
