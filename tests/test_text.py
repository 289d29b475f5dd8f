import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ConfigError
from batchwright.report import text


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    rows = draw(st.lists(st.lists(st.integers(1, 40), max_size=6), max_size=6))
    return rows, max([1, *map(sum, rows)]) + draw(st.integers(0, 20))


@settings(max_examples=80, deadline=None)
@given(packed_rows(), st.integers(1, 60), st.booleans())
def test_a_strip_shows_whatever_lies_at_the_middle_of_each_cell(packed, chars, blocks) -> None:
    rows, width = packed
    lines = text.packing_strip(rows, width, chars, blocks=blocks).splitlines()

    assert len(lines) == len(rows) + 1
    for row, line in zip(rows, lines[:-1], strict=True):
        strip = line[1 : chars + 1]
        owners = [k for k, length in enumerate(row) for _ in range(length)]
        owners += [None] * (width - len(owners))
        seen = [owners[(2 * cell + 1) * width // (2 * chars)] for cell in range(chars)]
        assert [char in "·." for char in strip] == [owner is None for owner in seen]
        for cell in range(1, chars):
            assert (seen[cell] == seen[cell - 1]) == (strip[cell] == strip[cell - 1])


def test_a_strip_stops_at_max_rows_and_counts_the_rest() -> None:
    lines = text.packing_strip([[8]] * 5, 8, 4, max_rows=2, blocks=True).splitlines()

    assert lines == [
        "|████| 100.0%",
        "|████| 100.0%",
        "and 3 more rows",
        "5 rows of 8 tokens, 100.0% useful",
    ]


def test_a_strip_refuses_rows_that_are_too_full() -> None:
    with pytest.raises(ConfigError, match="at most 8 tokens, got 9"):
        text.packing_strip([[4, 5]], 8)
    with pytest.raises(ConfigError, match="must be at least 1"):
        text.packing_strip([[1]], 8, width_chars=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8), st.integers(1, 40), st.booleans())
def test_bars_are_as_long_as_their_share(counts, width, blocks) -> None:
    lines = text.histogram(counts, ["x"] * len(counts), width, blocks=blocks).splitlines()

    for count, line in zip(counts, lines, strict=True):
        bar = line[3 : 3 + width].rstrip()
        assert bool(bar) == (count > 0)
        if count:
            assert abs(len(bar) - width * count / max(counts)) <= 1
        assert line.endswith(f"{count:,}")
    assert blocks or "\n".join(lines).isascii()


@pytest.mark.parametrize(("encoding", "drawn"), [("utf-8", "█"), ("ascii", "#"), ("latin-1", "#")])
def test_pictures_follow_the_terminal(monkeypatch, encoding: str, drawn: str) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))

    print(text.histogram([3], ["a"], width=4))
    print(text.packing_strip([[2]], 4, 4))

    assert drawn in text.histogram([3], ["a"])


def test_no_terminal_at_all_gets_plain_characters(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    assert not text.can_draw()


def test_a_column_of_numbers_is_aligned_to_the_right_and_words_to_the_left() -> None:
    drawn = text.table(
        ["name", "count", "share", "what"],
        [["a", 5, text.percent(0.5), "x"], ["long", 12_345, text.percent(None), "yy"]],
    )

    assert drawn.splitlines() == [
        "name   count  share  what",
        "----  ------  -----  ----",
        "a          5  50.0%  x",
        "long  12,345      -  yy",
    ]


def test_a_table_without_rows_is_its_heading() -> None:
    assert text.table(["a", "b"], []) == "a  b\n-  -"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 us"),
        (0.0009999, "1 ms"),
        (0.9999, "1 s"),
        (59.6, "59.6 s"),
        (60, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
    ],
)
def test_durations_change_unit_without_a_gap(value: float, words: str) -> None:
    assert text.seconds(value) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999_960, "1.0 MB"), (10**12, "1.0 TB"), (10**15, "1.0 PB")],
)
def test_sizes_change_unit_without_a_gap(count: int, words: str) -> None:
    assert text.bytes_(count) == words


def test_nothing_is_shown_as_a_dash() -> None:
    formats = (text.number, text.percent, text.seconds, text.bytes_)

    assert [form(None) for form in formats] == ["-"] * 4
