"""`twoaxis generate`: text as it is made, the same for the same seed."""

import sys

import pytest
import torch

import twoaxis
from configurations import Case
from twoaxis.cli.main import main
from twoaxis.data import ByteTokenizer


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run folder whose model is untrained."""
    model = Case("additive", "local to global").model(torch.float32, vocab_size=256)

    def load_run(folder):
        assert folder == tmp_path
        return model, ByteTokenizer(), None

    monkeypatch.setattr(sys.modules["twoaxis.train"], "load_run", load_run)  # the name is the function's
    return model, str(tmp_path)


def written(capsys, *argv: str) -> str:
    assert main(["generate", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_prompt_and_what_follows(capsys, run):
    model, folder = run
    text = written(capsys, folder, "--prompt", "To be", "--max-new-tokens", "20", "--temperature", "0")
    tokens = torch.tensor([list(b"To be")])
    made = twoaxis.generate(model, tokens, 20)[0].tolist()
    assert text == bytes(made).decode("utf-8", errors="replace") + "\n"


def test_a_seed_fixes_the_text(capsys, run):
    _, folder = run
    first, again, other = (
        written(capsys, folder, "--prompt", "x", "--max-new-tokens", "15", "--seed", seed) for seed in "112"
    )
    assert first == again != other
    assert written(capsys, folder, "--prompt", "none", "--max-new-tokens", "0") == "none\n"


def test_streamed_text_is_the_same(capsys, run):
    for more in ([], ["--stop", "e", "xq"], ["--temperature", "0", "--prompt-lookup", "4"]):
        argv = [run[1], "--prompt", "To be, to be", "--max-new-tokens", "30", *more]
        assert written(capsys, *argv) == written(capsys, *argv, "--stream")


def test_text_ends_before_a_stop_string(capsys, run):
    free = written(capsys, run[1], "--max-new-tokens", "40", "--prompt", "x")
    stop = next(c for c in free[5:] if c.isascii() and c.isalnum())
    cut = written(capsys, run[1], "--max-new-tokens", "40", "--prompt", "x", "--stop", "never", stop)
    assert cut == "x" + free[1:].split(stop)[0] + "\n"


def test_prompt_lookup_writes_the_greedy_text(capsys, run):
    argv = [run[1], "--prompt", "abcabcabc", "--temperature", "0", "--max-new-tokens", "60"]
    assert written(capsys, *argv, "--prompt-lookup", "5") == written(capsys, *argv)


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["", "stream"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--temperature", "-1"], "temperature=-1.0: allowed is 0, or 1e-30 or more"),
        (["--temperature", "1e-320"], "temperature=1e-320: allowed is 0, or 1e-30 or more"),
        (["--seed", "99999999999999999999"], "--seed 99999999999999999999: allowed is 0 to"),
        (["--top-k", "0"], "top_k=0"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--max-new-tokens", "-3"], "max_new_tokens=-3"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0: allowed is above 0"),
        (["--stop", ""], "stop string ''"),
        (["--prompt-lookup", "3"], "it needs temperature=0"),
        (["--temprature", "1"], "--temperature"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(capsys, run, argv, message, stream):
    assert main(["generate", run[1], *argv, *stream]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_folder_that_is_no_run(capsys, tmp_path):
    assert main(["generate", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
