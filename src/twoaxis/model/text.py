"""From ids to text as they are made: whole characters only, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twoaxis.errors import InputError

Decode = Callable[[list[int]], str]
_LONGEST = 8  # ids that an unfinished character may take: it has at most 4 bytes


class TextStream:
    """Text of ids that come one by one.

    decode: ids -> text, with U+FFFD for the bytes of an unfinished character. stop: the text ends before the
    first of these strings to be completed, wherever the borders of tokens lie; of two that are completed by
    the same character, before the longer.

    Raises InputError for a stop string that is empty or holds U+FFFD.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self.decode, self.stop = decode, tuple(check_stop(stop))
        self.stopped = False
        self._ids: list[int] = []  # of an unfinished character
        self._held = ""  # may be the beginning of a stop string

    def add(self, id_: int) -> str:
        """Take one more id; return the text that is certain by now."""
        self._ids.append(id_)
        text = self.decode(self._ids)
        if text.endswith("\ufffd") and len(self._ids) < _LONGEST:
            return ""
        self._ids = []
        return self._take(text)

    def finish(self) -> str:
        """The text still held back, finished or not."""
        text = self._take(self.decode(self._ids)) if self._ids and not self.stopped else ""
        rest, self._ids, self._held = text + self._held, [], ""
        return rest

    def _take(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(s), at) for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[len(text) - n :])), 0)


def check_stop(stop: Sequence[str]) -> Sequence[str]:
    """The stop strings, checked."""
    if isinstance(stop, str):
        raise InputError(f"stop={stop!r}: give a list of strings")
    for s in stop:
        if not isinstance(s, str) or not s or "\ufffd" in s:
            raise InputError(f"stop string {s!r}: allowed is text of one character or more, without U+FFFD")
    return stop
