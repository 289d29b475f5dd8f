"""Lengths survive everything: other formats, other worker counts, kill -9, flipped bytes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.data.build.journal import OURS, Journal
from batchwright.data.build.workers import CHUNK_ROWS
from batchwright.data.entries import Entries
from batchwright.data.ids import Ids
from batchwright.data.lengths import LengthCache, LengthEntry, Lengths
from batchwright.data.lengths.files import JOURNAL, partial_path, read_entries, write_entries
from batchwright.data.measure import build_lengths
from batchwright.data.rows.sample import encode_row
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import (
    BadFile,
    BadLength,
    BadRow,
    CannotWrite,
    ConfigError,
    DuplicateId,
    Mismatch,
    MissingFile,
)

FORMATS = [".jsonl", ".safetensors"]
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def rows_of(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "text": "wört " * (i % 17 + 1)} for i in range(first, first + n)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_entries(n: int = 40) -> Entries:
    lengths = np.arange(1, n + 1, dtype=np.int32)
    return Entries(
        Ids.of(f'id "{i}" ü' for i in range(n)),
        lengths,
        np.arange(n, dtype=np.uint64) << np.uint64(57),
        np.arange(n) * 2,
        "0123456789abcdef",
        loss_at(lengths, lengths // 2),
    )


def loss_at(lengths: NDArray[np.int32], first: NDArray[np.int32]) -> NDArray[np.int32]:
    """Loss on all tokens from `first` on, which is at least the second."""
    starts = np.clip(first, 1, lengths)
    return np.stack([starts, lengths - starts], axis=1).astype(np.int32)


def same(one: Entries, two: Entries) -> bool:
    rows = [np.arange(len(e.ids)) if e.rows is None else e.rows for e in (one, two)]
    return (
        one.ids == two.ids
        and np.array_equal(one.lengths, two.lengths)
        and np.array_equal(one.content, two.content)
        and np.array_equal(*rows)
        and one.tokenizer_hash == two.tokenizer_hash
        and one.dataset_hash == two.dataset_hash
        and (one.loss is None) == (two.loss is None)
        and (one.loss is None or np.array_equal(one.loss, np.asarray(two.loss)))
    )


entries = st.lists(names, max_size=30, unique=True).flatmap(
    lambda ids: st.builds(
        lambda lengths, content, skips, firsts, numbered, knows_loss: Entries(
            Ids.numbered(len(ids)) if numbered else Ids.of(ids),
            np.array(lengths, np.int32),
            np.array(content, np.uint64),
            np.cumsum(skips, dtype=np.int64) - 1 if any(s != 1 for s in skips) else None,
            "t",
            loss_at(np.array(lengths, np.int32), np.array(firsts, np.int32))
            if knows_loss
            else None,
        ),
        *(
            st.lists(values, min_size=len(ids), max_size=len(ids))
            for values in (
                st.integers(1, 2**31 - 1),
                st.integers(0, 2**64 - 1),
                st.integers(1, 3),
                st.integers(1, 2**31 - 1) | st.just(1),
            )
        ),
        st.booleans(),
        st.booleans(),
    )
)


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=60, deadline=None)
@given(given_entries=entries)
def test_entries_read_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, given_entries: Entries
) -> None:
    path = tmp_path_factory.mktemp("entries") / f"lengths{suffix}"
    write_entries(path, given_entries)
    first = path.read_bytes()
    write_entries(path, given_entries)

    back = read_entries(path)
    assert same(back, given_entries)
    assert (back.ids.arrays is None) == (given_entries.ids.arrays is None)
    assert path.read_bytes() == first


def test_the_readable_form_is_as_documented(tmp_path: Path) -> None:
    with LengthCache.create(tmp_path / "l.jsonl", tokenizer_hash="t1") as cache:
        cache.add("a", 12, "0123456789abcdef")
        cache.add("b", 3)
    first, *middle, last = map(json.loads, (tmp_path / "l.jsonl").read_text().splitlines())

    assert first == {
        "format": "batchwright.lengths",
        "version": 2,
        "tokenizer_hash": "t1",
        "loss": False,
    }
    assert middle == [
        {"sample_id": "a", "length": 12, "content": "0123456789abcdef"},
        {"sample_id": "b", "length": 3},
    ]
    assert (last["end"], last["entries"], last["dataset_hash"]) == (True, 2, cache.dataset_hash)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_flip_of_any_byte_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lengths{suffix}"
    write_entries(path, some_entries(12))
    raw = path.read_bytes()
    for at in range(len(raw)):
        for flip in (0x01, 0x20, 0x29, 0x80):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :])
            with pytest.raises(BadFile) as caught:
                read_entries(path)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_cut_at_any_byte_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lengths{suffix}"
    write_entries(path, some_entries(12))
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        with pytest.raises(BadFile):
            read_entries(path)
    path.write_bytes(raw + b"\n")
    with pytest.raises(BadFile):
        read_entries(path)


def test_a_cache_without_its_end_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    write_entries(path, some_entries())
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))

    with pytest.raises(BadFile, match=r"truncated.*batchwright data lengths build.*resumes"):
        LengthCache.load(path)


def test_a_cache_of_a_later_version_is_refused_as_such(tmp_path: Path) -> None:
    import hashlib

    start = b'{"format":"batchwright.lengths","version":3,"tokenizer_hash":"t"}\n'
    end = {"end": True, "entries": 0, "dataset_hash": "", "sha256": ""}
    end["sha256"] = hashlib.sha256(start).hexdigest()
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(start + json.dumps(end, separators=(",", ":")).encode() + b"\n")

    with pytest.raises(BadFile, match="version 3, this reads 2"):
        read_entries(path)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    foreign = write_rows(tmp_path / "rows.jsonl", rows_of(2))
    model = tmp_path / "model.safetensors"
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(3)}, model)

    for path in (foreign, model):
        with pytest.raises(BadFile, match="not a length cache"):
            LengthCache.load(path)
        with pytest.raises(ConfigError, match="is not overwritten"):
            LengthCache.create(path, "t")
        with pytest.raises(ConfigError, match="is not overwritten"):
            build_lengths(foreign, "bytes", path)
    assert foreign.read_text().startswith('{"id"')
    with pytest.raises(MissingFile, match="no length cache at"):
        LengthCache.load(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"ends in \.jsonl or \.safetensors"):
        LengthCache.create(tmp_path / "lengths.txt", "t")
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        LengthCache.create(tmp_path / "d.jsonl", "t")


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_cache_answers_what_it_holds(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lengths{suffix}"
    with LengthCache.create(path, tokenizer_hash="t1") as cache:
        cache.add("a", 3, "00000000000000ff")
        cache.extend(["b", "c"], np.array([5, 7]))
        assert (cache.get("b"), cache.is_complete()) == (5, False)
    loaded = LengthCache.load(path, expected_tokenizer_hash="t1")

    for held in (cache, loaded):
        assert len(held) == 3
        assert (held.get("a"), held.get("z")) == (3, None)
        assert held.get_all() == dict(held.items()) == {"a": 3, "b": 5, "c": 7}
        assert next(iter(held)) == LengthEntry("a", 3, "00000000000000ff")
        assert held.validate(["a", "x"]) == ({"x"}, {"b", "c"})
        assert held.is_complete()
        assert held.is_complete(["a", "b"])
        assert not held.is_complete(["x"])
    assert loaded.lengths == cache.lengths == Lengths.of(cache)
    assert loaded.lengths.tokenizer_hash == "t1"
    assert repr(loaded) == f"LengthCache(lengths{suffix}, 3 entries, finished)"
    assert not partial_path(path).exists()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(-1, 3)), max_size=12),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_entries_added_together_are_those_added_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, int]], cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("together")

    def added(path: Path, calls: list[list[tuple[str, int]]]) -> Any:
        try:
            with LengthCache.create(path, tokenizer_hash="t") as cache:
                for call in calls:
                    cache.extend([id for id, _ in call], [length for _, length in call])
        except (BadLength, DuplicateId) as error:
            return str(error)
        return path.read_bytes()

    bounds = [0, *sorted(min(cut, len(entries)) for cut in cuts), len(entries)]
    together = [entries[a:b] for a, b in itertools.pairwise(bounds)]
    alone = [[entry] for entry in entries]

    assert added(folder / "a.jsonl", together) == added(folder / "b.jsonl", alone)


def test_columns_of_other_lengths_are_refused(tmp_path: Path) -> None:
    with LengthCache.create(tmp_path / "l.jsonl", tokenizer_hash="t") as cache:
        with pytest.raises(ConfigError, match="different lengths"):
            cache.extend(["a", "b"], [1])
        cache.extend(["a"], [1], ["00000000000000ff"])

    assert [*LengthCache.load(tmp_path / "l.jsonl")] == [LengthEntry("a", 1, "00000000000000ff")]


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    with LengthCache.create(tmp_path / "l.jsonl", tokenizer_hash="t1"):
        pass

    with pytest.raises(Mismatch, match="measured with tokenizer t1, not with t2"):
        LengthCache.load(tmp_path / "l.jsonl", expected_tokenizer_hash="t2")
    with pytest.raises(Mismatch):
        LengthCache.load_or_create(tmp_path / "l.jsonl", "t2")


def test_a_cache_goes_on_where_an_error_stopped_it(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    cache = LengthCache.create(path, "t")
    cache.__enter__()
    cache.add("a", 1)
    cache.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not path.exists()
    with pytest.raises(BadFile, match=r"not finished, only l\.jsonl\.partial exists"):
        LengthCache.load(path)

    resumed = LengthCache.load_or_create(path, "t")
    assert (resumed.get("a"), resumed.is_complete()) == (1, False)
    with resumed:
        resumed.add("b", 2)
    more = LengthCache.load_or_create(path, "t")
    with more:
        more.add("c", 3)

    assert LengthCache.load(path).get_all() == {"a": 1, "b": 2, "c": 3}
    with LengthCache.create(path, "t") as fresh:
        fresh.add("z", 9)
    assert LengthCache.load(path).get_all() == {"z": 9}


def test_entries_that_make_no_sense_are_refused_when_added(tmp_path: Path) -> None:
    cache = LengthCache.create(tmp_path / "l.jsonl", "t")
    with pytest.raises(ConfigError, match="inside `with cache:`"):
        cache.add("a", 1)
    with cache:
        cache.add("a", 1)
        cache.add("a", 1)
        with pytest.raises(DuplicateId, match="duplicate sample id 'a', with lengths 1 and 2"):
            cache.add("a", 2)
        for wrong in (0, -1, 2**31, 1.5, True, None):
            with pytest.raises(BadLength, match="sample 'b' has length"):
                cache.add("b", wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="16 hexadecimal digits"):
            cache.add("b", 1, "xyz")
    assert len(cache) == 1


def test_lengths_are_checked_once_at_the_edge() -> None:
    assert Lengths.of(np.array([3, 4])).ids == Ids.numbered(2)
    assert Lengths.of({"a": 3}).values.dtype == np.int32
    assert repr(Lengths.of({})) == "Lengths(0 samples)"
    ready = Lengths.of({"a": 3})
    assert Lengths.of(ready) is ready
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"a": 0}, BadLength, "sample 'a' has length 0"),
        ({"a": 2**70}, BadLength, "sample 'a' has length"),
        ({"a": 1.0}, BadLength, "sample 'a'"),
        ({3: 1}, ConfigError, "ids must be strings, got 3"),
        (np.array([1, -2]), BadLength, "sample '1' has length -2"),
        (np.array([1, 2**31]), BadLength, "sample '1' has length 2147483648"),
        (np.array([1.0]), BadLength, "must be integers"),
        (np.ones((2, 2), int), ConfigError, "2 dimensions"),
    ]
    for source, error, reason in cases:
        with pytest.raises(error, match=reason):
            Lengths.of(source)


def test_a_journal_with_any_byte_flipped_or_cut_gives_only_true_entries(tmp_path: Path) -> None:
    path = tmp_path / "l.partial"
    written = [(["a", "ü"], [1, 2], [3, 4]), (["b"], [5], [2**64 - 1]), (["c"], [6], [7])]
    journal = Journal(path, JOURNAL, "t")
    list(journal.replay())
    for chunk in written:
        journal.append(*chunk)
    journal.close()
    raw = path.read_bytes()
    damaged = [raw[:size] for size in range(len(raw))]
    flipped = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(len(raw))]
    # What no longer begins as a journal does may be somebody's file.
    for content in flipped[: len(OURS)]:
        path.write_bytes(content)
        with pytest.raises(CannotWrite, match="was not written by this command"):
            Journal(path, JOURNAL, "t")
        assert path.read_bytes() == content
    damaged += flipped[len(OURS) :]
    damaged.append(raw + b'{"sum":"')

    for content in damaged:
        path.write_bytes(content)
        journal = Journal(path, JOURNAL, "t")
        believed = list(journal.replay())
        assert believed == written[: len(believed)]
        journal.append(["z"], [9], [9])
        journal.close()
        journal = Journal(path, JOURNAL, "t")
        assert list(journal.replay()) == [*believed, (["z"], [9], [9])]
        journal.close()
    journal = Journal(path, JOURNAL, "another tokenizer")
    assert list(journal.replay()) == []
    journal.close()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_cache_says_where_the_loss_is(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "text", "text": "abc"},
        {"id": "pair", "prompt": "four", "completion": "ab"},
        {"id": "mute", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"id": "first", "input_ids": [1, 2, 3], "loss_mask": [1, 0, 0]},
        {"id": "gap", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 0, 1]},
        {"id": "one", "input_ids": [1]},
    ]
    build_lengths(write_rows(tmp_path / "rows.jsonl", rows), "bytes", tmp_path / f"l{suffix}")
    lengths = LengthCache.load(tmp_path / f"l{suffix}").lengths

    assert lengths.loss is not None
    # The first token that is predicted with loss, and how many are; nothing predicts the first.
    assert dict(zip(lengths.ids, lengths.loss.tolist(), strict=True)) == {
        "text": [1, 3],
        "pair": [4, 3],
        "mute": [3, 0],
        "first": [3, 0],
        "gap": [2, 2],
        "one": [1, 0],
    }


@settings(max_examples=30, deadline=None)
@given(masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=20))
def test_the_loss_of_any_masks_is_counted(
    tmp_path_factory: pytest.TempPathFactory, masks: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("masks")
    rows = [{"input_ids": list(range(len(mask))), "loss_mask": mask} for mask in masks]
    data = write_rows(folder / "rows.jsonl", rows)
    loss = build_lengths(data, "bytes", folder / "l.jsonl").cache.lengths.loss

    expected = []
    for mask in masks:
        carries = [place for place, one in enumerate(mask) if one and place]
        expected.append([carries[0] if carries else len(mask), len(carries)])
    assert loss is not None
    assert loss.tolist() == expected


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_build_measures_what_encoding_gives(tmp_path: Path, suffix: str) -> None:
    rows = [*rows_of(700), {"prompt": "p", "completion": "c"}, {"question": "q", "answer": "a"}]
    source = open_source(write_rows(tmp_path / "rows.jsonl", rows))
    tokenizer = load_tokenizer("gpt2")
    seen: list[tuple[int, int]] = []

    report = build_lengths(
        source, tokenizer, tmp_path / f"l{suffix}", progress=lambda *done: seen.append(done)
    )

    samples = [encode_row(row, tokenizer, str(i)) for i, row in enumerate(rows)]
    lengths = LengthCache.load(tmp_path / f"l{suffix}", tokenizer.fingerprint).lengths
    assert lengths.values.tolist() == [len(sample) for sample in samples]
    assert list(lengths.ids) == [sample.sample_id for sample in samples]
    assert lengths == report.cache.lengths
    assert (report.entries, report.measured, report.reused) == (702, 702, 0)
    assert report.tokens == sum(len(sample) for sample in samples)
    assert seen[-1] == (702, 702)
    assert seen == sorted(seen)


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    rows = [{"text": "wört " * (i % 13 + 1)} for i in range(1500)]
    rows[700] = {"txt": "bad"}
    data = write_rows(tmp_path / "rows.jsonl", rows)
    files = []
    for workers in (1, 2):
        out = tmp_path / f"l{workers}.jsonl"
        report = build_lengths(data, "gpt2", out, workers=workers, on_bad_row="skip")
        assert (report.entries, report.skipped.count) == (1499, 1)
        assert report.skipped.reasons[0].startswith("rows.jsonl:701: has none of the known keys")
        files.append(out.read_bytes())
    assert files[0] == files[1]
    with pytest.raises(BadRow, match=r"^rows\.jsonl:701: has none"):
        build_lengths(data, "gpt2", tmp_path / "l3.jsonl", workers=2)
    assert not (tmp_path / "l3.jsonl").exists()


@pytest.mark.parametrize("suffix", FORMATS)
def test_skipped_rows_leave_each_sample_with_its_own_row(tmp_path: Path, suffix: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, {}, {"text": "bcd"}, {}])
    out = tmp_path / f"l{suffix}"
    build_lengths(data, "bytes", out, on_bad_row="skip")
    lengths = LengthCache.load(out).lengths

    assert list(lengths.ids) == ["0", "2"]
    assert lengths.rows is not None
    assert lengths.rows.tolist() == [0, 2]


@pytest.mark.parametrize("suffix", FORMATS)
def test_numbered_ids_stay_numbered(tmp_path: Path, suffix: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}] * 300)
    build_lengths(data, "bytes", tmp_path / f"l{suffix}")

    assert LengthCache.load(tmp_path / f"l{suffix}").lengths.ids.arrays is None


class NoWorkers:
    def map(self, *_: Any) -> Any:
        raise AssertionError("workers were started")


def test_unchanged_data_start_no_workers(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", [{"text": f"row {i}"} for i in range(1000)])
    build_lengths(data, "bytes", tmp_path / "one.jsonl")
    again = build_lengths(data, "bytes", tmp_path / "two.jsonl", workers=NoWorkers())
    assert (again.measured, again.reused) == (0, 1000)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("workers", "suffix"), [(1, ".jsonl"), (1, ".safetensors"), (2, ".safetensors")]
)
def test_only_new_and_changed_rows_are_measured(tmp_path: Path, suffix: str, workers: int) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / f"l{suffix}"
    rows = rows_of(600)
    build_lengths(write_rows(data, rows), "bytes", out)
    again = build_lengths(data, "bytes", out, workers=workers)
    rows[17] = {"id": "r17", "text": "changed"}
    grown = [*rows[::-1], *rows_of(30, first=600)]
    report = build_lengths(write_rows(data, grown), "bytes", out, workers=workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path / "elsewhere"))
        fresh = build_lengths(data, "bytes", tmp_path / f"fresh{suffix}")

    assert (again.measured, again.reused) == (0, 600)
    assert (report.measured, report.reused) == (31, 599)
    assert out.read_bytes() == (tmp_path / f"fresh{suffix}").read_bytes()
    assert fresh.measured == 630


def test_another_tokenizer_measures_everything_again(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", rows_of(50)), tmp_path / "l.jsonl"
    build_lengths(data, "bytes", out)

    assert build_lengths(data, "gpt2", out).measured == 50


def test_a_damaged_cache_is_written_again(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", rows_of(50)), tmp_path / "l.jsonl"
    build_lengths(data, "bytes", out)
    whole = out.read_bytes()
    out.write_bytes(whole.replace(b'"length":6', b'"length":7', 1))

    build_lengths(data, "bytes", out)
    assert out.read_bytes() == whole


def test_entries_added_by_hand_are_not_taken_for_measurements(tmp_path: Path) -> None:
    data, out = write_rows(tmp_path / "rows.jsonl", rows_of(3)), tmp_path / "l.jsonl"
    tokenizer = load_tokenizer("bytes")
    with LengthCache.create(out, tokenizer.fingerprint) as cache:
        cache.add("r0", 99)

    assert build_lengths(data, tokenizer, out).measured == 3


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_a_build_killed_at_any_moment_ends_as_if_nothing_had_happened(
    tmp_path: Path, suffix: str
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows_of(4000))
    out, tokens = tmp_path / f"l{suffix}", Path(os.environ["BATCHWRIGHT_TOKENS"])

    def journaled() -> int:
        return sum(file.stat().st_size for file in tokens.glob("*.partial/journal.jsonl"))

    # Slowed through the progress hook, so that the kill falls into the middle.
    script = (
        "import sys, time\n"
        "from batchwright.data import build_lengths\n"
        "build_lengths(*sys.argv[1:], workers=1, progress=lambda *_: time.sleep(0.05))\n"
    )
    for grown in (1, 4):
        process = subprocess.Popen([sys.executable, "-c", script, str(data), "bytes", str(out)])
        start = journaled()
        deadline = time.monotonic() + 600
        while journaled() < start + grown * 5000:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not out.exists()
    (journal,) = tokens.glob("*.partial/journal.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"sum":"0123456789abcdef","entries":[["r1"],[1')

    report = build_lengths(data, "bytes", out)
    build_lengths(data, "bytes", tmp_path / f"whole{suffix}")

    assert report.measured + report.reused == report.entries == 4000
    assert report.reused >= CHUNK_ROWS
    assert report.measured > 0
    assert out.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not list(tokens.glob("*.partial"))


def test_a_script_without_a_main_guard_may_use_workers(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows_of(600))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from batchwright.data import build_lengths\n"
        "print(build_lengths(*sys.argv[1:], workers=2).entries)\n"
    )
    command = [sys.executable, str(script), str(data), "bytes", str(tmp_path / "l.jsonl")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "600\n", "")


def test_ids_that_repeat_are_named_with_both_lines(tmp_path: Path) -> None:
    rows = rows_of(400)
    rows[350]["id"] = "r3"
    data = write_rows(tmp_path / "rows.jsonl", rows)

    with pytest.raises(
        DuplicateId, match=r"duplicate sample id 'r3', at rows\.jsonl:4 and rows\.jsonl:351"
    ):
        build_lengths(data, "bytes", tmp_path / "l.jsonl")


def test_rows_of_which_none_can_be_used_give_no_cache(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"x": 1}] * 3)

    with pytest.raises(BadRow, match=r"none of the 3 rows .* rows\.jsonl:1: has none"):
        build_lengths(data, "bytes", tmp_path / "l.jsonl", on_bad_row="skip")
    with pytest.raises(ConfigError, match="workers must be at least 1, got 0"):
        build_lengths(data, "bytes", tmp_path / "l.jsonl", workers=0)


def test_an_output_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows_of(3))

    with pytest.raises(CannotWrite, match="cannot write"):
        build_lengths(data, "bytes", data / "l.jsonl")


def test_the_data_set_hash_follows_ids_and_content_but_not_the_order(tmp_path: Path) -> None:
    rows = rows_of(5)
    swapped = [{**rows[0], "text": rows[1]["text"]}, {**rows[1], "text": rows[0]["text"]}]
    variants = [rows, rows[:4], [{**rows[0], "text": "x"}, *rows[1:]], [*swapped, *rows[2:]]]
    hashes = []
    for number, variant in enumerate(variants):
        data = write_rows(tmp_path / f"{number}.jsonl", variant)
        for suffix in FORMATS:
            report = build_lengths(data, "bytes", tmp_path / f"l{number}{suffix}")
            hashes.append(report.cache.dataset_hash)

    moved = write_rows(tmp_path / "moved.jsonl", rows[::-1])
    other_order = build_lengths(moved, "bytes", tmp_path / "moved.safetensors").cache.dataset_hash

    assert len(set(hashes)) == len(variants)
    assert other_order == hashes[0] == "939aae3805e273ee"


def test_importing_the_package_stays_light() -> None:
    heavy = ["torch", "transformers", "datasets", "pyarrow", "tokenizers", "jinja2"]
    script = f"import sys, batchwright.data; print([m for m in {heavy} if m in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


def test_rows_left_out_as_repeated_are_neither_measured_nor_reused(tmp_path: Path) -> None:
    rows = [{"id": id, "text": id * 3} for id in ("a", "b", "a", "a")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = []
    for more in ("", json.dumps({"id": "c", "text": "c"}) + "\n" + json.dumps(rows[0])):
        data.write_text(data.read_text() + more)
        report = build_lengths(data, "bytes", tmp_path / "lengths.jsonl", repeated_ids="skip")
        counts.append((report.entries, report.measured, report.reused, report.repeated.count))
    assert counts == [(2, 2, 0, 2), (3, 1, 2, 3)]
