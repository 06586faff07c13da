import json
import math

import numpy as np
import pytest

from twoaxis.data import ByteTokenizer, TokenFile, check_vocab, tokenize
from twoaxis.data.tokens import PREFIX
from twoaxis.errors import InputError, RunError


def pack(*documents, vocab_size=256, n_bytes=1):
    return TokenFile.pack(documents, vocab_size=vocab_size, n_bytes=n_bytes, tokenizer="t", fingerprint="f")


# pitfalls, Data files: "vocabulary 70000, token 65536 and 69999 written and read -> type is chosen from the
# vocabulary and stored in the file header; an id outside it is an error at write time"
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32"), (70000, "uint32")],
)
def test_dtype_follows_the_vocabulary_and_ids_survive(tmp_path, vocab_size, dtype):
    ids = sorted({0, vocab_size - 1, min(65536, vocab_size - 1)})
    tokens = pack(ids, vocab_size=vocab_size).write(tmp_path / "a.tokens")
    assert isinstance(tokens.ids, np.memmap)
    assert tokens.ids.dtype == dtype
    assert tokens.ids.tolist() == ids
    assert tokens.largest_id == vocab_size - 1
    raw = (tmp_path / "a.tokens").read_bytes()
    header = json.loads(raw[PREFIX.size :][: PREFIX.unpack_from(raw)[2]])
    assert (header["dtype"], header["vocab_size"]) == (dtype, vocab_size)


@pytest.mark.parametrize(("id_", "vocab_size"), [(70000, 70000), (65536, 65536), (256, 256), (-1, 256)])
def test_an_id_outside_the_vocabulary_is_refused_at_write(id_, vocab_size):
    with pytest.raises(InputError, match=f"document 1 has id {id_}, outside the vocabulary of {vocab_size}"):
        pack([0], [1, id_], vocab_size=vocab_size)


@pytest.mark.parametrize("ids", [[0.5], [[1]], ["a"], [True]], ids=str)
def test_only_whole_number_ids_are_packed(ids):
    with pytest.raises(InputError, match="document 0"):
        pack(ids)


@pytest.mark.parametrize("vocab_size", [0, -1, True, 2.0, 2**32 + 1])
def test_a_bad_vocabulary_is_refused(vocab_size):
    with pytest.raises(InputError, match="vocab_size"):
        pack([0], vocab_size=vocab_size)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_documents_bytes_and_tokenizer_are_kept(tmp_path, on_disk):
    tokenizer = ByteTokenizer()
    tokens = tokenize(["né", "", "abc"], tokenizer)
    tokens = tokens.write(tmp_path / "a.tokens") if on_disk else tokens
    assert tokens.ids.tolist() == list("néabc".encode())
    assert tokens.documents.tolist() == [0, 3, 6]  # the empty document is left out
    assert (tokens.n_tokens, tokens.n_bytes, tokens.bytes_per_token) == (6, 6, 1.0)
    assert (tokens.tokenizer, tokens.fingerprint) == ("byte", tokenizer.fingerprint)
    assert tokens.path == (tmp_path / "a.tokens" if on_disk else None)


def test_an_empty_split_can_be_written_and_read(tmp_path):
    tokens = pack().write(tmp_path / "a.tokens")
    assert (tokens.n_tokens, tokens.documents.tolist(), tokens.largest_id) == (0, [0], -1)


def test_digest_tells_ids_borders_and_tokenizers_apart():
    digests = {
        pack([1, 2, 3]).digest,
        pack([1, 2], [3]).digest,
        pack([1, 3, 2]).digest,
        TokenFile.pack([[1, 2, 3]], vocab_size=256, n_bytes=1, tokenizer="t", fingerprint="g").digest,
    }
    assert len(digests) == 4
    assert pack([1, 2, 3]).digest == pack([1, 2, 3]).digest


# pitfalls, Saving: "cut a ... file at 0 bytes, inside the header, one byte before the end -> one-line
# message: file, expected and found size, what to do"
@pytest.mark.parametrize(
    "keep", [0, 5, 12, 40, -1], ids=["empty", "in-magic", "in-prefix", "in-header", "last-byte"]
)
def test_a_cut_file_is_refused_in_one_line(tmp_path, keep):
    path = tmp_path / "a.tokens"
    pack([1, 2, 3]).write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(RunError) as error:
        TokenFile.read(path)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    assert f"found {len(whole[:keep])} bytes" in message
    assert "delete it" in message
    if keep == -1:
        assert f"expected {len(whole)} bytes" in message


def test_a_file_that_is_too_long_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    pack([1, 2, 3]).write(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(RunError, match="is damaged: expected"):
        TokenFile.read(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(b'{"tokenizer"', b'["tokenizer"', id="not-json"),
        pytest.param(b'"n_tokens"', b'"n_tukens"', id="missing-field"),
        pytest.param(b'"uint8"', b'"int64"', id="wrong-dtype"),
        pytest.param(b'"vocab_size": 256', b'"vocab_size": -56', id="wrong-vocabulary"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, old, new):
    path = tmp_path / "a.tokens"
    pack([1, 2, 3]).write(path)
    raw = path.read_bytes()
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(RunError, match="a readable header"):
        TokenFile.read(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("hello, this is text")
    with pytest.raises(InputError, match="not a token file"):
        TokenFile.read(tmp_path / "a.txt")
    with pytest.raises(InputError, match="cannot read token file"):
        TokenFile.read(tmp_path / "none.tokens")
    (tmp_path / "new.tokens").write_bytes(PREFIX.pack(b"twoaxTOK", 99, 0))
    with pytest.raises(InputError, match="version 99"):
        TokenFile.read(tmp_path / "new.tokens")


# pitfalls, Saving: "the write fails halfway -> previous ... intact, partial files removed"
def test_a_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path, monkeypatch):
    path = tmp_path / "a.tokens"
    pack([1, 2, 3]).write(path)

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space") as refused:
        pack([4]).write(path)
    assert refused.value.filename == str(path)
    assert TokenFile.read(path).ids.tolist() == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


# pitfalls, Data files: "data with id 300 and a model vocabulary of 256 -> error before step 1 naming the
# largest id and both vocabularies; tokenizer name/hash in the data header is compared with the model's"
def test_data_beyond_the_models_vocabulary_are_refused():
    tokens = pack([7, 300], vocab_size=400)
    with pytest.raises(InputError) as error:
        check_vocab(tokens, 256)
    assert all(number in str(error.value) for number in ("300", "400", "256"))
    check_vocab(tokens, 400)
    check_vocab(tokens, 512)  # a padded model vocabulary is fine


def test_data_of_another_tokenizer_are_refused():
    tokens = pack([7])
    check_vocab(tokens, 256, fingerprint="f")
    with pytest.raises(InputError, match="tokenizer"):
        check_vocab(tokens, 256, fingerprint="other")


def test_bits_per_byte_is_total_bits_over_bytes():
    tokens = pack(range(10), n_bytes=40)  # 4 bytes per token
    assert tokens.bits_per_byte(10 * math.log(2), 10) == pytest.approx(10 / 40)
    # all 9 targets at one rate: the token that is no target counts at that rate, too
    assert tokens.bits_per_byte(9 * math.log(2), 9) == pytest.approx(1 / 4)
    with pytest.raises(InputError, match="n_targets"):
        tokens.bits_per_byte(0.0, 0)
