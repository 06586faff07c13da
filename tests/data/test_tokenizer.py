import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twoaxis.data import ByteTokenizer, load_corpus, load_tokenizer, train_bpe
from twoaxis.errors import InputError

TEXT = "Füße, война и мир, 红楼梦, 🦉\r\n\tthe the then \0 end"
TRAINING = load_corpus("pydocs").valid[0][:20000]
BPE = train_bpe([TRAINING], 300)
BOTH = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])


def test_byte_ids_are_the_utf8_bytes():
    assert ByteTokenizer().encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert ByteTokenizer().vocab_size == 256


@BOTH
@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back_unchanged(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert all(0 <= id_ < tokenizer.vocab_size for id_ in ids)
    assert tokenizer.decode(ids) == text


@BOTH
def test_invalid_utf8_is_replaced_on_decode(tokenizer):
    ids = tokenizer.encode("a🦉")
    assert tokenizer.decode(ids[:-1]).startswith("a\ufffd")


def test_bpe_has_exactly_the_size_asked_for_and_joins_bytes():
    assert BPE.vocab_size == 300
    assert BPE.name == "bpe:300"
    assert len(BPE.encode(TRAINING)) < 0.8 * len(TRAINING.encode("utf-8"))


def test_training_again_gives_the_same_tokenizer_and_other_text_another():
    assert train_bpe([TRAINING], 300).fingerprint == BPE.fingerprint
    assert train_bpe([TRAINING[:9999]], 300).fingerprint != BPE.fingerprint
    assert ByteTokenizer().fingerprint != BPE.fingerprint


@BOTH
def test_save_and_load_keep_ids_and_fingerprint(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    loaded = load_tokenizer(tmp_path / "new" / "folder")
    assert type(loaded) is type(tokenizer)
    assert (loaded.fingerprint, loaded.name, loaded.vocab_size) == (
        tokenizer.fingerprint,
        tokenizer.name,
        tokenizer.vocab_size,
    )
    assert loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


def test_specs():
    assert load_tokenizer("byte").name == "byte"
    assert load_tokenizer("bpe:300", [TRAINING]).fingerprint == BPE.fingerprint


@pytest.mark.parametrize(
    ("spec", "texts", "words"),
    [
        pytest.param("bytes", None, "byte, bpe:SIZE, or a folder", id="unknown"),
        pytest.param("bpe:", ["x"], "bpe:SIZE", id="no-size"),
        pytest.param("bpe:-1", ["x"], "bpe:SIZE", id="negative"),
        pytest.param("bpe:4096", None, "none was given", id="no-text"),
        pytest.param("bpe:256", ["x"], "at least 257", id="no-merge"),
        pytest.param("bpe:4096", ["the cat"], "bpe:2[0-9]+ or less", id="too-little-text"),
    ],
)
def test_bad_specs_are_refused(spec, texts, words):
    with pytest.raises(InputError, match=words):
        load_tokenizer(spec, texts)


# pitfalls, Saving: "cut a ... file at 0 bytes, inside the header, one byte before the end ->
# one-line message"
@pytest.mark.parametrize("keep", [0, 50, -1])
def test_a_cut_tokenizer_file_is_refused_in_one_line(tmp_path, keep):
    BPE.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError) as error:
        load_tokenizer(tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_foreign_file_with_truncation_still_encodes_everything(tmp_path):
    definition = json.loads(BPE.definition)
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    assert load_tokenizer(tmp_path).encode(TEXT).tolist() == BPE.encode(TEXT).tolist()


@BOTH
@pytest.mark.parametrize("ids", [[300], [-1], [1.0], [[1]], ["a"]], ids=str)
def test_decode_refuses_what_are_not_its_ids(tokenizer, ids):
    with pytest.raises(InputError):
        tokenizer.decode(ids)


@BOTH
def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(InputError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\udcff")


def test_import_does_not_load_the_tokenizers_library():
    code = "import sys, twoaxis.data; sys.exit('tokenizers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
