"""`twoaxis generate`: text as it is made, the same for the same seed."""

import pytest
import torch

import twoaxis.train
from configurations import Case
from twoaxis.cli.generate import Typewriter
from twoaxis.cli.main import main
from twoaxis.data import ByteTokenizer, train_bpe


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run folder whose model is untrained."""
    model = Case("additive", "local to global").model(torch.float32, vocab_size=256)

    def load_run(folder):
        assert folder == tmp_path
        return model, ByteTokenizer(), None

    monkeypatch.setattr(twoaxis.train, "load_run", load_run)
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
        written(capsys, folder, "--prompt", "x", "--max-new-tokens", "40", "--seed", seed) for seed in "112"
    )
    assert first == again != other
    assert written(capsys, folder, "--prompt", "none", "--max-new-tokens", "0") == "none\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--temperature", "-1"], "temperature=-1.0: allowed is 0 or more"),
        (["--top-k", "0"], "top_k=0"),
        (["--top-p", "2"], "top_p=2.0"),
        (["--max-new-tokens", "-3"], "max_new_tokens=-3"),
        (["--temprature", "1"], "--temperature"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(capsys, run, argv, message):
    assert main(["generate", run[1], *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_folder_that_is_no_run(capsys, tmp_path):
    assert main(["generate", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["plain", "naïve 汉字 😀 end", "\ufffd kept", "汉"])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_characters_are_written_whole(text, kind):
    tokenizer = ByteTokenizer() if kind == "byte" else train_bpe(["naïve ends end " * 50], 262)
    pieces: list[str] = []
    writer = Typewriter(tokenizer, pieces.append)
    for id_ in tokenizer.encode(text):
        writer(int(id_))
    writer.finish()
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end():
    pieces: list[str] = []
    writer = Typewriter(ByteTokenizer(), pieces.append)
    for id_ in [*b"a", *"汉".encode()[:2]]:
        writer(id_)
    assert pieces == ["a"]
    writer.finish()
    assert pieces == ["a", "\ufffd"]


def test_noise_is_written_too():
    pieces: list[str] = []
    writer = Typewriter(ByteTokenizer(), pieces.append)
    for id_ in [0xFF] * 20:
        writer(id_)
    writer.finish()
    assert "".join(pieces) == "\ufffd" * 20
