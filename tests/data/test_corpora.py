import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest

from twoaxis.data import CORPORA, load_corpus
from twoaxis.errors import InputError

TEXT = "Füße, война и мир, 红楼梦, 🦉\n"


def write(path, raw):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode("utf-8"))
    return path


@pytest.mark.parametrize("name", CORPORA)
def test_shipped_corpora_are_the_ones_the_readme_describes(name):
    folder = files("twoaxis.data").joinpath("corpora")
    table = dict(
        re.findall(r"`([a-z-]+\.txt)` \|.*`([0-9a-f]{64})`", folder.joinpath("README.md").read_text("utf-8"))
    )
    corpus = load_corpus(name)
    for split, documents in (("train", corpus.train), ("valid", corpus.valid)):
        assert len(documents) == 1
        assert hashlib.sha256(documents[0].encode("utf-8")).hexdigest() == table[f"{name}-{split}.txt"]


def test_the_licence_ships_beside_the_texts():
    licence = files("twoaxis.data").joinpath("corpora", "LICENSE-PSF.txt").read_text("utf-8")
    assert "Python Software Foundation" in licence


def test_one_split_of_a_name_or_path(tmp_path):
    whole = load_corpus("shakespeare")
    assert load_corpus("shakespeare/valid").valid == whole.valid
    assert load_corpus("shakespeare/valid").train == ()
    assert load_corpus("shakespeare/train").valid == ()
    path = write(tmp_path / "a.txt", "x" * 100)
    assert load_corpus(f"{path}/valid").valid == ("x" * 5,)
    assert load_corpus(f"{path}/valid").train == ()


def test_a_real_folder_named_valid_is_a_path(tmp_path):
    write(tmp_path / "valid" / "a.txt", "y" * 20)
    assert load_corpus(tmp_path / "valid").train == ("y" * 19,)


def test_a_shipped_name_wins_over_a_folder_unless_it_is_written_as_a_path(tmp_path, monkeypatch):
    write(tmp_path / "pydocs" / "a.txt", "mine")
    monkeypatch.chdir(tmp_path)
    assert load_corpus("pydocs").train[0].startswith(".. _tut-appendix")
    assert load_corpus("./pydocs", valid_fraction=0).train == ("mine",)


def test_a_folder_is_read_recursively_in_byte_order_without_hidden_and_empty_files(tmp_path):
    for name in ("b.txt", "B.txt", "a/z.txt", "é.txt", ".hidden", ".git/x", "a/empty.txt"):
        write(tmp_path / name, "" if "empty" in name else f"<{name}>")
    corpus = load_corpus(tmp_path, valid_fraction=0)
    assert corpus.train == ("<B.txt>", "<a/z.txt>", "<b.txt>", "<é.txt>")
    assert corpus.valid == ()


@pytest.mark.parametrize("fraction", [0, 0.05, 0.1, 0.25, 0.5, 0.77, 1])
def test_hold_out_cuts_at_a_character_and_loses_nothing(tmp_path, fraction):
    write(tmp_path / "1.txt", TEXT)
    write(tmp_path / "2.txt", "🦉🦉")
    corpus = load_corpus(tmp_path, fraction)
    assert "".join(corpus.train + corpus.valid) == TEXT + "🦉🦉"
    total = len((TEXT + "🦉🦉").encode())
    held = len("".join(corpus.valid).encode())
    assert 0 <= total * fraction - held < 4  # less than one byte of rounding and the rest of a character


# pitfalls, Data files: "invalid bytes, byte-order mark, NUL and CRLF have a stated treatment"
def test_byte_order_mark_is_dropped_and_crlf_becomes_lf(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + f"{TEXT}a\r\nb\rc\n\r\n\ufeff".encode())
    assert load_corpus(path, 0).train == (f"{TEXT}a\nb\rc\n\n\ufeff",)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        pytest.param("ü€".encode() + b"\xff.", ["not UTF-8", "0xff", "at byte 5"], id="invalid-byte"),
        pytest.param("ab€".encode()[:-1], ["not UTF-8", "at byte 2"], id="cut-character"),
        pytest.param(b"\xed\xa0\x80", ["not UTF-8", "at byte 0"], id="surrogate"),
        pytest.param(b"\xef\xbb\xbfab\0c", ["NUL", "at byte 5"], id="nul-after-bom"),
        pytest.param("hi".encode("utf-16-be"), ["NUL", "at byte 0"], id="utf-16"),
    ],
)
def test_bad_bytes_are_refused_with_file_and_offset(tmp_path, raw, words):
    write(tmp_path / "good.txt", "good")
    path = write(tmp_path / "sub" / "bad.txt", raw)
    with pytest.raises(InputError) as error:
        load_corpus(tmp_path)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in [str(path), *words])


@pytest.mark.parametrize(
    "given", ["shakespear", "shakespeare/test", "Shakespeare/valid", "", "no/such/folder"]
)
def test_an_unknown_name_lists_the_known_ones(given):
    with pytest.raises(InputError, match="known corpora: pydocs, shakespeare"):
        load_corpus(given)


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(InputError, match="did you mean 'shakespeare'"):
        load_corpus("shakespear/valid")


def test_a_path_without_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no text"):
        load_corpus(tmp_path)
    with pytest.raises(InputError, match="holds no text"):
        load_corpus(write(tmp_path / "empty.txt", b"\xef\xbb\xbf"))


@pytest.mark.parametrize("fraction", [-0.1, 1.01, True, float("nan")])
def test_valid_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(InputError, match="valid_fraction"):
        load_corpus("pydocs", fraction)


def test_a_folder_too_large_to_read_is_refused_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x00" * 30)  # would be refused for its NULs if it were read
    monkeypatch.setattr("twoaxis.data.corpora.LARGEST", 29)
    with pytest.raises(InputError, match="read into memory"):
        load_corpus(str(tmp_path))
