"""Ids behave as a list of strings would, at a fraction of its size."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.data.ids import SEED, Ids
from batchwright.errors import BadFile, BadRow, UnknownSample
from batchwright.jit import interpreted

MASK = 2**64 - 1
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# Few distinct values, so that repeats and prefixes of one another are common.
short = st.text("ab0", max_size=3)


def key_in_plain_python(id: str) -> int:
    def mix(key: int, counter: int) -> int:
        x = (key + 0x9E3779B97F4A7C15 * (counter + 1)) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    raw = id.encode()
    hash = mix(int(SEED), len(raw))
    for at in range(0, len(raw), 8):
        hash = mix(hash, int.from_bytes(raw[at : at + 8], "little"))
    return hash


@settings(deadline=None)
@given(st.lists(texts, max_size=30))
def test_ids_read_back_as_the_strings_they_were_made_of(strings: list[str]) -> None:
    ids = Ids.of(strings)

    assert list(ids) == strings
    assert ids.take(range(len(strings))) == strings
    assert [ids.find(text) for text in strings] == [strings.index(text) for text in strings]
    assert pickle.loads(pickle.dumps(ids)) == ids
    if ids.arrays is not None:
        assert Ids.from_arrays(*ids.arrays) == ids


@settings(deadline=None)
@given(st.lists(texts, max_size=30))
def test_keys_equal_their_plain_twin(strings: list[str]) -> None:
    expected = [key_in_plain_python(text) for text in strings]

    assert Ids.of(strings).keys().tolist() == expected
    with interpreted():
        ids = Ids.of(strings)
        assert ids.keys().tolist() == expected
        assert [ids.find(text) for text in strings] == [strings.index(text) for text in strings]


def test_keys_never_change() -> None:
    ids = Ids.of(["", "0", "sample_000017", "ü", "eight by", "eight byt"])

    assert [f"{key:016x}" for key in ids.keys().tolist()] == [
        "1ac046dda8e86e2a",
        "3b4cf8ebf39f469c",
        "f0e7dc95a4f1ea2c",
        "fd3dafd0ff91da7e",
        "d3c65a4344534823",
        "b04a0fb5f53d3ad8",
    ]
    assert ids.digest()[:16] == "9178f1ce44690263"
    assert Ids.numbered(3).digest()[:16] == "18b0dedf22c63259"


def test_keys_of_a_million_ids_all_differ_and_spread_evenly() -> None:
    keys = Ids.numbered(1_000_000).keys()

    assert len(np.unique(keys)) == len(keys)
    bits = [int(((keys >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    # Five standard deviations of a fair coin thrown a million times.
    assert max(abs(count - 500_000) for count in bits) < 2_500


@settings(deadline=None)
@given(st.lists(short, max_size=12))
def test_the_first_duplicate_is_what_a_walk_through_the_list_meets(strings: list[str]) -> None:
    expected = next(
        ((strings.index(text), at) for at, text in enumerate(strings) if text in strings[:at]),
        None,
    )

    assert Ids.of(strings).first_duplicate() == expected


@settings(deadline=None)
@given(st.lists(short, max_size=6), st.lists(short, max_size=6))
def test_ids_are_equal_exactly_when_their_strings_are(one: list[str], two: list[str]) -> None:
    a, b = Ids.of(one), Ids.of(two)

    assert (a == b) == (one == two)
    assert (a.digest() == b.digest()) == (one == two)


@pytest.mark.parametrize("n", [0, 1, 9, 10, 11, 1234])
def test_row_numbers_are_recognised_and_take_no_room(n: int) -> None:
    numbered, written = Ids.numbered(n), Ids.of(str(i) for i in range(n))
    with interpreted():
        plain = Ids.of(str(i) for i in range(n))
        assert plain.arrays is None
        assert plain.keys().tolist() == numbered.keys().tolist()

    assert written.arrays is None
    assert written == numbered
    assert list(numbered) == [str(i) for i in range(n)]
    assert numbered.keys().tolist() == [key_in_plain_python(str(i)) for i in range(n)]
    assert numbered.first_duplicate() is None


@pytest.mark.parametrize(
    "strings", [["0", "2"], ["00", "1"], ["0", "1", "1"], ["1", "0"], ["\u0660"]]
)
def test_what_only_looks_like_row_numbers_is_kept_as_it_is(strings: list[str]) -> None:
    assert list(Ids.of(strings)) == strings
    assert Ids.of(strings).arrays is not None
    with interpreted():
        assert Ids.of(strings).arrays is not None


@pytest.mark.parametrize("id", ["3", "-1", "01", "+1", " 1", "1.0", "", "x", "²", "\u0663"])
def test_numbered_ids_know_only_the_numbers_they_hold(id: str) -> None:
    with pytest.raises(UnknownSample, match="among 3"):
        Ids.numbered(3).find(id)


def test_an_id_or_item_that_is_not_there_is_named() -> None:
    ids = Ids.of(["a", "b"])

    with pytest.raises(UnknownSample, match="'nobody' among 2"):
        ids.find("nobody")
    with pytest.raises(UnknownSample, match="no item 2 among 2"):
        ids[2]
    with pytest.raises(UnknownSample):
        ids[-1]


def test_equal_keys_are_told_apart_by_their_bytes() -> None:
    ids = Ids.of(["a", "b", "c"])
    # No two short strings with one key are known, so the index is given one by hand.
    ids._index = np.full(3, ids.keys()[1]), np.array([0, 1, 2])

    assert ids.find("b") == 1


def test_damaged_arrays_are_refused() -> None:
    data = np.frombuffer(b"abc", np.uint8)

    with pytest.raises(BadFile, match="span"):
        Ids.from_arrays(np.array([0, 2], np.int64), data)
    with pytest.raises(BadFile, match="span"):
        Ids.from_arrays(np.array([], np.int64), data)
    with pytest.raises(BadFile, match="ascend"):
        Ids.from_arrays(np.array([0, 9, 3], np.int64), data).keys()
    with pytest.raises(BadFile, match="UTF-8"):
        Ids.from_arrays(np.array([0, 1], np.int64), np.array([255], np.uint8))[0]


def test_half_of_a_surrogate_pair_is_no_id() -> None:
    with pytest.raises(BadRow, match="not valid Unicode"):
        Ids.of(["fine", "\ud800"])


def test_long_lists_are_read_in_blocks() -> None:
    strings = [f"s{i % 1000}" for i in range(70_000)]

    assert list(Ids.of(strings)) == strings


def test_a_repr_answers_which_ids_these_are() -> None:
    assert repr(Ids.of(["a", "b"])) == "Ids(a, b)"
    assert repr(Ids.numbered(12_345)) == "Ids(0, 1, ..., 12344; 12,345 in all)"
