"""A token store holds exactly what `encode_row` gives, and says so when a file was damaged."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.data.lengths.build import build_lengths
from batchwright.data.rows.sample import Sample, encode_row
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from batchwright.data.tokens import TokenStore
from batchwright.errors import BadFile, BadRow, BatchwrightError, CannotWrite, DuplicateId

BYTES = load_tokenizer("bytes")

ROWS: list[dict[str, Any]] = [
    {"id": "ready", "input_ids": [5, 6, 7]},
    {"id": "masked", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    {"id": "pair", "prompt": "two and two is", "completion": " four"},
    {"id": "response", "prompt": "two and two is", "response": " four"},
    {"id": "alpaca", "instruction": "add", "input": "2 2", "output": "4"},
    {"id": "bare", "instruction": "add", "output": "4", "input": None},
    {"id": "gsm", "question": "how many otters?", "answer": "seven"},
    {"id": "text", "text": "otters hold hands \U0001f9a6"},
    {"sample_id": "content", "content": "ä" * 40},
    {"id": 9, "input": "numbers are ids too"},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    source = open_source(written(tmp_path / "rows.jsonl", ROWS))
    return TokenStore.build(source, BYTES, tmp_path / "tokens")


def same(a: Sample, b: Sample) -> bool:
    equal = np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)
    return equal and a.sample_id == b.sample_id


def test_every_shape_of_row_comes_back_as_encode_row_made_it(store: TokenStore) -> None:
    assert len(store) == len(ROWS)
    for opened in (store, TokenStore(store.path)):
        for number, row in enumerate(ROWS):
            assert same(opened(number), encode_row(row, BYTES, str(number)))
        lengths = [len(encode_row(row, BYTES, "")) for row in ROWS]
        assert opened.lengths.values.tolist() == lengths


def test_rows_without_ids_are_called_by_their_number(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "bc"}]
    source = open_source(written(tmp_path / "rows.jsonl", rows))
    store = TokenStore.build(source, BYTES, tmp_path / "tokens")

    assert [store(item).sample_id for item in range(2)] == ["0", "1"]


def test_conversations_keep_their_mask(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    store = TokenStore.build(
        open_source(written(tmp_path / "rows.jsonl", [row])), BYTES, tmp_path / "tokens"
    )

    assert 0 < store(0).loss_mask.sum() < len(store(0))
    assert same(store(0), encode_row(row, BYTES, "0"))


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30))
def test_any_texts_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("any")
    rows = [{"text": text} for text in texts]
    store = TokenStore.build(
        open_source(written(folder / "rows.jsonl", rows)), BYTES, folder / "tokens"
    )

    for number, row in enumerate(rows):
        assert same(store(number), encode_row(row, BYTES, str(number)))


def test_more_rows_than_one_chunk_stay_in_order(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(1100)]
    told: list[tuple[int, int]] = []
    store = TokenStore.build(
        open_source(written(tmp_path / "rows.jsonl", rows)),
        BYTES,
        tmp_path / "tokens",
        progress=lambda done, total: told.append((done, total)),
    )

    assert told == [(256, 1100), (512, 1100), (768, 1100), (1024, 1100), (1100, 1100)]
    for number in (0, 255, 256, 1023, 1024, 1099):
        assert same(store(number), encode_row(rows[number], BYTES, str(number)))


def test_data_and_tokenizer_have_the_hashes_of_the_length_cache(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ROWS)
    store = TokenStore.build(open_source(path), BYTES, tmp_path / "tokens")
    lengths = build_lengths(path, BYTES, tmp_path / "lengths.jsonl").cache.lengths

    assert store.lengths.dataset_hash == lengths.dataset_hash
    assert store.lengths.tokenizer_hash == lengths.tokenizer_hash
    assert store.lengths.ids == lengths.ids
    assert store.lengths.values.tolist() == lengths.values.tolist()


def test_the_hash_is_of_the_content_and_not_of_the_order(tmp_path: Path) -> None:
    def hash_of(name: str, rows: list[dict[str, Any]]) -> str:
        source = open_source(written(tmp_path / f"{name}.jsonl", rows))
        return TokenStore.build(source, BYTES, tmp_path / name).lengths.dataset_hash

    mixed = random.Random(0).sample(ROWS, len(ROWS))
    changed = [*ROWS[:-1], {**ROWS[-1], "input": "numbers are ids toe"}]

    assert hash_of("a", ROWS) == hash_of("b", mixed) != hash_of("c", changed)


def test_a_bad_row_stops_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "odd", "image": "none"}]
    source = open_source(written(tmp_path / "rows.jsonl", rows))

    with pytest.raises(BadRow, match=r"rows\.jsonl:11: "):
        TokenStore.build(source, BYTES, tmp_path / "tokens")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


def test_bad_rows_are_skipped_and_counted_if_that_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"image": 1}, *ROWS, {"text": ""}])
    with path.open("a") as file:
        file.write("{not json\n")
    store = TokenStore.build(open_source(path), BYTES, tmp_path / "tokens", on_bad_row="skip")
    lengths = build_lengths(path, BYTES, tmp_path / "l.jsonl", on_bad_row="skip").cache.lengths

    assert store.skipped == TokenStore(store.path).skipped == 3
    assert same(store(0), encode_row(ROWS[0], BYTES, ""))
    # Rows without an id of their own keep their number in the file.
    assert store.lengths.ids == lengths.ids
    assert store.lengths.dataset_hash == lengths.dataset_hash


def test_data_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", [{"text": ""}]))

    with pytest.raises(BadRow, match=r"none of the 1 rows of rows\.jsonl can be used; .*is empty"):
        TokenStore.build(source, BYTES, tmp_path / "tokens", on_bad_row="skip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


def test_an_id_that_stands_twice_is_named_with_both_places(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", [*ROWS, {"id": "gsm", "text": "x"}]))

    with pytest.raises(DuplicateId, match=r"'gsm'.*jsonl:7 .*jsonl:11"):
        TokenStore.build(source, BYTES, tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, size_limit: Callable[[int], Any]
) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", [{"text": "x" * 100_000}]))

    with size_limit(50_000), pytest.raises(CannotWrite, match="File too large"):
        TokenStore.build(source, BYTES, tmp_path / "tokens")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl"]


@pytest.fixture
def size_limit() -> Callable[[int], Any]:
    """No file may grow past a size, as on a disk that is full."""
    import contextlib
    import resource

    @contextlib.contextmanager
    def limited(size: int) -> Any:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def test_a_store_is_not_written_over_somebody_elses_folder(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", ROWS))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "thesis.tex").write_text("years of work")

    with pytest.raises(BatchwrightError, match="not ours"):
        TokenStore.build(source, BYTES, tmp_path / "tokens")
    assert (tmp_path / "tokens" / "thesis.tex").read_text() == "years of work"


FILES = ("manifest.json", "tokens.bin", "mask.bin", "offsets.bin", "id_offsets.bin", "id_data.bin")


def test_these_are_the_files_of_a_store(store: TokenStore) -> None:
    assert sorted(p.name for p in store.path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "emptied", "grown", "removed"])
def test_a_file_of_another_size_is_named(store: TokenStore, name: str, damage: str) -> None:
    file = store.path / name
    raw = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes({"cut": raw[:-2], "emptied": b"", "grown": raw + b"\0"}[damage])

    with pytest.raises(BadFile, match=r"token store") as caught:
        TokenStore(store.path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [n for n in FILES if n not in ("tokens.bin", "mask.bin")])
def test_a_flipped_bit_outside_the_tokens_is_noticed(store: TokenStore, name: str) -> None:
    file = store.path / name
    raw = file.read_bytes()
    draw = random.Random(1)
    for place in draw.sample(range(len(raw)), min(len(raw), 40)):
        file.write_bytes(
            raw[:place] + bytes([raw[place] ^ 1 << draw.randrange(8)]) + raw[place + 1 :]
        )
        with pytest.raises(BadFile):
            TokenStore(store.path)
    file.write_bytes(raw)

    assert len(TokenStore(store.path)) == len(ROWS)


@pytest.mark.parametrize("name", ["tokens", "mask"])
def test_a_flipped_bit_in_the_tokens_stays_in_its_sample(store: TokenStore, name: str) -> None:
    """They are not read as a whole when a store is opened; what is wrong must not spread."""
    file = store.path / f"{name}.bin"
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(bytes(raw))
    opened = TokenStore(store.path)

    assert not same(opened(0), encode_row(ROWS[0], BYTES, ""))
    for number in range(1, len(ROWS)):
        assert same(opened(number), encode_row(ROWS[number], BYTES, str(number)))
