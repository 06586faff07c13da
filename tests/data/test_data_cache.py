import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from twoaxis.data import ByteTokenizer, Corpus, TokenFile, cache_folder, load_corpus, prepare, train_bpe
from twoaxis.errors import RunError

TEXT = "Füße, война и мир, 红楼梦, 🦉\n" * 20
CORPUS = Corpus("mine", (TEXT, "two"), ("held out",))
BYTE = ByteTokenizer()


def test_both_splits_are_built_once_and_then_read(tmp_path, monkeypatch):
    train, valid = prepare(CORPUS, BYTE, tmp_path)
    assert BYTE.decode(train.ids) == TEXT + "two"
    assert BYTE.decode(valid.ids) == "held out"
    monkeypatch.setattr("twoaxis.data.cache.tokenize", None)  # calling it would fail
    again = prepare(CORPUS, BYTE, tmp_path)
    assert [tokens.path for tokens in again] == [train.path, valid.path]
    assert [tokens.digest for tokens in again] == [train.digest, valid.digest]


def test_other_text_borders_or_tokenizers_get_other_files(tmp_path):
    corpora = [
        CORPUS,
        Corpus("mine", (TEXT + "two",), ("held out",)),
        Corpus("mine", (TEXT, "twO"), ("held out",)),
    ]
    paths = {prepare(corpus, BYTE, tmp_path)[0].path for corpus in corpora}
    paths.add(prepare(CORPUS, train_bpe([TEXT], 260), tmp_path)[0].path)
    assert len(paths) == 4


def test_any_corpus_name_makes_a_plain_file_name(tmp_path):
    train, _ = prepare(Corpus("../a b/ü:*", ("x",), ()), BYTE, tmp_path)
    assert train.path.parent == tmp_path
    assert train.path.name.isascii()


def test_a_missing_split_is_an_empty_file(tmp_path):
    train, valid = prepare(load_corpus("pydocs/valid"), BYTE, tmp_path)
    assert (train.n_tokens, valid.n_tokens) == (0, 62853)


def test_a_damaged_cache_file_is_not_used(tmp_path):
    train, _ = prepare(CORPUS, BYTE, tmp_path)
    train.path.write_bytes(train.path.read_bytes()[:-1])
    with pytest.raises(RunError, match="delete it"):
        prepare(CORPUS, BYTE, tmp_path)


def no_folder(tmp_path):
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "cache"


@pytest.mark.parametrize("cache", [no_folder, None], ids=["not-writable", "no-home"])
def test_without_a_usable_folder_tokens_stay_in_memory_with_one_note(tmp_path, monkeypatch, caplog, cache):
    monkeypatch.delenv("TWOAXIS_CACHE", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what Python does without any home
    with caplog.at_level(logging.WARNING):
        train, valid = prepare(CORPUS, BYTE, cache and cache(tmp_path))
    assert train.path is None
    assert valid.path is None
    assert BYTE.decode(train.ids) == TEXT + "two"
    assert len(caplog.records) == 1
    assert "in memory" in caplog.text
    assert "TWOAXIS_CACHE" in caplog.text


def test_the_default_folder_is_the_environments_else_the_home_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("TWOAXIS_CACHE")
    assert cache_folder() == tmp_path / ".cache" / "twoaxis"


def test_writers_at_once_leave_whole_files_only(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: prepare(CORPUS, BYTE, tmp_path), range(16)))
    assert len({train.digest for train, _ in results}) == 1
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".tokens", ".tokens"]
    assert all(BYTE.decode(TokenFile.read(train.path).ids) == TEXT + "two" for train, _ in results)


# pitfalls, Data files: "UTF-8 text with Chinese, Russian, emoji, run under an ASCII locale -> same ids
# everywhere"; the two processes also fill one cache at once
def test_ids_are_the_same_under_an_ascii_locale(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "красный.txt").write_bytes(TEXT.encode("utf-8"))
    (tmp_path / "text" / "红.txt").write_bytes(b"\xef\xbb\xbfred\r\n" + "🦉".encode())
    code = """
import json, locale, sys
from twoaxis.data import load_corpus, load_tokenizer, prepare
corpus = load_corpus(sys.argv[1], valid_fraction=0.3)
tokenizer = load_tokenizer(sys.argv[2], corpus.train)
ids = [tokens.ids.tolist() for tokens in prepare(corpus, tokenizer, sys.argv[3])]
tokenizer.save(sys.argv[4])
print(json.dumps([locale.getpreferredencoding(False), tokenizer.fingerprint, ids]))
"""
    arguments = [str(tmp_path / "text"), "bpe:280", str(tmp_path / "cache")]
    unset = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("LC_", "LANG", "PYTHONUTF8", "PYTHONIOENCODING"))
    }
    locales = {
        "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "utf-8": {"PYTHONUTF8": "1"},
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments, str(tmp_path / name)],
            env={**unset, **variables},
            stdout=subprocess.PIPE,
        )
        for name, variables in locales.items()
    ]
    (encoding, *ascii_result), (other, *utf8_result) = (json.loads(p.communicate()[0]) for p in running)
    assert all(process.returncode == 0 for process in running)
    assert encoding.lower().replace("-", "") != other.lower().replace("-", "")  # the locales do differ
    assert ascii_result == utf8_result
    assert (tmp_path / "ascii/tokenizer.json").read_bytes() == (
        tmp_path / "utf-8/tokenizer.json"
    ).read_bytes()
