"""One indexable view of rows, whatever file they come from."""

import gzip
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.data.rows import jsonl as jsonl_module
from batchwright.data.rows import tables as tables_module
from batchwright.data.rows.source import Skipped, Source, good_rows, open_source
from batchwright.errors import BadFile, BadRow, CannotWrite, ConfigError, MissingFile

ROWS: list[dict[str, Any]] = [
    {"id": f"r{i}", "text": f"Zeile {i} ü 世界", "tags": [i, i + 1], "meta": {"deep": [str(i)]}}
    for i in range(57)
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> Path:
    plain = write_jsonl(path.with_suffix(".plain"), rows).read_bytes()
    # Two members, as `cat a.gz b.gz` gives.
    half = plain.index(b"\n") + 1
    path.write_bytes(gzip.compress(plain[:half]) + gzip.compress(plain[half:]))
    return path


def write_zstd(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow

    plain = write_jsonl(path.with_suffix(".plain"), rows).read_bytes()
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.CompressedOutputStream(file, "zstd") as z:
        z.write(plain)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path, row_group_size=10, write_page_checksum=True)
    return path


def write_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def read_all(source: Source) -> list[Any]:
    """Every row through chunks of odd sizes, as worker processes get them."""
    rows = []
    for start in range(0, len(source), 7):
        chunk = pickle.loads(pickle.dumps(source.chunk(start, min(start + 7, len(source)))))
        rows += list(chunk.rows())
    assert [item for item, _ in rows] == list(range(len(source)))
    return [row for _, row in rows]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_jsonl, "rows.jsonl"),
        (write_gzip, "rows.jsonl.gz"),
        (write_zstd, "rows.jsonl.zst"),
        (write_parquet, "rows.parquet"),
        (write_dataset, "rows"),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, write: Any, name: str) -> None:
    source = open_source(write(tmp_path / name, ROWS))

    assert len(source) == len(ROWS)
    assert read_all(source) == ROWS
    assert [source[i] for i in (56, 0, 10, 9)] == [ROWS[i] for i in (56, 0, 10, 9)]
    assert source.name == name
    assert source.where(16) == f"{name}:17"
    assert len(source.fingerprint) == 16
    assert read_all(pickle.loads(pickle.dumps(source))) == ROWS
    with pytest.raises(IndexError, match="has no row 57"):
        source[57]


def test_what_a_file_is_its_content_says(tmp_path: Path) -> None:
    wrongly_named = write_gzip(tmp_path / "rows.jsonl", ROWS)

    assert read_all(open_source(wrongly_named)) == ROWS


def test_several_files_are_one_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[20:30])
    write_parquet(tmp_path / "a.parquet", ROWS[:20])
    write_gzip(tmp_path / "c.jsonl.gz", ROWS[30:])
    (tmp_path / "notes.txt").write_text("not data")
    folder = open_source(tmp_path)
    listed = open_source([tmp_path / n for n in ("a.parquet", "b.jsonl", "c.jsonl.gz")])

    for source in (folder, listed):
        assert read_all(source) == ROWS
        assert source.where(0) == "a.parquet:1"
        assert source.where(20) == "b.jsonl:1"
        assert source[29] == ROWS[29]
    assert folder.fingerprint == listed.fingerprint
    assert folder.name == "a.parquet and 2 more"


def test_hugging_face_data_sets_come_as_objects_folders_and_splits(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(ROWS)
    splits = datasets.DatasetDict({"train": whole, "test": whole.select(range(3))})
    splits.save_to_disk(tmp_path / "both")

    assert read_all(open_source(whole)) == ROWS
    assert read_all(open_source(whole.with_format("numpy").select(range(4, 9)))) == ROWS[4:9]
    both = tmp_path / "both"
    for spec in (f"hf:{both}:test", f"{both}:test"):
        assert read_all(open_source(spec)) == ROWS[:3]
    for whole_folder in (both, f"hf:{both}"):
        with pytest.raises(ConfigError, match=r"has 2 splits, train, test; name one as .*both:tr"):
            open_source(whole_folder)
    with pytest.raises(ConfigError, match=r"a DatasetDict of train, test; pass one of them, as da"):
        open_source(splits)
    assert read_all(open_source(datasets.DatasetDict({"test": whole}))) == ROWS
    whole.save_to_disk(tmp_path / "one")
    assert read_all(open_source(tmp_path / "one")) == ROWS
    with pytest.raises(ConfigError, match=r"one has no splits; leave out :train"):
        open_source(f"{tmp_path / 'one'}:train")
    with pytest.raises(ConfigError, match="no split 'dev', it has train, test"):
        open_source(f"hf:{tmp_path / 'both'}:dev")
    for nothing in ("hf:", "hf:///"):
        with pytest.raises(ConfigError, match="no name behind hf:"):
            open_source(nothing)
    with pytest.raises(ConfigError, match="IterableDataset, which has no random access"):
        open_source(whole.to_iterable_dataset())


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"], {"": 20}),
        (
            ["train_sft-00000-of-00001.parquet", "test_gen-00000-of-00001.parquet"],
            {"": 0, "train_sft": 10, "test_gen": 10},
        ),
        (["a.jsonl", "b.jsonl", "latest.jsonl"], {"": 30, "train": 30}),
        (["train.jsonl", "test.jsonl"], {"": 0, "train": 10, "test": 10}),
        (["rows.jsonl", "rows_val.jsonl", "more.jsonl"], {"": 0, "train": 20, "validation": 10}),
        (["gsm8k-eval.jsonl"], {"": 10, "test": 10}),
    ],
)
def test_of_a_folder_with_several_splits_one_is_named(
    tmp_path: Path, names: list[str], splits: dict[str, int]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in names:
        write = write_parquet if name.endswith("parquet") else write_jsonl
        write(folder / name, ROWS[:10])
    for split, rows in splits.items():
        spec = f"{folder}:{split}" if split else str(folder)
        if rows:
            assert len(open_source(spec)) == rows
        else:
            with pytest.raises(ConfigError, match=rf"has 2 splits, .*name one as {folder}:"):
                open_source(spec)


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    one = open_source(write_jsonl(tmp_path / "a.jsonl", ROWS)).fingerprint
    same = open_source(write_jsonl(tmp_path / "b.jsonl", ROWS)).fingerprint
    other = open_source(write_jsonl(tmp_path / "c.jsonl", ROWS[:-1])).fingerprint

    assert one == same != other


lines = st.sampled_from(
    [b'{"text":"a"}', b'{"text":"\xc3\xbc"}', b"", b"  ", b"\t", b' {"text":"b"} ', b"x", b"[1]"]
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(lines, max_size=12), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans()
)
def test_lines_are_found_and_counted_as_a_plain_reader_would(
    tmp_path_factory: pytest.TempPathFactory,
    given_lines: list[bytes],
    newline: bytes,
    ends: bool,
    mark: bool,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    content = newline.join(given_lines) + (newline if ends else b"")
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + content)
    expected = [(n, line) for n, line in enumerate(given_lines, start=1) if line.strip()]
    if not expected or expected[0][1] == b"[1]":
        with pytest.raises(BadFile, match=r"has no rows|one JSON array"):
            open_source(path)
        return
    source = open_source(path)

    assert len(source) == len(expected)
    for item, (number, line) in enumerate(expected):
        assert source.where(item) == f"rows.jsonl:{number}"
        if b"{" in line:
            assert source[item] == json.loads(line)
        else:
            with pytest.raises(BadRow, match=rf"^rows\.jsonl:{number}: (not JSON|is a JSON list)"):
                source[item]


def test_lines_across_the_blocks_of_the_scan_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_module, "BLOCK", 5)

    assert read_all(open_source(write_jsonl(tmp_path / "rows.jsonl", ROWS))) == ROWS


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
        (b'{"text": "a"', "not JSON: .* at column 13"),
        (b"{" * 100_000, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (
            b'{"n": ' + b"9" * 5000 + b"}",
            "not JSON that can be read: an integer has more than 4,300 d",
        ),
        (b'{"text": "abc', "not JSON: Unterminated string at column 10"),
        (b"3", "is a JSON int, not an object"),
    ],
)
def test_a_bad_line_is_named_with_its_place_and_reason(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"text":"a"}\n\n' + line + b'\n{"text":"b"}\n')
    source = open_source(path)

    with pytest.raises(BadRow, match=rf"^train\.jsonl:3: {reason}"):
        source[1]
    rows = [(item, row) for item, row in source.chunk(0, 3).rows()]
    assert not isinstance(rows[2][1], BadRow)
    with pytest.raises(BadRow, match=r"^train\.jsonl:3: "):
        list(good_rows(source, rows, "fail", Skipped()))
    skipped = Skipped()
    assert [item for item, _ in good_rows(source, rows, "skip", skipped)] == [0, 2]
    assert skipped.count == 1
    assert skipped.reasons[0].startswith("train.jsonl:3: ")


def test_all_skips_are_counted_but_only_a_few_reasons_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text":"a"}\n' + b"junk\n" * 100)
    source, skipped = open_source(path), Skipped()

    list(good_rows(source, source.chunk(0, len(source)).rows(), "skip", skipped))

    assert (skipped.count, len(skipped.reasons)) == (100, 5)


def test_missing_and_foreign_things_are_refused_by_name(tmp_path: Path) -> None:
    cases: list[tuple[str, bytes, type[Exception], str]] = [
        ("empty.jsonl", b"", BadFile, "has no rows"),
        ("blank.jsonl", b"\n \n\r\n", BadFile, "has no rows"),
        ("mark.jsonl", b"\xef\xbb\xbf", BadFile, "has no rows"),
        ("binary.jsonl", bytes(range(256)), BadFile, "is a binary file"),
        ("wide.jsonl", '{"text":"a"}\n'.encode("utf-16"), BadFile, "UTF-16"),
        ("array.json", b' [{"text": "a"}]', BadFile, "one JSON array"),
        ("rows.csv", b"prompt,completion\na,b\n", BadFile, "a table of text"),
        ("rows.TSV", b"text\na\n", BadFile, "a table of text"),
        ("cut.parquet", b"PAR1 and no more", BadFile, "truncated or damaged Parquet"),
    ]
    for name, content, error, reason in cases:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=reason):
            open_source(tmp_path / name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(MissingFile, match="folder without"):
        open_source(tmp_path / "folder")
    with pytest.raises(MissingFile, match="no data at"):
        open_source(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="empty list"):
        open_source([])
    with pytest.raises(ConfigError, match="got a int"):
        open_source(3)


def test_an_empty_parquet_file_holds_no_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    empty = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "e.parquet")

    with pytest.raises(BadFile, match=r"e\.parquet has no rows"):
        open_source(tmp_path / "e.parquet")


@pytest.mark.parametrize("write", [write_gzip, write_zstd])
def test_a_cut_archive_is_refused_wherever_it_is_cut(tmp_path: Path, write: Any) -> None:
    whole = write(tmp_path / "whole", ROWS).read_bytes()
    path = tmp_path / "cut"
    member = len(gzip.compress((json.dumps(ROWS[0], ensure_ascii=False) + "\n").encode()))
    for size in range(8, len(whole), 5):
        if write is write_gzip and size == member:
            continue  # exactly one whole member is a whole archive
        path.write_bytes(whole[:size])
        with pytest.raises(BadFile, match="truncated or damaged"):
            open_source(path)


def test_a_damaged_gzip_archive_is_refused(tmp_path: Path) -> None:
    whole = bytearray(write_gzip(tmp_path / "whole", ROWS).read_bytes())
    whole[len(whole) // 2] ^= 0x55
    (tmp_path / "bad").write_bytes(whole)

    with pytest.raises(BadFile, match="truncated or damaged gzip"):
        open_source(tmp_path / "bad")


@pytest.mark.parametrize("largest", [tables_module.LARGE, 0], ids=["small groups", "large groups"])
def test_parquet_in_any_order_decodes_few_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {**row, "kind": "even" if i % 2 else "odd", "more": [{"a": i}]}
        for i, row in enumerate(ROWS * 20)
    ]
    table = pyarrow.Table.from_pylist(rows)
    # Each row group has its own dictionary.
    kinds = table["kind"].dictionary_encode()
    table = table.set_column(table.schema.get_field_index("kind"), "kind", kinds)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=100)
    decoded = []
    whole = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "read_row_group",
        lambda file, group: decoded.append(group) or whole(file, group),
    )
    monkeypatch.setattr(tables_module, "LARGE", largest)
    source = open_source(tmp_path / "rows.parquet")
    order = random.Random(0).sample(range(len(rows)), len(rows))

    assert [source[item] for item in order] == [rows[item] for item in order]
    assert read_all(source) == rows
    assert len(decoded) <= tables_module.JUMPS + 2 if largest else not decoded


def test_a_full_disk_while_unpacking_parquet_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write_parquet(tmp_path / "rows.parquet", ROWS))
    full = Path("/dev/full").open("wb")  # noqa: SIM115
    monkeypatch.setattr(tables_module.tempfile, "TemporaryFile", lambda: full)

    with pytest.raises(CannotWrite, match=r"cannot copy .*No space left"):
        [source[item] for item in (50, 0, 30, 5, 40)]


def test_damaged_pages_of_parquet_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", ROWS)
    raw = bytearray(path.read_bytes())
    refused = 0
    for at in range(100, len(raw) // 2, 97):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
        try:
            assert read_all(open_source(path)) == ROWS
        except BadFile:
            refused += 1
    assert refused > 0


@pytest.mark.parametrize("rows_of", ["one by one", "chunk", "far chunk"])
def test_a_value_of_parquet_that_python_cannot_hold_is_a_bad_row_and_a_time_its_number(
    tmp_path: Path, rows_of: str
) -> None:
    import pyarrow.parquet

    data = pyarrow.py_buffer(b"good\xff\xfe.")
    for kind, width in (
        (pyarrow.string(), pyarrow.int32()),
        (pyarrow.large_string(), pyarrow.int64()),
    ):
        offsets = pyarrow.array([0, 4, 6, 7], width).buffers()[1]
        text = pyarrow.Array.from_buffers(kind, 3, [None, offsets, data])
        years = pyarrow.array([0, 0, 10**14], pyarrow.timestamp("s"))
        path = tmp_path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": text, "at": years}), path)
        source = open_source(path)
        if rows_of == "one by one":
            found: list[Any] = [source[0], None, source[2]]
            with pytest.raises(
                BadRow, match=r"rows\.parquet:2: column 'text' is not UTF-8: .*0xff"
            ):
                source[1]
        else:
            chunk = source.chunk(0, 3) if rows_of == "chunk" else source.far_chunk(0, 3)
            assert chunk is not None
            found = [row for _, row in chunk.rows()]
            assert isinstance(found[1], BadRow)
        assert [found[0]["text"], found[2]["text"]] == ["good", "."]
        assert found[2]["at"] == 10**17  # milliseconds, as Parquet has them


def test_a_column_of_parquet_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet

    columns = [pyarrow.array([text]) for text in ("first", "7", "second")]
    table = pyarrow.table(columns, names=["text", "id", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(BadFile, match=r"has the column 'text' more than once; keep one"):
        open_source(tmp_path / "rows.parquet")


def test_parquet_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    for before, after in ((300, 150), (300, 299), (300, 1)):
        path = tmp_path / "rows.parquet"
        write_parquet(path, [{"text": f"row {i}"} for i in range(before)])
        source = open_source(path)
        assert source[5]["text"] == "row 5"
        write_parquet(path, [{"text": f"row {i}"} for i in range(after)])
        with pytest.raises(BadFile, match=r"changed while it was read|truncated or damaged"):
            source[before - 1]


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    source = open_source(path)
    os.truncate(path, 100)

    with pytest.raises(BadFile, match="became shorter"):
        source[50]


def test_a_full_disk_while_unpacking_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gzip(tmp_path / "rows.jsonl.gz", ROWS)
    monkeypatch.setattr(
        jsonl_module.tempfile,
        "TemporaryFile",
        lambda: Path("/dev/full").open("wb"),  # noqa: SIM115
    )

    with pytest.raises(CannotWrite, match=r"cannot copy .*No space left"):
        open_source(path)


@pytest.mark.parametrize("name", ["more/b.jsonl", "b.json", "b.csv", "more/b.parquet"])
def test_rows_in_a_folder_are_never_left_out_in_silence(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(open_source(tmp_path)) == 1
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("{}")
    with pytest.raises(ConfigError, match=f"1 files of data beside .*{name}; a folder gives"):
        open_source(tmp_path)


def test_a_pattern_of_names_is_said_not_to_be_expanded(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="patterns of names are not expanded"):
        open_source(str(tmp_path / "*.jsonl"))


def _bombs(folder: Path) -> list[Path]:
    """One line of 256 MiB, in every wrapping, and a row with as many blank lines after it."""
    block = b"a" * 2**20
    plain, packed = folder / "plain.jsonl", folder / "bomb.jsonl.gz"
    with plain.open("wb") as file:
        file.write(b'{"text": "' + block)
        file.truncate(256 * 2**20)
    packed.write_bytes(gzip.compress(b'{"text": "') + gzip.compress(block) * 256)
    zstd = folder / "bomb.jsonl.zst"
    parts = [pyarrow.compress(part, codec="zstd", asbytes=True) for part in (b'{"text": "', block)]
    zstd.write_bytes(parts[0] + parts[1] * 256)
    blank = folder / "blank.jsonl.gz"
    blank.write_bytes(gzip.compress(b'{"text": "a"}') + gzip.compress(b"\n" * 2**20) * 256)
    return [plain, packed, zstd, blank]


MEASURED = """
import resource, sys
import pyarrow
from batchwright.data.rows.source import open_source
from batchwright.errors import BadFile

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        print(len(list(open_source(path))))
    except BadFile as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_line_of_any_size_is_refused_before_it_is_held(tmp_path: Path) -> None:
    bombs = _bombs(tmp_path)
    allowed = {**os.environ, "BATCHWRIGHT_MAX_LINE": str(2**20)}
    # A pipe gives the same bytes again.
    with subprocess.Popen(["cat", bombs[0]], stdout=subprocess.PIPE) as pipe:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *bombs, "/dev/stdin"],
            env=allowed,
            stdin=pipe.stdout,
            capture_output=True,
            text=True,
            check=True,
        )
        assert pipe.stdout is not None
        pipe.stdout.close()
    *said, grown = done.stdout.splitlines()

    why = "line 1: this row has more than 1,048,576 bytes; split it, or set BATCHWRIGHT_MAX_LINE"
    assert said == [f"{path}, {why} to more" for path in (*bombs, "/dev/stdin")]
    # It reads 16 MiB at a time, and holds that a few times.
    assert int(grown) < 192


def test_blank_lines_before_the_first_row_take_no_memory_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl_module, "BLOCK", 64)
    monkeypatch.setenv("BATCHWRIGHT_MAX_LINE", "100")
    path = tmp_path / "rows.jsonl"
    for blanks in (0, 1, 62, 63, 64, 65, 127, 128, 500):
        path.write_bytes(b"\n" * blanks + b'{"text": "a"}\n \n\n{"text": 1}\nno\n')
        source = open_source(path)
        assert [source.where(item) for item in range(3)] == [
            f"rows.jsonl:{blanks + line}" for line in (1, 4, 5)
        ]
        assert source[1] == {"text": 1}


def test_the_limit_of_a_line_can_be_moved_and_says_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": "%s"}\n' % ("a" * 100))
    monkeypatch.setenv("BATCHWRIGHT_MAX_LINE", "113")
    assert len(open_source(path)) == 2
    monkeypatch.setenv("BATCHWRIGHT_MAX_LINE", "112")
    with pytest.raises(BadFile, match="line 2: this row has more than 112 bytes"):
        open_source(path)
    monkeypatch.setenv("BATCHWRIGHT_MAX_LINE", "1 GB")
    with pytest.raises(ConfigError, match="give the most bytes of a line"):
        open_source(path)


def test_a_row_is_found_without_reading_the_file(tmp_path: Path) -> None:
    rows = [{"id": f"row-{number}", "text": "x" * 1000} for number in range(3000)]
    source = open_source(str(write_jsonl(tmp_path / "rows.jsonl", rows)))

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    found = [source[number]["id"] for number in (2999, 0, 1500)]
    assert found == ["row-2999", "row-0", "row-1500"]
    assert bytes_read() - before < 200_000


CHILDREN = """
import resource, sys
from batchwright.cli.app import main
sys.argv = ["batchwright", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_lengths_of_unchanged_rows_start_no_workers(tmp_path: Path, call: Any) -> None:
    rows = [{"id": f"row-{number}", "text": "word " * 40} for number in range(3000)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    line = "data lengths build -d rows.jsonl -t bytes -o lengths.jsonl --quiet --workers"
    assert call(f"{line} 1", tmp_path).code == 0
    again = subprocess.run(
        [sys.executable, "-c", CHILDREN, *line.split(), "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "measured 0, reused 3,000" in again.stdout
    assert again.stdout.splitlines()[-1] == "0"
