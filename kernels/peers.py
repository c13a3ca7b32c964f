"""Collectives of ranks on one host through each other's memory (csrc/allreduce): sums with the residual and RMS norm
that follow them, and small gathers; CUDA, bfloat16, usable inside captured graphs.

A call is one launch, without NCCL: every rank writes into the others' memory and reads its own. All ranks must make the
same calls in the same order, each on one stream at a time. A wait is bounded: one that is given up sets a flag of host
memory, and all later sums mean nothing.
"""

import ctypes
from pathlib import Path

import torch

from . import allreduce, native
from .native import Unavailable

VERSION = 2
SIZES = range(2, 9)  # ranks
ONE_SHOT = 64  # rows up to which everybody sends its rows to everybody
ROWS = 512  # rows of a sum
COLUMNS = 8192
# Elements up to which a sum goes in one shot. On two H200s (h200x2-collectives-rows.json in bench/results) 8 x 7168
# took 3.0 us so, but 144 once in fifteen replays; 12 x 7168 took 201, 32 x 7168 took 490, in two shots 4.0 and 6.5.
# What collapses there is not known; in two shots nothing did.
ONE_SHOT_ELEMENTS = 32_768
PATIENCE = 120.0  # seconds: other ranks may still be compiling kernels
HANDLE = 64  # bytes of a cudaIpcMemHandle_t
LANES, PER = 32, 8  # of a warp, columns of a lane

Links = native.structure(
    "Links", p=" ".join(f"inbox{r}" for r in range(8)) + " state abort", z="limit", i="rank size rows columns hopper"
)
Reduction = native.structure("Reduction", p="x residual gamma y normed", f="eps", i="rows columns")


class GaveUp(RuntimeError):
    """A rank waited for another one longer than it may."""


def reference(parts, residual=None, gamma=None, eps=0.0):
    """What the kernel computes, to the bit.

    Args:
        parts: [R, N, D] rows of all ranks; residual: [N, D] or None; gamma: [D] or None.

    Returns:
        y [N, D], the sum; y / rms(y) * gamma where gamma is given, else None.
    """
    y = allreduce.reference(parts, residual)
    if gamma is None:
        return y, None
    (rows, columns), x = y.shape, y.float()
    lanes = torch.nn.functional.pad(x * x, (0, -columns % (LANES * PER))).view(rows, -1, PER)
    sums = lanes[..., 0]
    for j in range(1, PER):
        sums = sums + lanes[..., j]
    warps = _tree(sums.view(rows, -1, LANES))
    total = _tree(torch.nn.functional.pad(warps, (0, LANES - warps.shape[1])))[:, None]
    scale = 1 / torch.sqrt(total / x.new_full((), columns) + x.new_full((), eps))
    return y, (x * scale * gamma.float()).to(y.dtype)


def _tree(x):
    """Sums over the last dimension, LANES of them, by halves."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def shots(size, rows, columns):
    """1 where a sum of `size` ranks sends its rows to everybody, 2 where to one rank that adds them up and sends sums.
    The bits are the same: a matter of time alone, it may depend on the row count."""
    few = rows <= ONE_SHOT and rows * columns <= ONE_SHOT_ELEMENTS
    return 1 if few or rows < size else 2


class Peers:
    """This rank's end of the links between the ranks of one host.

    Args:
        rank, size: of this process; device: its GPU, the current one; columns: the widest row; rows: most in a sum.
        exchange: callable(value) -> [value of each rank], on the host; all ranks construct theirs together.
        announce: callable(line) or None, told when the compiler has to run.

    Raises Unavailable on all ranks, with one reason, where one of them cannot.
    """

    def __init__(self, rank, size, device, columns, exchange, *, rows=ROWS, announce=None):
        self.rank, self.size, self.columns, self.rows, self._exchange = rank, size, columns, rows, exchange
        self._opened, self._own = {}, ctypes.c_void_p()
        self._flag, seen = ctypes.c_void_p(), ctypes.c_void_p()
        share = max(ONE_SHOT, -(-rows // size))
        handles = self._all(lambda: self._make(device, share, seen, announce))
        if len({host for host, _ in handles}) > 1:
            self.close()
            raise Unavailable("the ranks are on several hosts")
        self._all(lambda: self._open([handle for _, handle in handles]))
        self.state = torch.zeros(2, dtype=torch.int64, device=device)
        boxes = {f"inbox{r}": box.value for r, box in self._opened.items()} | {f"inbox{rank}": self._own.value}
        self._links = Links(
            **boxes, state=self.state.data_ptr(), abort=seen.value, rank=rank, size=size, rows=share, columns=columns
        )
        self._links.hopper = int(torch.cuda.get_device_capability(device) >= (9, 0))
        self.wait(PATIENCE)
        self.blocks = torch.cuda.get_device_properties(device).multi_processor_count
        torch.cuda.synchronize(device)
        exchange(None)  # nobody sends before all have opened

    def _all(self, make):
        """make() of every rank, a list; Unavailable on all of them where one could not."""
        try:
            told = self._exchange((make(), None))
        except Unavailable as reason:
            told = self._exchange((None, str(reason)))
        reasons = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(told) if reason is not None]
        if reasons:
            self.close()
            raise Unavailable(reasons[0])
        return [value for value, _ in told]

    def _make(self, device, share, seen, announce):
        """Own inbox and flag -> (the host, the inbox's handle)."""
        if self.size not in SIZES or self.columns > COLUMNS or self.columns % PER:
            raise Unavailable(
                f"{self.size} ranks, rows of {self.columns}; the kernels serve 2 to 8, multiples of {PER}"
            )
        path = native.build(None, announce, "links.cu", torch.cuda.get_device_capability(device))
        self._library = ctypes.CDLL(str(path))
        if (found := self._library.eagle3_links_version()) != VERSION:
            raise Unavailable(f"{path}: version {found} of its interface, expected {VERSION}")
        self._call("eagle3_links_device", torch.cuda.current_device())
        self._library.eagle3_inbox_bytes.restype = ctypes.c_size_t
        size = self._library.eagle3_inbox_bytes(self.size, share, self.columns)
        handle = ctypes.create_string_buffer(HANDLE)
        self._call("eagle3_inbox_make", ctypes.c_size_t(size), ctypes.byref(self._own), handle)
        self._call("eagle3_flag_make", ctypes.byref(self._flag), ctypes.byref(seen))
        return Path("/proc/sys/kernel/random/boot_id").read_text(), handle.raw

    def _open(self, handles):
        for rank, handle in enumerate(handles):
            if rank != self.rank:
                self._opened[rank] = box = ctypes.c_void_p()
                try:
                    self._call("eagle3_inbox_open", ctypes.create_string_buffer(handle, HANDLE), ctypes.byref(box))
                except Unavailable:
                    del self._opened[rank]
                    raise

    def _call(self, name, *arguments):
        """A call that does not launch. Raises Unavailable."""
        if status := getattr(self._library, name)(*arguments):
            raise Unavailable(f"{name}: {self._error(status)}")

    def _error(self, status):
        """A cudaError_t in words."""
        self._library.eagle3_links_error.restype = ctypes.c_char_p
        return f"CUDA error {status}, {self._library.eagle3_links_error(status).decode()}"

    def close(self):
        """Let go of all memory, when no call is running; all ranks do it together."""
        for box in self._opened.values():
            self._library.eagle3_inbox_close(box)
        self._exchange(None)  # nobody's memory goes while another has it open
        if self._own:
            self._library.eagle3_inbox_free(self._own)
        if self._flag:
            self._library.eagle3_flag_free(self._flag)
        self._opened, self._own, self._flag = {}, ctypes.c_void_p(), ctypes.c_void_p()

    def wait(self, seconds):
        """How long a call, from the next launch on, may wait for another rank."""
        self._links.limit = int(seconds * 1e9)

    def check(self):
        """Raises GaveUp where a wait was given up; waits for nothing itself."""
        if told := ctypes.c_int.from_address(self._flag.value).value:
            raise GaveUp(f"waited {self._links.limit / 1e9:g} s for rank {told - 1}")

    def fits(self, x):
        """Whether `sum` takes these rows."""
        rows, columns = x.shape
        return x.dtype == torch.bfloat16 and 0 < rows <= self.rows and columns % PER == 0 and columns <= self.columns

    def sum(self, x, residual=None, gamma=None, eps=0.0, two_shots=None):
        """The twin of `reference`: x [N, D] of this rank -> y, normed or None.

        gamma: a weight; it is read while the launch before this one may still run.
        two_shots: send each row to one rank that adds it up, rather than to all; default: as `shots` says. The bits are
        the same.
        """
        (rows, columns), x = x.shape, x.contiguous()
        y = torch.empty_like(x)
        normed = None if gamma is None else torch.empty_like(x)
        residual = None if residual is None else residual.contiguous()
        given = {"x": x, "residual": residual, "gamma": gamma, "y": y, "normed": normed}
        pointers = {name: None if tensor is None else tensor.data_ptr() for name, tensor in given.items()}
        if two_shots is None:
            two_shots = shots(self.size, rows, columns) > 1
        reduction = Reduction(**pointers, eps=eps, rows=rows, columns=columns)
        self._launch("eagle3_reduce", ctypes.byref(reduction), int(two_shots), self.blocks)
        return y, normed

    def gathers(self, x):
        """Whether `gather` takes this tensor."""
        return x.nbytes % 4 == 0 and 0 < x.nbytes // 4 <= self._links.rows * self.columns // 2

    def gather(self, x):
        """x of all ranks -> [size, *x.shape], any dtype, whole words of 4 bytes."""
        x = x.contiguous()
        y = x.new_empty(self.size, *x.shape)
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
        self._launch("eagle3_gather", *pointers, x.nbytes // 4, self.blocks)
        return y

    def _launch(self, name, *arguments):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if status := getattr(self._library, name)(ctypes.byref(self._links), *arguments, stream):
            raise RuntimeError(f"{name}: {self._error(status)}")
