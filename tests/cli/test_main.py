"""The shell around the commands: dispatch, one-line errors, exit codes, plain output."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
import tyro

import twoaxis
from twoaxis.cli import main as shell
from twoaxis.cli.main import COMMANDS, main
from twoaxis.errors import InputError, RunError


@dataclass
class Args:
    """A command of this test."""

    where: Annotated[str | None, tyro.conf.Positional] = None
    """A place."""
    match: Literal["width", "parameters"] = "width"
    """How."""
    seeds: int = 1
    """How many."""
    depth: tuple[str, ...] = ()
    """Methods."""
    json: bool = False
    """Print JSON."""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Args], int]], None]:
    """Make `twoaxis compare` run a function of the test's."""

    def install(run: Callable[[Args], int]) -> None:
        module = types.SimpleNamespace(Args=Args, run=run)
        monkeypatch.setattr(shell.importlib, "import_module", lambda name: module)

    return install


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("twoaxis: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"twoaxis {twoaxis.__version__}\n"


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compair"]) == 2
    assert "did you mean 'compare'?" in one_line(capsys)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--sed", "3"], ["--sed", "did you mean '--seeds'"], id="unknown-option"),
        pytest.param(["--no-json"], ["--no-json", "--json"], id="negated-flag"),
        pytest.param(["--seeds", "x"], ["--seeds", "'x'", "INT"], id="not-a-number"),
        pytest.param(["--match", "widht"], ["widht", "'width'", "'parameters'"], id="not-a-choice"),
        pytest.param(["--seeds"], ["--seeds", "Missing value"], id="no-value"),
        pytest.param(["here", "there"], ["unexpected argument 'there'"], id="stray-value"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(
    argv: list[str], words: list[str], command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda args: 0)
    assert main(["compare", *argv]) == 2
    line = one_line(capsys)
    assert all(word in line for word in words), line


def test_arguments_reach_the_command(command: Callable[..., None]) -> None:
    seen: list[Args] = []
    command(lambda args: seen.append(args) or 0)
    assert main(["compare", "here", "--seeds", "3", "--depth", "ddl(value_dim=4)", "additive", "--json"]) == 0
    assert seen == [Args(where="here", seeds=3, depth=("ddl(value_dim=4)", "additive"), json=True)]


def test_help_of_a_command_is_not_an_error(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(lambda args: 1)
    assert main(["compare", "--help"]) == 0
    assert "How many." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        pytest.param(InputError("w=0:\nallowed is 1 or more"), 2, "w=0: allowed is 1 or more", id="input"),
        pytest.param(RunError("loss is NaN at step 3"), 1, "loss is NaN at step 3", id="run"),
        pytest.param(KeyboardInterrupt(), 130, "interrupted", id="interrupt"),
        pytest.param(PermissionError(13, "Permission denied", "a/b"), 1, "a/b: Permission denied", id="disk"),
        pytest.param(
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            1,
            "not enough memory (DefaultCPUAllocator: can't allocate memory: 9 bytes); "
            "make the model, batch_size or seq_len smaller",
            id="memory",
        ),
    ],
)
def test_errors_become_one_line_and_a_code(
    error: BaseException,
    code: int,
    line: str,
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: Args) -> int:
        raise error

    command(run)
    assert main(["compare"]) == code
    assert one_line(capsys) == f"twoaxis: {line}\n"


def test_exit_code_of_the_command_is_returned(command: Callable[..., None]) -> None:
    command(lambda args: 1)
    assert main(["compare"]) == 1


def test_every_command_is_a_file_with_args_and_run() -> None:
    for name in COMMANDS:
        module = __import__(f"twoaxis.cli.{name}", fromlist=["run"])
        assert callable(module.run)
        assert module.Args.__doc__


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_refuses_unknown_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: twoaxis {name}" in capsys.readouterr().out
    assert main([name, "--no-such-option"]) == 2
    assert "--no-such-option" in one_line(capsys)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    keep = {k: v for k, v in os.environ.items() if k not in ("LANG", "LC_ALL", "PYTHONUTF8")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**keep, **env}, capture_output=True, timeout=60, check=False
    )


def test_help_does_not_wait_for_torch() -> None:
    words = [[], *([name] for name in COMMANDS if name != "train")]  # train's flags are a model's fields
    code = (
        "import sys\nfrom twoaxis.cli.main import main\n"
        f"codes = [main([*words, '--help']) for words in {words}] + [main(['--version'])]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    assert run_python(code).returncode == 0


def test_public_names_are_there_before_anything_is_loaded() -> None:
    code = (
        "import sys, twoaxis\n"
        "assert 'torch' not in sys.modules and {*twoaxis.__all__} <= {*dir(twoaxis)}\n"
        "assert all(getattr(twoaxis, name) is not None for name in twoaxis.__all__)\n"
        "assert 'ddl' in twoaxis.methods('depth')\n"
        "import twoaxis.train, twoaxis.cost.match\n"
        "assert twoaxis.train.__module__ == 'twoaxis.train.loop' and callable(twoaxis.cost)\n"
        "assert not hasattr(twoaxis, 'nothing')"
    )
    assert run_python(code).stderr == b""


def test_ascii_output_gets_stand_ins_and_no_control_codes() -> None:
    code = (
        "from twoaxis.cli.main import main; import sys, twoaxis.cli.main as m\n"
        "m.usage = lambda: '2.9 ± 0.1 — ╭─╮ λ'\n"
        "sys.exit(main(['--help']))"
    )
    done = run_python(code, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.rstrip() == b"2.9 +- 0.1 - +-+ ?"


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twoaxis", "nothing"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("twoaxis: 'nothing' is not a command")
    assert done.stderr.count("\n") == 1


def test_closed_pipe_is_quiet() -> None:
    code = "import twoaxis.cli.main as m, sys\nm.usage = lambda: 'x' * 1000000\nsys.exit(m.main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1
    process.stderr.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"TWOAXIS_NATIVE": "avx"}, "TWOAXIS_NATIVE='avx': give one of amx, avx512, avx2, plain"),
        ({"TWOAXIS_NATIVE": "avx", "TWOAXIS_BACKEND": "plain"}, "TWOAXIS_NATIVE='avx': give one of"),
        ({"TWOAXIS_BACKEND": "fast"}, "TWOAXIS_BACKEND='fast': give one of auto, native, compiled, plain"),
    ],
    ids=["kernels", "kernels that nobody asks for", "backend"],
)
def test_wrong_environment_is_refused_before_any_work(
    change: dict[str, str],
    said: str,
    command: Callable[[Callable[[Args], int]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    command(lambda args: pytest.fail("it runs"))
    assert main(["compare"]) == 2
    assert said in one_line(capsys)
    assert main(["compare", "--help"]) == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_closed_stream_is_written_nowhere(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, stream, None)  # what Python makes of `>&-` and `2>&-`
    assert main(["--version"]) == 0
    assert main(["nonsense"]) == 2
    getattr(sys, stream).close()
