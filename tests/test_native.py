"""The reductions: the core and NumPy give the same bits, and both are right."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import _native
from phalanx.errors import UnsupportedArray, UnsupportedOp, UsageError
from phalanx.types import ReduceOp

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor")
CASES = [(dtype, op) for dtype in DTYPES for op in _native.valid_ops(dtype) if op != "mean"]
# Where one call of NumPy is the reference: it has no bfloat16, keeps either zero as the smaller float16, and fuses
# complex products on some processors only.
AS_NUMPY = [
    (dtype, op)
    for dtype, op in CASES
    if dtype != "bfloat16"
    and not (dtype == "float16" and op in {"min", "max"})
    and not (dtype in COMPLEX and op == "prod")
]
UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
PART = {"float16": "uint16", "bfloat16": "uint16", "float32": "uint32", "float64": "uint64",
        "complex64": "uint32", "complex128": "uint64"}  # fmt: skip
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 3.0, 65504.0, 1e-7, 6e-8, 1e30, -1e30, 3e38, 1e-40, np.inf, -np.inf, np.nan]

needs_core = pytest.mark.skipif(not _native.available, reason=f"no native core: {_native.why_not}")


@pytest.fixture(params=["core", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing."""
    if request.param == "numpy":
        monkeypatch.setattr(_native, "_core", None)
    elif not _native.available:
        pytest.skip(f"no native core: {_native.why_not}")
    return str(request.param)


def storage(dtype: str) -> np.dtype:
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def samples(dtype: str, count: int, seed: int) -> np.ndarray:
    """Values of every size and sign; floats with zeros, infinities, subnormals and NaNs among them."""
    rng = np.random.default_rng(seed)
    kind = storage(dtype).kind
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    with np.errstate(all="ignore"):
        wide = rng.standard_normal(2 * count) * 10.0 ** rng.integers(-9, 9, 2 * count)
        chosen = rng.random(2 * count) < 0.25
        wide[chosen] = rng.choice(SPECIAL, int(chosen.sum()))
        if kind == "c":
            return wide.astype("float64").view("complex128").astype(dtype)
        if dtype == "bfloat16":
            return (wide[:count].astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return wide[:count].astype(dtype)


def bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """The elements as integers, every NaN as one value: which of two NaNs stays is open."""
    flat = np.ascontiguousarray(x).reshape(-1)
    if dtype not in PART:
        return flat.view("uint8") if dtype == "bool" else flat
    parts = flat.view(PART[dtype]).copy()
    number = (parts.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else flat.view(
        {"uint16": "float16", "uint32": "float32", "uint64": "float64"}[PART[dtype]]
    )  # fmt: skip
    parts[np.isnan(number)] = 0x7FFF
    return parts


def both_ways(run: object, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same call through the core and through NumPy, on copies of `x`."""
    results = []
    core = _native._core
    for way in (core, None):
        _native._core = way
        try:
            y = x.copy()
            run(y)
            results.append(y)
        finally:
            _native._core = core
    return results[0], results[1]


# -- the same bits ---------------------------------------------------------------------------------------------------

INSTRUCTION_SETS = _native._core.instruction_sets() if _native._core is not None else []


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything once for each way in which this build's loops can run here."""
    assert _native._core is not None
    _native._core.use_instruction_set(request.param)
    yield
    _native._core.use_instruction_set(INSTRUCTION_SETS[-1])


@needs_core
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_core_and_numpy_give_the_same_bits(dtype: str, op: str) -> None:
    for count in (0, 1, 2, 3, 7, 8, 17, 511, 512, 513, 70_001):
        a, b = samples(dtype, count, 1), samples(dtype, count, 2)
        core, plain = both_ways(lambda x, b=b: _native.reduce_into(x, b, op, dtype=dtype), a)
        np.testing.assert_array_equal(bits(core, dtype), bits(plain, dtype), err_msg=f"{count} elements")


@needs_core
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
def test_core_and_numpy_divide_to_the_same_bits(dtype: str, n: int) -> None:
    for count in (0, 1, 5, 513, 70_001):
        core, plain = both_ways(lambda x: _native.divide_in_place(x, n, dtype=dtype), samples(dtype, count, 3))
        np.testing.assert_array_equal(bits(core, dtype), bits(plain, dtype), err_msg=f"{count} elements")


@needs_core
@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_is_widened_and_rounded_alike(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(storage(dtype))
    for seed in range(4):
        other = np.random.default_rng(seed).permutation(every)
        for op in ("sum", "prod", "min", "max"):
            core, plain = both_ways(lambda x, o=other, op=op: _native.reduce_into(x, o, op, dtype=dtype), every)
            np.testing.assert_array_equal(bits(core, dtype), bits(plain, dtype), err_msg=op)


@needs_core
def test_the_processors_own_instructions_are_used() -> None:
    flags = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    expected = ["baseline", *(["avx2"] if {"avx2", "f16c"} <= {*flags} else [])]
    expected += ["avx512"] if {"avx512_vbmi2", "avx512bw", "avx512dq", "avx512vl", "f16c"} <= {*flags} else []
    assert expected == INSTRUCTION_SETS


@needs_core
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for processors of this kind the loops are built once")
@pytest.mark.parametrize(("name", "options"), [("avx2", "-mavx2 -mf16c"), ("avx512", "-mavx512f -mavx512bw -mf16c")])
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_loops_for_new_processors_are_for_nobody_else(tmp_path: Path, name: str, options: str, level: str) -> None:
    """An inline function that they share with other files could be linked for the whole program, and crash old ones."""
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("there is no g++ or nm")
    cpp = Path(__file__).parents[1] / "cpp"
    file = tmp_path / "loops.o"
    source = cpp / "phalanx" / f"reduce_{name}.cpp"
    fortified = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"] if level == "-O3" else []  # as distributions build
    command = [compiler, "-std=c++20", level, *fortified, *options.split(), f"-I{cpp}", "-c", source, "-o", file]
    subprocess.run(command, check=True)
    symbols = subprocess.run(["nm", "-C", "--defined-only", file], check=True, capture_output=True, text=True).stdout
    shared = [line.split(maxsplit=2)[2] for line in symbols.splitlines() if line.split(maxsplit=2)[1] in "WVui"]
    assert [one for one in shared if f"phalanx::{name}::" not in one and not one.startswith("DW.ref.")] == []


@needs_core
@pytest.mark.parametrize(("dtype", "op"), CASES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_bytes_give_the_same_bits(dtype: str, op: str, data: st.DataObject) -> None:
    size = storage(dtype).itemsize
    count = data.draw(st.integers(0, 40))
    raw = data.draw(st.binary(min_size=2 * count * size, max_size=2 * count * size))
    a, b = np.frombuffer(raw, storage(dtype)).reshape(2, count)
    if dtype == "bool":
        a, b = a.view(np.uint8) % 2 == 1, b.view(np.uint8) % 2 == 1
    core, plain = both_ways(lambda x: _native.reduce_into(x, b, op, dtype=dtype), a)
    np.testing.assert_array_equal(bits(core, dtype), bits(plain, dtype))


# -- the right values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), AS_NUMPY)
def test_the_result_is_what_numpy_says(way: str, dtype: str, op: str) -> None:
    a, b = samples(dtype, 1000, 4), samples(dtype, 1000, 5)
    with np.errstate(all="ignore"):
        expected = UFUNCS[op](a, b)
    _native.reduce_into(a, b, op)
    np.testing.assert_array_equal(bits(a, dtype), bits(expected, dtype))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_min_and_max_let_a_nan_through(way: str, dtype: str, op: str) -> None:
    a = np.array([np.nan, 1, np.nan, 1, -np.inf, 2] * 3, dtype)
    b = np.array([1, np.nan, np.nan, 2, 3, -np.inf] * 3, dtype)
    expected = UFUNCS[op](a, b)
    _native.reduce_into(a, b, op)
    np.testing.assert_array_equal(a, expected)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_products(way: str, dtype: str) -> None:
    a = np.array([1 + 2j, 3 - 1j, 0j, 1e10 + 1j], dtype)
    b = np.array([2 - 1j, 1 + 1j, 5j, 1e-10 - 1j], dtype)
    expected = a * b
    _native.reduce_into(a, b, "prod")
    np.testing.assert_allclose(a, expected, rtol=1e-6)
    assert a[0] == 4 + 3j


def test_integers_wrap(way: str) -> None:
    a = np.array([127, -128, 100], np.int8)
    _native.reduce_into(a, np.array([1, -1, 100], np.int8), "sum")
    assert a.tolist() == [-128, 127, -56]
    b = np.array([65535, 40000], np.uint16)
    _native.reduce_into(b, np.array([65535, 40000], np.uint16), "prod")  # as int this would overflow
    assert b.tolist() == [1, 40000 * 40000 % 65536]


def test_bfloat16_rounds_to_nearest_even(way: str) -> None:
    def brain(*values: int) -> np.ndarray:
        return np.array(values, np.uint16)

    # 1 + 2^-8 lies between 1 (0x3f80) and 1 + 2^-7 (0x3f81): the even one wins. 1 + 3 * 2^-8 goes up to 0x3f82.
    a = brain(0x3F80, 0x3F81, 0x7F80, 0x7F7F)
    _native.reduce_into(a, brain(0x3B80, 0x3B80, 0xFF80, 0x7F7F), "sum", dtype="bfloat16")
    assert [hex(x) for x in a.tolist()] == ["0x3f80", "0x3f82", "0x7fc0", "0x7f80"]


def test_float16_is_divided_in_float32(way: str) -> None:
    x = np.array([60000.0, 1.0], np.float16)
    _native.divide_in_place(x, 100_000)  # as float16 this divisor would be infinite
    np.testing.assert_array_equal(
        x, (np.array([60000.0, 1.0], np.float16).astype(np.float32) / 100_000).astype(np.float16)
    )
    assert x[0] > 0


def test_reduce_op_and_plain_names_are_the_same(way: str) -> None:
    a, b = np.arange(5.0), np.ones(5)
    _native.reduce_into(a, b, ReduceOp.SUM)
    assert a.tolist() == [1, 2, 3, 4, 5]


# -- every layout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_unaligned_memory(way: str, dtype: str, op: str) -> None:
    a, b = samples(dtype, 100, 6), samples(dtype, 100, 7)
    expected = a.copy()
    _native.reduce_into(expected, b, op, dtype=dtype)
    offset = []
    for x in (a, b):
        memory = np.zeros(x.nbytes + 1, np.uint8)
        memory[1:] = x.view(np.uint8)
        offset.append(memory[1:].view(x.dtype))
    assert dtype in {"bool", "int8", "uint8"} or not offset[0].flags.aligned
    _native.reduce_into(offset[0], offset[1], op, dtype=dtype)
    np.testing.assert_array_equal(bits(offset[0], dtype), bits(expected, dtype))


@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16", "float64", "complex64"])
def test_strided_and_transposed_memory(way: str, dtype: str) -> None:
    a, b = samples(dtype, 600, 8), samples(dtype, 600, 9)
    expected = a.copy()
    _native.reduce_into(expected, b, "prod", dtype=dtype)
    every_other = np.zeros(1200, a.dtype)
    every_other[::2] = a
    _native.reduce_into(every_other[::2], b, "prod", dtype=dtype)
    np.testing.assert_array_equal(bits(every_other[::2], dtype), bits(expected, dtype))
    assert not every_other[1::2].any()

    turned = np.asfortranarray(a.reshape(20, 30))
    _native.reduce_into(turned, b.reshape(20, 30), "prod", dtype=dtype)
    np.testing.assert_array_equal(bits(turned, dtype), bits(expected, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_zero_dimensions_and_strided_division(way: str, dtype: str) -> None:
    x = np.array(6, dtype)
    _native.reduce_into(x, np.array(2, dtype), "prod")
    _native.divide_in_place(x, 3)
    assert x == 4
    y = np.arange(10).astype(dtype)
    _native.divide_in_place(y[::2], 2)
    assert y.tolist() == [0, 1, 1, 3, 2, 5, 3, 7, 4, 9]


def test_an_array_with_itself(way: str) -> None:
    x = np.arange(1000, dtype=np.float32)
    _native.reduce_into(x, x, "sum")
    np.testing.assert_array_equal(x, np.arange(1000, dtype=np.float32) * 2)


def test_bfloat16_arrays_of_another_package(way: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.array([1, 2, 3], ml_dtypes.bfloat16)
    _native.reduce_into(x, np.array([4, 5, 6], ml_dtypes.bfloat16), "sum")
    _native.divide_in_place(x, 2)
    assert x.astype(np.float32).tolist() == [2.5, 3.5, 4.5]


# -- what is refused -------------------------------------------------------------------------------------------------


def test_refusals(way: str) -> None:
    f, i = np.zeros(3, np.float32), np.zeros(3, np.int32)
    with pytest.raises(UnsupportedOp, match=r"op 'band' is not defined for float32 \(valid: sum, prod, min, max\)"):
        _native.reduce_into(f, f, "band")
    with pytest.raises(UnsupportedOp, match=r"op 'min' is not defined for complex64 \(valid: sum, prod\)"):
        _native.reduce_into(f.astype(np.complex64), f.astype(np.complex64), ReduceOp.MIN)
    with pytest.raises(UnsupportedOp, match="'mean' is a sum, then divide_in_place"):
        _native.reduce_into(f, f, "mean")
    with pytest.raises(UnsupportedOp, match="op 'mean' is not defined for int32"):
        _native.divide_in_place(i, 2)
    with pytest.raises(UsageError, match="cannot reduce int32 into float32"):
        _native.reduce_into(f, i, "sum")
    with pytest.raises(UsageError, match=r"cannot reduce shape \(1,\) into shape \(3,\)"):
        _native.reduce_into(f, f[:1], "sum")  # never broadcast
    with pytest.raises(UsageError, match="an array of float32 does not hold bfloat16"):
        _native.reduce_into(f, f, "sum", dtype="bfloat16")
    with pytest.raises(UsageError, match="cannot divide by 0"):
        _native.divide_in_place(f, 0)
    with pytest.raises(UnsupportedArray, match="no reduction exists for dtype >f4"):
        _native.reduce_into(f.astype(">f4"), f.astype(">f4"), "sum")
    with pytest.raises(UnsupportedArray, match="no reduction exists for dtype object"):
        _native.reduce_into(f.astype(object), f.astype(object), "sum")
    f.flags.writeable = False
    with pytest.raises(UnsupportedArray, match="read-only"):
        _native.reduce_into(f, f, "sum")
    with pytest.raises(UnsupportedArray, match="read-only"):
        _native.divide_in_place(f, 2)


def test_valid_ops() -> None:
    assert _native.valid_ops(np.dtype("float32")) == ("sum", "prod", "min", "max", "mean")
    assert _native.valid_ops("bfloat16") == ("sum", "prod", "min", "max", "mean")
    assert _native.valid_ops("int8") == OPS
    assert _native.valid_ops(np.dtype("complex64")) == ("sum", "prod", "mean")
    with pytest.raises(UnsupportedArray, match="no reduction exists for dtype datetime64"):
        _native.valid_ops(np.dtype("datetime64[s]"))


@needs_core
def test_the_core_itself_refuses_what_does_not_fit() -> None:
    core = importlib.import_module("phalanx._core")
    f = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match="differ in size"):
        core.reduce(f, f[:2], 11, 0)
    with pytest.raises(ValueError, match="whole number"):
        core.reduce(f, f, 14, 0)
    with pytest.raises(ValueError, match="unknown dtype"):
        core.reduce(f, f, 99, 0)
    with pytest.raises(ValueError, match="no such operation"):
        core.reduce(f, f, 11, 6)
    with pytest.raises(ValueError, match="no such operation"):
        core.reduce(f, f, 11, -1)
    with pytest.raises(ValueError, match="no division"):
        core.divide(f, 2, 3)
    with pytest.raises(BufferError):
        core.reduce(b"abc", b"abc", 5, 0)
    with pytest.raises(ValueError, match="contiguous"):
        core.reduce(np.zeros(8, np.float32)[::2], np.zeros(4, np.float32), 11, 0)


@needs_core
def test_other_threads_run_during_a_large_reduction() -> None:
    x = np.ones(32 << 20, np.float32)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.0005):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        seen = False
        while not seen and time.monotonic() < deadline:
            before = ticks
            _native.reduce_into(x, x, "max")  # one call into the core: with the GIL held, nobody could tick
            seen = ticks > before + 1
    finally:
        stop.set()
        thread.join()
    assert seen


# -- which way is taken ----------------------------------------------------------------------------------------------


def ask(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout.strip()


def test_the_core_is_used_unless_it_was_turned_off() -> None:
    turned_off = os.environ.get("PHALANX_PURE") == "1" or os.environ.get("PHALANX_BUILD_CORE") == "0"
    assert _native.available is not turned_off, _native.why_not
    assert (_native.why_not is None) is _native.available


def test_phalanx_pure_turns_the_core_off() -> None:
    code = "from phalanx import _native as n; import sys; print(n.available, n.why_not, 'phalanx._core' in sys.modules)"
    assert ask(code, PHALANX_PURE="1") == "False PHALANX_PURE is set False"


def test_a_missing_core_is_no_error() -> None:
    code = (
        "import sys; sys.modules['phalanx._core'] = None\n"
        "import numpy as np; from phalanx import _native as n\n"
        "x = np.ones(2); n.reduce_into(x, x, 'sum'); print(n.available, x.tolist(), n.why_not)"
    )
    answer = ask(code, PHALANX_PURE="0")
    assert answer.startswith("False [2.0, 2.0] phalanx._core cannot be imported")


def test_a_stale_core_is_refused() -> None:
    code = (
        "import sys, types; core = types.ModuleType('phalanx._core'); core.ABI = -1\n"
        "sys.modules['phalanx._core'] = core\n"
        "from phalanx import _native as n; print(n.available, n.why_not)"
    )
    answer = ask(code, PHALANX_PURE="0")
    assert answer == "False phalanx._core is of another build (ABI -1, expected 15); install phalanx again"
