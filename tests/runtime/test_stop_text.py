"""Text cut at stop strings, token by token, against cutting the whole text at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.stop_text import Piece, StopText
from eeplan.runtime.tokenizer import byte_tokenizer

TEXTS = st.text(st.sampled_from("ab\u00e4\U0001f600"), max_size=20)
STOPS = st.lists(st.text(st.sampled_from("ab\u00e4"), min_size=1, max_size=4), max_size=3)


def run(data: bytes, stops: list[str]) -> tuple[list[list[Piece]], StopText]:
    text, released = StopText(byte_tokenizer(), stops), []
    for byte in data:
        released.append(text.push(Emission(byte, "final", 6, 0.5, -1.0), 0.0))
        if text.stopped:
            return released, text
    released.append(text.finish())
    return released, text


def joined(released: list[list[Piece]]) -> str:
    return "".join(piece.text for pieces in released for piece in pieces)


@given(TEXTS, STOPS)
def test_text_is_cut_at_the_stop_that_is_complete_first(whole: str, stops: list[str]) -> None:
    released, text = run(whole.encode(), stops)
    ends = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    first_end = min(ends)[0] if ends else None
    starts = [start for end, start in ends if end == first_end]
    assert joined(released) == (whole[: min(starts)] if starts else whole)
    assert text.stopped == bool(starts)


@given(TEXTS, STOPS)
def test_nothing_is_released_that_may_be_part_of_a_stop(whole: str, stops: list[str]) -> None:
    """What has been sent is a beginning of the final text at every moment."""
    released, _ = run(whole.encode(), stops)
    final, sent = joined(released), ""
    for pieces in released:
        sent += "".join(piece.text for piece in pieces)
        assert final.startswith(sent)


@given(st.binary(max_size=12))
def test_any_bytes_become_the_text_that_decoding_at_once_gives(data: bytes) -> None:
    released, _ = run(data, [])
    assert joined(released) == data.decode("utf-8", errors="replace")
    assert [piece.emission.token for pieces in released for piece in pieces] == list(data)


def test_text_is_held_back_no_longer_than_needed() -> None:
    text = StopText(byte_tokenizer(), ["abc"])
    sent = [
        "".join(piece.text for piece in text.push(Emission(byte, "final", 6, 0.5, -1.0), 0.0))
        for byte in b"xabxabab"
    ]
    assert sent == ["x", "", "", "abx", "", "", "ab", ""]
    assert "".join(piece.text for piece in text.finish()) == "ab"
