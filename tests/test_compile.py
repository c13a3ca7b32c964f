"""Every Triton kernel compiles for sm_90, GPU or not. A module of `kernels` that defines kernels has `specimens()`: a
list of (kernel, signature, constexprs, options), one for each way it is launched. A kernel out of their reach fails.
"""

import importlib
import pkgutil
from types import ModuleType

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import kernels

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024  # bytes of shared memory that one block may use on sm_90


def bare(fn) -> JITFunction:
    """The jitted function below `@triton.autotune` and `@triton.heuristics`."""
    while not isinstance(fn, JITFunction):
        fn = fn.fn
    return fn


def compile_for_hopper(fn, signature: dict, constexprs: dict, options: dict):
    """Compile to a cubin. `signature` types the run-time arguments ("*bf16", "i32"); pointers count as aligned."""
    fn = bare(fn)
    off = {f"{name.lower()}_ptr" for name, value in constexprs.items() if value is False} & set(signature)
    signature = {name: kind for name, kind in signature.items() if name not in off}
    constexprs = constexprs | dict.fromkeys(off)  # launches without a bias, a bitset … pass None for it
    types = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    unknown = (set(signature) | set(constexprs)) - set(fn.arg_names)
    missing = [name for name, kind in types.items() if kind == "constexpr" and name not in constexprs]
    assert not unknown, f"{fn.__name__} has no arguments {unknown}"
    assert not missing, f"{fn.__name__}: neither typed nor constant: {missing}"
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(fn, types, constexprs, aligned)
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_LIMIT, f"{fn.__name__}: {compiled.metadata.shared} bytes of shared memory"
    return compiled


def modules() -> list[ModuleType]:
    return [importlib.import_module(m.name) for m in pkgutil.walk_packages(kernels.__path__, "kernels.")]


def specimens(module: ModuleType) -> list[tuple]:
    return module.specimens() if hasattr(module, "specimens") else []


def jitted(value) -> bool:
    """Whether it is a jitted function, wrapped or not."""
    return isinstance(value, JITFunction) or isinstance(getattr(value, "fn", None), JITFunction)


def called(fn: JITFunction):
    """Jitted functions that `fn` names, its own module's or another's (`tile.product`)."""
    names, scope = fn.fn.__code__.co_names, fn.fn.__globals__
    for name in names:
        value = scope.get(name)
        inside = [getattr(value, n, None) for n in names] if isinstance(value, ModuleType) else []
        yield from (bare(v) for v in (value, *inside) if jitted(v))


def unreached(among: list[ModuleType]) -> set[str]:
    """Jitted functions of these modules that no specimen is or calls, however deep."""
    defined = {bare(v) for module in among for v in vars(module).values() if jitted(v)}
    defined = {fn for fn in defined if fn.fn.__module__ in {module.__name__ for module in among}}
    seen, todo = set(), [bare(fn) for module in among for fn, *_ in specimens(module)]
    while todo:
        fn = todo.pop()
        if fn not in seen:
            seen.add(fn)
            todo += called(fn)
    return {f"{fn.fn.__module__}.{fn.__name__}" for fn in defined - seen}


ALL = [pytest.param(*s, id=f"{m.__name__}.{bare(s[0]).__name__}") for m in modules() for s in specimens(m)]


@pytest.mark.parametrize("fn, signature, constexprs, options", ALL)
def test_kernel_compiles(fn, signature, constexprs, options):
    compile_for_hopper(fn, signature, constexprs, options)


CHAINED = [specimen for specimen in ALL if specimen.values[2].get("PDL")]


@pytest.mark.parametrize("fn, signature, constexprs, options", CHAINED)
def test_a_chained_kernel_waits_first(fn, signature, constexprs, options):
    """Under dependent launch nothing of the kernel before it may be read earlier. Mutants: `begin` after a load; the
    next kernel let go before the wait; launched as if it did not wait."""
    ptx = compile_for_hopper(fn, signature, constexprs, options).asm["ptx"]
    first = min(ptx.find(word) for word in ("ld.global", "st.global", "cp.async") if word in ptx)
    assert options["launch_pdl"] and 0 < ptx.index("griddepcontrol.wait") < ptx.index("launch_dependents") < first


def test_no_kernel_is_left_out():
    assert unreached(modules()) == set()


# The harness itself: it passes a good kernel and fails on a bad one.


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, _twice(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


@triton.jit
def _broken(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


@triton.jit
def _greedy(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    square = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


def test_a_good_kernel_compiles():
    compiled = compile_for_hopper(
        _double, {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}, {"BLOCK": 256}, {"num_warps": 4, "launch_pdl": True}
    )
    assert ".target sm_90" in compiled.asm["ptx"]


def test_a_broken_kernel_fails():
    with pytest.raises(triton.CompilationError):
        compile_for_hopper(_broken, {"x_ptr": "*i32"}, {"BLOCK": 16}, {})


def test_too_much_shared_memory_fails():
    with pytest.raises(AssertionError, match="shared memory"):
        compile_for_hopper(_greedy, dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*fp16"), {"N": 256}, {"num_warps": 8})


def test_a_wrong_signature_fails():
    with pytest.raises(AssertionError, match="neither typed nor constant"):
        compile_for_hopper(_double, {"x_ptr": "*bf16", "y_ptr": "*bf16"}, {"BLOCK": 256}, {})


def test_a_kernel_without_specimen_is_found():
    module = ModuleType(__name__)
    module._double, module._twice, module._broken = _double, _twice, _broken
    module.specimens = lambda: [(_double, {}, {}, {})]
    assert unreached([module]) == {f"{__name__}._broken"}
    module.specimens = lambda: [(_twice, {}, {}, {})]
    assert unreached([module]) == {f"{__name__}._broken", f"{__name__}._double"}
