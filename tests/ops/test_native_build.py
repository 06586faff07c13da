"""Kernels are built where they can be, and nothing breaks where they cannot."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from native_cases import needs_kernel

from twoaxis.errors import InputError
from twoaxis.ops import choice, depth_read
from twoaxis.ops.native import build, call

can_build = pytest.mark.skipif(
    shutil.which("g++") is None or platform.system() != "Linux", reason="needs g++ on Linux"
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with the source of one small kernel, and a cache folder of its own."""
    for name in ("answer.cpp", "simd.h"):
        (tmp_path / name).write_text('extern "C" int answer() { return 42; }' if name == "answer.cpp" else "")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


@pytest.fixture
def fresh(monkeypatch):
    """No kernel was asked for yet in this process."""
    monkeypatch.setattr(choice, "_found", {})
    monkeypatch.setattr(choice, "_noted", set())


def built(tiny: Path) -> list[str]:
    return sorted(os.listdir(tiny / "cache" / "native"))


@can_build
def test_a_kernel_is_built_once_and_then_loaded(tiny, monkeypatch):
    assert build.library("answer").answer() == 42
    (name,) = built(tiny)
    monkeypatch.setattr(build, "_build", None)  # calling it would fail
    assert build.library("answer").answer() == 42
    assert built(tiny) == [name]


@can_build
def test_what_it_was_made_from_is_in_its_name(tiny, monkeypatch):
    """Another processor, compiler, flag, header or source never gets this library."""
    build.library("answer")
    for change in (
        lambda: monkeypatch.setattr(build.levels, "features", lambda: "flags : another processor's"),
        lambda: monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMORE")),
        lambda: (tiny / "simd.h").write_text("// more"),
        lambda: (tiny / "answer.cpp").write_text('extern "C" int answer() { return 43; }'),
    ):
        before = built(tiny)
        change()
        build.library("answer")
        assert len(built(tiny)) == len(before) + 1
    assert build.library("answer").answer() == 43


@can_build
def test_many_may_build_at_once(tiny):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.library("answer").answer(), range(4)))
    assert found == [42] * 4
    assert len(built(tiny)) == 1  # nothing half made is left


@can_build
def test_two_processes_may_build_at_once(tiny):
    code = (
        "from pathlib import Path; from twoaxis.ops.native import build; "
        f"build.HERE = Path({str(tiny)!r}); print(build.library('answer').answer())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [run.communicate(timeout=100) for run in runs] == [(b"42\n", b"")] * 2
    assert len(built(tiny)) == 1


@can_build
def test_a_damaged_library_is_built_again(tiny):
    build.library("answer")
    (name,) = built(tiny)
    path = tiny / "cache" / "native" / name
    whole = path.read_bytes()
    path.unlink()  # it is mapped into this process
    path.write_bytes(whole[:100])
    assert build.library("answer").answer() == 42
    assert path.read_bytes()[:4] == whole[:4]


@can_build
def test_a_read_only_cache_still_serves_what_it_holds(tiny, monkeypatch):
    build.library("answer")
    refuse = PermissionError(13, "Permission denied")
    monkeypatch.setattr(build.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(refuse))
    assert build.library("answer").answer() == 42
    (tiny / "simd.h").write_text("// more")
    with pytest.raises(
        build.UnavailableError, match=r"cannot be used \(Permission denied\); set TWOAXIS_CACHE"
    ):
        build.library("answer")


def test_a_cache_that_is_no_folder(tiny, monkeypatch):
    monkeypatch.setenv("TWOAXIS_CACHE", str(tiny / "answer.cpp"))
    with pytest.raises(build.UnavailableError, match="set TWOAXIS_CACHE to another"):
        build.library("answer")


@can_build
def test_another_users_library_is_not_loaded(tiny, monkeypatch):
    build.library("answer")
    if os.getuid() == 0:  # root can make it another's; others become another
        os.chown(tiny / "cache" / "native" / built(tiny)[0], 4321, -1)
    else:
        monkeypatch.setattr(build.os, "getuid", lambda: 4321)
    with pytest.raises(build.UnavailableError, match="belongs to another user"):
        build.library("answer")


@can_build
def test_a_compiler_that_fails_is_quoted(tiny):
    (tiny / "answer.cpp").write_text("int answer() { return }")
    with pytest.raises(build.UnavailableError, match=r"cannot compile answer\.cpp: .*error: expected"):
        build.library("answer")
    assert built(tiny) == []


REASONS = {
    "no compiler": (lambda m: m.setenv("CXX", "no-such-compiler"), "there is no C\\+\\+ compiler"),
    "macOS": (lambda m: m.setattr(platform, "system", lambda: "Darwin"), "built on Linux on x86-64, not on Darwin"),
    "Windows": (lambda m: m.setattr(platform, "system", lambda: "Windows"), "not on Windows"),
    "another processor": (lambda m: m.setattr(platform, "machine", lambda: "riscv64"), "on riscv64"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), REASONS.values(), ids=REASONS)
def test_where_it_cannot_be_built(change, reason, monkeypatch, fresh, caplog):
    """auto: plain, and one note. native: one clear error."""
    change(monkeypatch)
    sources = (torch.randn(4, 6), torch.randn(4, 6))
    monkeypatch.setenv("TWOAXIS_BACKEND", "plain")
    plain = depth_read(torch.ones(6), sources)
    monkeypatch.setenv("TWOAXIS_BACKEND", "auto")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert depth_read(torch.ones(6), sources).equal(plain)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("operators run as plain PyTorch: ")
    monkeypatch.setenv("TWOAXIS_BACKEND", "native")
    with pytest.raises(InputError, match=reason) as refused:
        depth_read(torch.ones(6), sources)
    assert "\n" not in str(refused.value)
    depth_read(
        torch.ones(6).double(), tuple(x.double() for x in sources)
    )  # not covered: plain under any name


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("TWOAXIS_BACKEND", "fast")
    with pytest.raises(InputError, match="TWOAXIS_BACKEND='fast': give one of auto, native, compiled, plain"):
        depth_read(torch.ones(6), (torch.randn(4, 6),))


def test_addresses_are_given_for_what_they_are_taken_for():
    x = torch.zeros(3, 4)
    assert call.address(x, torch.float32, (3, 4)) == x.data_ptr()
    assert call.address(None, torch.float32, (3, 4)) is None
    released = torch.zeros(3, 4)
    released.untyped_storage().resize_(0)
    shifted = torch.zeros(100, dtype=torch.uint8)[1:49].view(torch.uint8)
    for wrong in (
        x.T, x[:, :3], x.double(), x[:2], x.to("meta"), x[:1].expand(3, 4), released, shifted,
    ):  # fmt: skip
        with pytest.raises((TypeError, RuntimeError)):
            call.address(wrong, torch.float32, (3, 4))


FORKED = """
import os, sys, torch
from twoaxis.ops import depth_read
torch.set_num_threads(2)
xs = [torch.randn(99, 24).requires_grad_() for _ in range(3)]
def step():
    return torch.autograd.grad(depth_read(torch.ones(24), xs).sum(), xs)[0]
before = step()  # starts OpenMP's threads
child = os.fork()
if child == 0:
    from twoaxis.ops.native.call import threads
    out = depth_read(torch.ones(24), [x.detach() for x in xs])
    os._exit(0 if threads() == 1 and out.isfinite().all() else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


SPAWNED = """
import torch
from torch.utils.data import DataLoader
from twoaxis.ops import depth_read

class Reads(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return depth_read(torch.ones(24), [torch.full((99, 24), float(i + j)) for j in range(3)])

if __name__ == "__main__":
    torch.set_num_threads(2)
    alone = [Reads()[i] for i in range(4)]
    for start in ("fork", "spawn"):
        loader = DataLoader(Reads(), batch_size=None, num_workers=2, multiprocessing_context=start)
        assert all(torch.equal(a, b) for a, b in zip(alone, loader, strict=True)), start
"""


@needs_kernel("depth_read")
@pytest.mark.full
def test_workers_of_a_data_loader(tmp_path):
    """Kernels inside forked and spawned workers, after they ran in the parent."""
    (tmp_path / "workers.py").write_text(SPAWNED)
    environment = os.environ | {"TWOAXIS_BACKEND": "native", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, str(tmp_path / "workers.py")], check=True, timeout=100, env=environment)


@needs_kernel("depth_read")
def test_a_forked_child_does_not_hang():
    environment = os.environ | {"TWOAXIS_BACKEND": "native", "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=100, env=environment)
