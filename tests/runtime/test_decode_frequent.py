"""Frequent tokens: counted in what is there, by the checkpoint's own tokenizer, or refused in a line."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_data import build_small, run_for

from eeplan.errors import DataError, DecodeError
from eeplan.runtime.data import DataFiles, build_from_texts
from eeplan.runtime.decode.frequent import AskedCandidates, known_frequent
from eeplan.runtime.tokenizer import byte_tokenizer, train_bpe
from eeplan.spec import RunSpec

TEXT = "aaaabbbccd"
BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    return build_small(tmp_path_factory.mktemp("data"), [TEXT, "dd"])


def run_on(data: DataFiles, data_path: Any) -> RunSpec:
    return run_for(data, data={"data_path": data_path, "tokenizer": str(data.tokenizer), "split": "80,20,0"})


def test_most_frequent_first_of_a_file_a_dataset_and_the_training_data(
    data: DataFiles, tmp_path: Path
) -> None:
    run = run_for(data)
    (tmp_path / "some.txt").write_text(TEXT)
    of_file = known_frequent(AskedCandidates(frequent_from=tmp_path / "some.txt"), run, BYTES)
    # Equally frequent tokens by their id: "d" and end-of-text occur once each.
    assert of_file == (*b"abcd", BYTES.eod)
    ids = [*TEXT.encode(), BYTES.eod, *b"dd", BYTES.eod]
    counts = Counter(ids)
    expected = tuple(sorted(counts, key=lambda token: (-counts[token], token)))
    assert known_frequent(AskedCandidates(frequent_from=data.prefix), run, BYTES) == expected
    assert known_frequent(AskedCandidates(number=2, source="frequent"), run, BYTES) == expected
    assert known_frequent(AskedCandidates(number=2), run, BYTES) == ()


def test_a_blend_counts_by_its_weights(data: DataFiles, tmp_path: Path) -> None:
    other = DataFiles(tmp_path / "other")
    build_from_texts(["z" * 9], other.prefix, BYTES)
    for weight, first in ((100.0, "z"), (0.01, "a")):
        blend = [{"path": str(data.prefix), "weight": 1.0}, {"path": str(other.prefix), "weight": weight}]
        run = run_on(data, blend)
        found = known_frequent(AskedCandidates(number=1, source="frequent"), run, BYTES)
        assert chr(found[0]) == first
        assert set(found) == {*b"abcdz", BYTES.eod}


def test_the_shortlist_is_checked_and_cut(data: DataFiles) -> None:
    asked = AskedCandidates(number=2, source="frequent", measured=True)
    shortlist = asked.resolved(known_frequent(asked, run_for(data), BYTES))
    assert (shortlist.number, shortlist.source, shortlist.measured) == (2, "frequent", True)
    assert shortlist.frequent == tuple(b"ab")
    assert AskedCandidates(number=3).resolved(()).source == "previous_exit"
    with pytest.raises(DecodeError, match="7 wanted, 5 frequent tokens known; ask for fewer"):
        AskedCandidates(number=7, source="frequent").resolved((1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (AskedCandidates(number=-1), "candidates is -1; expected 0 for none, or at most the 257 tokens"),
        (AskedCandidates(number=2**40), "at most the 257 tokens of the vocabulary"),
        (AskedCandidates(number=4, source="luck"), "expected one of previous_exit, frequent"),
        (
            AskedCandidates(number=4, source="previous_exit", frequent_from=Path("x")),
            "candidate source is 'previous_exit', and tokens are to be counted in x; leave one of both out",
        ),
        (AskedCandidates(number=4, frequent_from=Path("absent")), "absent is no text file, and no dataset"),
        (AskedCandidates(number=0, measured=True), "there are none"),
    ],
)
def test_what_makes_no_sense_is_refused(data: DataFiles, asked: AskedCandidates, message: str) -> None:
    with pytest.raises((DecodeError, DataError), match=re.escape(message)):
        known_frequent(asked, run_for(data), BYTES)


def test_data_that_is_gone_or_of_another_tokenizer(data: DataFiles, tmp_path: Path) -> None:
    asked = AskedCandidates(number=2, source="frequent")
    gone = run_on(data, str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"gone is not there any more .* --frequent-from PREFIX\|FILE"):
        known_frequent(asked, gone, BYTES)
    other = train_bpe([TEXT * 20], 260)
    with pytest.raises(DataError, match="made by another tokenizer than the checkpoint's"):
        known_frequent(asked, run_for(data), other)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    files = build_small(tmp_path, [TEXT])
    asked = AskedCandidates(frequent_from=files.prefix)
    files.bin.write_bytes(b"\xff" * 22)
    with pytest.raises(DataError, match="does not hold tokens of its tokenizer; build it again"):
        known_frequent(asked, run_for(files), BYTES)
    files.bin.unlink()
    with pytest.raises(DataError, match=r"cannot be read .*; build it again"):
        known_frequent(asked, run_for(files), BYTES)
