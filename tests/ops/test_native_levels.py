"""Kernels for other processors than this one: chosen as asked, and right in vectors of 16 and without AVX.

Where a vector is wider than a register, the compiler splits it: the source for AVX-512 runs anywhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from native_cases import needs_kernel

from twoaxis.errors import InputError
from twoaxis.ops import choice
from twoaxis.ops.native import build, levels
from twoaxis.verify.backends import of_operator
from twoaxis.verify.operators import operators
from twoaxis.verify.steps import steps

HERE = Path(__file__).parent
KERNELS = sorted(path.stem for path in build.HERE.glob("*.cpp"))
WIDE = "-DTWOAXIS_WIDTH=16"
AVX2 = "fma avx2 bmi2 f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
PROCESSORS = {
    "old": ("sse4_2 avx", ["plain"]),
    "AVX2": (AVX2, ["avx2", "plain"]),
    "no FMA": ("avx2 bmi2 f16c", ["plain"]),
    "AVX-512": (AVX512, ["avx512", "avx2", "plain"]),
    "first AVX-512": (f"{AVX2} avx512f avx512cd", ["avx2", "plain"]),
    "AMX": (f"{AVX512} amx_tile amx_bf16 amx_int8", ["amx", "avx512", "avx2", "plain"]),
    "AMX hidden by a hypervisor": (f"{AVX512} amx_int8", ["avx512", "avx2", "plain"]),
    "unknown": ("", ["plain"]),
}


@pytest.mark.parametrize(("flags", "found"), PROCESSORS.values(), ids=PROCESSORS)
def test_a_processor_has_levels(flags, found, monkeypatch):
    monkeypatch.delenv("TWOAXIS_NATIVE", raising=False)
    monkeypatch.setattr(levels, "features", lambda: f"flags : {flags}")
    assert list(levels.available()) == found
    assert levels.level() == found[0]
    for asked in levels.FLAGS:
        monkeypatch.setenv("TWOAXIS_NATIVE", asked)
        if asked in found:
            assert levels.level() == asked
        else:
            with pytest.raises(InputError, match=f"TWOAXIS_NATIVE='{asked}': this processor has") as refused:
                levels.level()
            assert str(refused.value).endswith(f"has {', '.join(found)}; give one of these, or leave it out")


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_an_unknown_level_is_refused_by_whoever_needs_a_kernel(backend, monkeypatch):
    monkeypatch.setattr(choice, "_found", {})
    monkeypatch.setenv("TWOAXIS_BACKEND", backend)
    monkeypatch.setenv("TWOAXIS_NATIVE", "avx")
    with pytest.raises(InputError, match="TWOAXIS_NATIVE='avx': give one of amx, avx512, avx2, plain"):
        choice.kernel("mix", (torch.ones(2),))
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    assert choice.kernel("mix", (torch.ones(2),)) is None


@needs_kernel("gates_step")
@pytest.mark.parametrize(
    ("flags", "names"),
    [((*levels.FLAGS[levels.level()], WIDE), ("gates_step", "delta_step", "causal_conv")), ((), ("delta_step",))],
    ids=["vectors of 16", "plain"],
)  # fmt: skip
def test_small_kernels_built_for_others(flags, names, monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    for name in names:
        monkeypatch.setitem(choice._found, name, build.library(name, flags))
    errors = [step.error(torch.float32) for step in steps() if step.kernel in names]
    assert errors
    assert max(errors) < 1e-5
    if "causal_conv" in names:
        (one,) = (one for one in operators() if one.kernel == "causal_conv")
        rows = [row for row in of_operator(one) if row.backend == "native"]
        assert [row.dtype for row in rows] == ["float32", "bfloat16"]
        assert all(row.error is not None and row.passed for row in rows)


@pytest.mark.parametrize("name", [name for name in KERNELS if not name.endswith("_tiles")])
def test_the_compiler_here_takes_every_kernel(name):
    """Tests that need a kernel are skipped without one: that must never be the source's own fault."""
    assert build.REFUSED not in choice.missing(name)


TESTS = sorted(
    path.name for path in HERE.glob("test_native_*.py") if path.stem[12:] not in ("build", "levels")
)


@pytest.mark.full
@needs_kernel("gates_step")
@pytest.mark.parametrize("file", [*TESTS, "test_pulled.py", "test_stream_take.py"])
@pytest.mark.parametrize("kind", ["vectors of 16", *levels.available()[1:]])
def test_the_tests_of_kernels_built_for_others(kind, file):
    """Every kernel's own tests, by a fresh process whose kernels are all of that kind."""
    change = {"KERNEL_FLAGS": WIDE} if kind == "vectors of 16" else {"TWOAXIS_NATIVE": kind}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, cwd=HERE, env=os.environ | change, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def compiled(name, *flags):
    """The assembly of a kernel; a warning is an error."""
    source = str(build.HERE / f"{name}.cpp")
    command = [
        build._compiler(),
        *build.FLAGS,
        *flags,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-S",
        source,
        "-o",
        "-",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return done.stdout


@needs_kernel("gates_step")
def test_kernels_compile_for_avx512_and_tiles():
    assert "%zmm" in compiled("gates_step", *levels.FLAGS["avx512"])
    compiled("local_attention_tiles", *levels.FLAGS["amx"], *levels.TILES, "-fsyntax-only")


@pytest.mark.full
@needs_kernel("gates_step")
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_compiles_for_newer_processors_without_a_warning(name):
    """Vectors of 16 floats are registers there, and products are fused with sums; the transposed copy has neither."""
    lines = compiled(name, *levels.FLAGS["avx512"], "-march=sapphirerapids").splitlines()
    assert any("vfmadd" in line and "%zmm" in line for line in lines) == (name != "transpose")
    assert any("tdpbf16ps" in line for line in lines) == name.endswith("_tiles")
