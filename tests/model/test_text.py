"""Text as it is made: whole characters, stop strings wherever the borders of tokens lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis import InputError
from twoaxis.data import ByteTokenizer, train_bpe
from twoaxis.model import TextStream


def pieces_of(stream: TextStream, ids) -> list[str]:
    out = []
    for id_ in ids:
        out.append(stream.add(int(id_)))
        if stream.stopped:
            break
    return [*out, stream.finish()]


@pytest.mark.parametrize("text", ["plain", "naïve 汉字 😀 end", "\ufffd kept", "汉"])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_characters_are_written_whole(text, kind):
    tokenizer = ByteTokenizer() if kind == "byte" else train_bpe(["naïve ends end " * 50], 262)
    pieces = pieces_of(TextStream(tokenizer.decode), tokenizer.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_at_the_end():
    assert pieces_of(TextStream(ByteTokenizer().decode), [*b"a", *"汉".encode()[:2]]) == [
        "a",
        "",
        "",
        "\ufffd",
    ]


def test_noise_is_written_too():
    assert "".join(pieces_of(TextStream(ByteTokenizer().decode), [0xFF] * 20)) == "\ufffd" * 20


def test_what_may_begin_a_stop_string_waits():
    stream = TextStream(lambda ids: "".join(chr(i) for i in ids), ["abc", "bcd"])
    assert [stream.add(ord(c)) for c in "xabababcd"] == ["x", "", "", "ab", "", "ab", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_what_waited_in_vain_is_written():
    stream = TextStream(lambda ids: "".join(chr(i) for i in ids), ["abc"])
    assert [stream.add(ord(c)) for c in "ab"] == ["", ""]
    assert (stream.finish(), stream.stopped) == ("ab", False)


ends = st.lists(st.text("ab汉", min_size=1, max_size=4), max_size=3)


@given(words=st.lists(st.text("ab汉", min_size=1, max_size=5), max_size=8), stop=ends)
def test_borders_of_tokens_do_not_matter(words, stop):
    # tokens of whole words, of characters and of bytes: the same text, and nothing after the first end
    text = "".join(words)
    by_word = "".join(
        pieces_of(TextStream(lambda ids: "".join(words[i] for i in ids), stop), range(len(words)))
    )
    by_byte = "".join(pieces_of(TextStream(ByteTokenizer().decode, stop), text.encode()))
    ended = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    longest = max((len(s) for s in stop if ended and text[: ended[0]].endswith(s)), default=0)
    assert by_word == by_byte == (text[: ended[0] - longest] if ended else text)


@pytest.mark.parametrize("stop", ["word", [""], ["a\ufffd"], [3]], ids=repr)
def test_stop_strings_are_checked(stop):
    with pytest.raises(InputError, match="stop"):
        TextStream(str, stop)
