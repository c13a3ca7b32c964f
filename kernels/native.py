"""CUDA C++ kernels for few rows (csrc/fewrows): built with nvcc at first use, called through ctypes.

`table` gives the operations of an engine whose dtype is bfloat16 on a GPU of compute capability 9.0 or more. Which
kernel serves a matrix follows from its sizes, never from how many rows ride along (design.md, law 1); sizes that no
kernel is built for keep their Triton twin.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

import torch

from . import head, linear, native_latent, native_packed, native_routing
from .native_routing import MOST_EXPERTS
from .routing import Routing
from .structs import filled, structure

ABI = 18
CAPABILITY = (9, 0)
# columns of a projection, with a norm or without (project.cuh)
COLUMNS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 2304, 2880, 4096)
LONG = 512  # other rows: multiples of this
HIDDEN, WIDTHS = (
    (256, 512, 1024, 2048),
    (64, 96, 128, 192, 256, 384, 512, 768, 1024),
)  # of an expert block (experts.cuh)
HEADS = (256, 512, 1024, 2048, 2880, 4096, 7168)  # columns of an output head (head.cuh)
MOST_CHOICES, HELD = 8, 16  # held: rows of a block of them, at most
EARLY = 4  # experts whose activations are handed over early
SHARES = (1, 2, 4, 8)  # query heads a key head serves (attention.cuh)
AHEAD = 1 << 26  # bytes of what follows, at most: a kernel takes as many as it has time for
TILE, RANKS = 64, (6, 8)  # positions of a tile; blocks of a cluster, each of which has two tiles
# positions of the longest page tables that one such cluster serves, the faster: unwritten rows may reach a tile more
SHORT = tuple((2 * ranks - 1) * TILE for ranks in RANKS)
VECTORS = 16  # rows times heads of a part of a block
DEALT, HANDED = 32, 1024  # blocks a group of heads of long tables; vectors whose partials they hand over at a time


class Unavailable(Exception):
    """Why there are no native kernels here, in one line."""


# the structs of csrc/fewrows, field by field
Projection = structure("Projection", p="x gamma weight bias residual y", f="eps", i="rows outputs columns stride")
Attention = structure(
    "Attention",
    p="projected q_gain k_gain cos_sin positions index pages prefix tree sinks keys values y sums",
    f="eps scale",
    i="t heads groups turned columns table page window slots",
)
Vocabulary = structure("Vocabulary", p="x gamma weight logits keys tops sums", f="eps", i="rows vocabulary columns")
Experts = structure(
    "Experts",
    p="x gamma router gate_up down logits packets launch chosen shares hidden early turn residual y following",
    f="eps",
    i="rows columns width experts choices renormalise ahead",
)


def sources():
    """The folder of the CUDA sources: beside this package in a checkout, inside it where it is installed."""
    own = Path(__file__).parent
    return next(path for path in (own / "csrc", own.parent / "csrc") if (path / "binding.cu").is_file())


def build(folder=None, announce=None, binding="binding.cu", capability=CAPABILITY):
    """Compile a library for one kind of GPU, or find it compiled. Raises Unavailable (no nvcc, a compiler's error).

    Args:
        binding: the file of csrc that makes the library; capability: of the GPU.
        folder: where compiled libraries are kept; default: the user's cache.
        announce: callable(line) or None, told when the compiler has to run.

    Returns:
        its path; the name holds a hash of the sources and the compiler's version, so nothing stale is found.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Unavailable("nvcc is not on the PATH")
    here = sources()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    arch = "sm_{}{}".format(*capability)
    digest = hashlib.sha256(f"{version}{binding}{arch}".encode())
    for file in sorted(here.rglob("*.cu*")):
        digest.update(file.read_bytes())
    try:
        folder = Path(folder) if folder else Path.home() / ".cache" / "eagle3-engine"
    except RuntimeError as error:  # no home
        raise Unavailable(str(error)) from None
    path = folder / f"libeagle3-{digest.hexdigest()[:16]}.so"
    if path.is_file():
        return path
    if announce:
        announce("compiling the CUDA C++ kernels, once for this version (about a minute)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [nvcc, "-std=c++17", "-O3", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC", "-o", str(made)]
            done = subprocess.run([*command, str(here / binding)], capture_output=True, text=True, check=False)
            if done.returncode:
                error = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
                raise Unavailable(f"nvcc could not compile csrc: {error}")
            os.replace(made, path)  # whole or not at all, also where several processes build at once
    except OSError as error:
        raise Unavailable(f"{folder}: {error.strerror}") from None
    return path


class Library:
    """The compiled library on one device; every call launches on the current stream.

    Raises Unavailable where it cannot be loaded or holds no code for this GPU.
    """

    def __init__(self, path, device, base):
        """base: the table whose operations serve sizes that no kernel here is built for."""
        self.base = base
        self.behind, self.following = None, {}  # experts whose block ran last; by those, what came next: see `follows`
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path}: {error}") from None
        found = self._library.eagle3_abi_version()
        if found != ABI:
            raise Unavailable(f"{path}: version {found} of its interface, expected {ABI}")
        self._library.eagle3_device(torch.cuda.current_device())
        probe = torch.zeros(1, dtype=torch.int32, device=device)
        status = self._library.eagle3_abi_probe(ctypes.c_void_p(probe.data_ptr()), self._stream())
        if status or int(probe) != ABI:
            raise Unavailable(f"{path}: no code for this GPU (CUDA error {status})")
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        # experts.cuh: what blocks of one launch tell each other, and which launch is next
        self.logits = torch.zeros(HELD, MOST_EXPERTS, dtype=torch.int64, device=device)
        self.launch = torch.ones(1, dtype=torch.int32, device=device)
        # what gate and up hand down before they have ended, where all ones has not come; and whose turn is next
        self.early = torch.full((2, EARLY * 8 * max(WIDTHS)), -1, dtype=torch.int16, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        # merge.cuh: what ranks hand over, zero but while a launch is under way
        self.handed = torch.zeros(HANDED * DEALT * (128 + 8), dtype=torch.float32, device=device)
        tiles = native_routing.MOST_TILES  # router.cuh: likewise, and who has arrived
        self.scores = torch.zeros(tiles * 8, MOST_EXPERTS, dtype=torch.int64, device=device)
        self.routes = torch.ones(tiles, dtype=torch.int32, device=device)
        self.routed = torch.zeros(tiles, dtype=torch.int32, device=device)

    @staticmethod
    def _stream():
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def call(self, name, structure, *numbers, **fields):
        """Launch entry point `name`; fields and numbers as `filled` takes fields. Raises RuntimeError."""
        status = getattr(self._library, name)(ctypes.byref(filled(structure, **fields)), *numbers, self._stream())
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def follows(self, weight):
        """A kernel that asks for `weight` first comes next, of this library or not. Where experts came before it, their
        last kernel brings its beginning into the L2 from their next call on: a hint, which changes no bit."""
        if self.behind is not None:
            self.following[self.behind] = weakref.ref(weight)
        self.behind = None

    # ------------------------------------------------------------------ operations
    def project(self, x, gamma, eps, weight, bias, residual, gated=False):
        """norm(x) W^T + bias + residual, or act(gate) * up of the two halves' products."""
        rows, columns = x.shape
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        y, residual = x.new_empty(rows, outputs), None if residual is None else residual.contiguous()
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:  # 16 bytes are loaded at a time
            x = x.contiguous()
        fields = dict(x=x, gamma=gamma, weight=weight, bias=bias, residual=residual, y=y)
        sizes = dict(eps=eps, rows=rows, outputs=outputs, columns=columns, stride=x.stride(0))
        self.call("eagle3_project", Projection, int(gated), self.blocks, **fields, **sizes)
        return y

    def linear(self, x, weight, bias=None, residual=None):
        """The twin of REFERENCE.linear."""
        self.follows(weight)
        if not _projects(x.shape[1]):
            return self.base.linear(x, weight, bias, residual)
        return self.project(x, None, 0.0, weight, bias, residual)

    def normed(self, x, norm_weight, eps, weight):
        """norm(x) W^T, or x W^T without a norm: the projections of latent attention."""
        self.follows(weight)
        if not _projects(x.shape[1]):
            return linear.project(x, norm_weight, eps, weight)
        return self.project(x, norm_weight, eps, weight, None, None)

    def mlp(self, x, norm_weight, eps, gate_up, down, activation, residual=None):
        """The twin of REFERENCE.mlp."""
        self.follows(gate_up)
        fits = _projects(x.shape[1]) and _projects(down.shape[1])
        if activation != "silu" or not fits:
            return self.base.mlp(x, norm_weight, eps, gate_up, down, activation, residual)
        hidden = self.project(x, norm_weight, eps, gate_up, None, None, gated=True)
        return self.project(hidden, None, 0.0, down, None, residual)

    def attend(
        self, x, norm_weight, eps, weight, bias, q_norm, k_norm, cos_sin, positions, index, pages, page_size,
        k_plane, v_plane, prefix, tree, scale, window=None, sinks=None,
    ):  # fmt: skip
        """The twin of REFERENCE.attend."""
        self.follows(weight)
        (b, t), (_, g, width), turned = positions.shape, k_plane.shape, cos_sin.shape[1]
        heads = weight.shape[0] // width - 2 * g
        fits = width in (64, 128) and heads // g in SHARES and turned % 64 == 0 and v_plane.shape[2] == width
        fits = fits and 2 * VECTORS * g <= HANDED  # those of one block of each group of heads
        if t > 64 or not fits or not _projects(x.shape[1]):
            return self.base.attend(
                x, norm_weight, eps, weight, bias, q_norm, k_norm, cos_sin, positions, index, pages, page_size,
                k_plane, v_plane, prefix, tree, scale, window, sinks,
            )  # fmt: skip
        projected = self.project(x, norm_weight, eps, weight, bias, None)
        y = x.new_empty(b * t, heads * width)
        tree = None if tree is None else tree.contiguous()
        self.call(
            "eagle3_attention", Attention, width, b,
            projected=projected, q_gain=q_norm, k_gain=k_norm, cos_sin=cos_sin, positions=positions.contiguous(),
            index=index.contiguous(), pages=pages, prefix=prefix.contiguous(), tree=tree, sinks=sinks,
            keys=k_plane, values=v_plane, y=y, eps=eps, scale=scale * 1.4426950408889634, t=t, heads=heads, groups=g,
            turned=turned, columns=pages.shape[1], table=pages.stride(0), page=page_size, window=window or 0,
            slots=k_plane.shape[0], sums=self.handed,
        )  # fmt: skip
        return y

    def moe(self, x, norm_weight, eps, gate, rule, bias, correction, gate_up, down, activation, residual):
        """The twin of REFERENCE.moe."""
        (experts, columns, width), rows = down.shape, x.shape[0]
        fits = columns in HIDDEN and width in WIDTHS and experts <= MOST_EXPERTS and activation == "silu"
        plain = rule == Routing(min(rule.top_k, MOST_CHOICES), rule.renormalise) and bias is None and correction is None
        if not (fits and plain):
            return self.base.moe(x, norm_weight, eps, gate, rule, bias, correction, gate_up, down, activation, residual)
        held = 8 if rows <= 8 else HELD  # rows of a block
        blocks, x = -(-rows // held), x.contiguous()
        self.behind = down.data_ptr()
        following = self.following.get(self.behind, lambda: None)()
        ahead = 0 if following is None or following.data_ptr() % 16 else min(following.nbytes, AHEAD)  # bulk copies' 16
        y = torch.empty_like(x)
        self.call(
            "eagle3_experts", Experts, self.blocks,
            x=x, gamma=norm_weight, router=gate, gate_up=gate_up, down=down,
            logits=x.new_empty(rows, experts, dtype=torch.float32), packets=self.logits, launch=self.launch,
            early=self.early, turn=self.turn,
            chosen=x.new_empty(blocks, 1 + held * MOST_CHOICES, dtype=torch.int32),
            shares=x.new_empty(blocks, held * MOST_CHOICES, held, dtype=torch.float32),
            residual=None if residual is None else residual.contiguous(), following=following, ahead=ahead,
            hidden=x.new_empty(blocks, held * MOST_CHOICES, held, width), y=y, eps=eps, rows=rows, columns=columns,
            width=width, experts=experts, choices=rule.top_k, renormalise=int(rule.renormalise),
        )  # fmt: skip
        return y

    def head(self, x, norm_weight, eps, weight, k, logits=None):
        """The twin of head.reference; more than the best one is chosen by the Triton kernels."""
        self.follows(weight)
        (rows, columns), vocabulary = x.shape, weight.shape[0]
        if k != 1 or columns not in HEADS:
            return self.base.head(x, norm_weight, eps, weight, k, logits)
        blocks = self.blocks * (2 if columns <= 2048 else 1)  # narrow rows: two blocks a multiprocessor
        keys = torch.empty(rows, blocks, dtype=torch.int64, device=x.device)
        tops, sums = (torch.empty(rows, blocks, dtype=torch.float32, device=x.device) for _ in range(2))
        self.call(
            "eagle3_head", Vocabulary, blocks, x=x.contiguous(), gamma=norm_weight, weight=weight, logits=logits,
            keys=keys, tops=tops, sums=sums, eps=eps, rows=rows, vocabulary=vocabulary, columns=columns,
        )  # fmt: skip
        return head.finish(keys, tops, sums, 1)


def _projects(columns):
    return columns in COLUMNS or columns % LONG == 0


def table(base, device, announce=None):
    """Operations of `base` (kernels.FUSED) with the native ones in their place. Raises Unavailable.

    announce: as `build` takes it.
    """
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise Unavailable(f"compute capability {major}.{minor}; the kernels need {CAPABILITY[0]}.{CAPABILITY[1]}")
    library = Library(build(announce=announce), device, base)
    names = ("linear", "mlp", "attend", "moe", "head")
    own = {name: getattr(Library, name) for name in names}
    own |= {name: getattr(native_packed, name) for name in ("experts_int4", "moe_int4", "experts_mxfp4")}
    own |= {name: getattr(native_latent, name) for name in ("mla_qkv", "mla_attention")}
    own["route"] = native_routing.route
    own = {name: functools.partial(operation, library) for name, operation in own.items()}
    return replace(base, **own)
