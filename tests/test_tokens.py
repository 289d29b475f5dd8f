"""A token store holds exactly what `encode_row` gives, killed and resumed or not, undamaged."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.data.build import workers as workers_module
from batchwright.data.build.journal import Journal
from batchwright.data.measure import build_lengths
from batchwright.data.rows.sample import Sample, encode_row
from batchwright.data.rows.source import Source, open_source
from batchwright.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from batchwright.data.tokens import TokenStore, make_store
from batchwright.data.tokens.making import JOURNAL
from batchwright.errors import (
    BadFile,
    BadRow,
    BatchwrightError,
    CannotWrite,
    DuplicateId,
    MissingFile,
)
from batchwright.sealed import PAGE
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.prepare import prepare

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


def build(source: Source, tokenizer: Tokenizer, folder: Path, **settings: Any) -> TokenStore:
    """The store of the data, made in this folder of stores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_TOKENS", str(folder))
        return make_store(source, tokenizer, **settings)[0]


def unfinished(folder: Path) -> Path:
    """What an interrupted build left in a folder of stores."""
    (partial,) = folder.glob("*.partial")
    return partial


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    source = open_source(written(tmp_path / "rows.jsonl", ROWS))
    return build(source, BYTES, tmp_path / "tokens")


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
    store = build(source, BYTES, tmp_path / "tokens")

    assert [store(item).sample_id for item in range(2)] == ["0", "1"]


def test_conversations_keep_their_mask(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    store = build(open_source(written(tmp_path / "rows.jsonl", [row])), BYTES, tmp_path / "tokens")

    assert 0 < store(0).loss_mask.sum() < len(store(0))
    assert same(store(0), encode_row(row, BYTES, "0"))


@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30))
def test_any_texts_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("any")
    rows = [{"text": text} for text in texts]
    store = build(open_source(written(folder / "rows.jsonl", rows)), BYTES, folder / "tokens")

    for number, row in enumerate(rows):
        assert same(store(number), encode_row(row, BYTES, str(number)))


def test_more_rows_than_one_chunk_stay_in_order(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(1100)]
    told: list[tuple[int, int]] = []
    store = build(
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
    store = build(open_source(path), BYTES, tmp_path / "tokens")
    lengths = build_lengths(path, BYTES, tmp_path / "lengths.jsonl").cache.lengths

    assert store.lengths.dataset_hash == lengths.dataset_hash
    assert store.lengths.tokenizer_hash == lengths.tokenizer_hash
    assert store.lengths.ids == lengths.ids
    assert store.lengths.values.tolist() == lengths.values.tolist()


def test_the_hash_is_of_the_content_and_not_of_the_order(tmp_path: Path) -> None:
    def hash_of(name: str, rows: list[dict[str, Any]]) -> str:
        source = open_source(written(tmp_path / f"{name}.jsonl", rows))
        return build(source, BYTES, tmp_path / name).lengths.dataset_hash

    mixed = random.Random(0).sample(ROWS, len(ROWS))
    changed = [*ROWS[:-1], {**ROWS[-1], "input": "numbers are ids toe"}]

    assert hash_of("a", ROWS) == hash_of("b", mixed) != hash_of("c", changed)


def test_a_bad_row_stops_the_build_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [*ROWS, {"id": "odd", "image": "none"}]
    source = open_source(written(tmp_path / "rows.jsonl", rows))

    with pytest.raises(BadRow, match=r"rows\.jsonl:11: "):
        build(source, BYTES, tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_bad_rows_are_skipped_and_counted_if_that_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [{"image": 1}, *ROWS, {"text": ""}])
    with path.open("a") as file:
        file.write("{not json\n")
    store = build(open_source(path), BYTES, tmp_path / "tokens", on_bad_row="skip")
    lengths = build_lengths(path, BYTES, tmp_path / "l.jsonl", on_bad_row="skip").cache.lengths

    assert store.skipped == TokenStore(store.path).skipped
    assert store.skipped.count == 3
    assert same(store(0), encode_row(ROWS[0], BYTES, ""))
    # Rows without an id of their own keep their number in the file.
    assert store.lengths.ids == lengths.ids
    assert store.lengths.dataset_hash == lengths.dataset_hash


def test_data_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", [{"text": ""}]))

    with pytest.raises(BadRow, match=r"none of the 1 rows of rows\.jsonl can be used; .*is empty"):
        build(source, BYTES, tmp_path / "tokens", on_bad_row="skip")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_an_id_that_stands_twice_is_named_with_both_places(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", [*ROWS, {"id": "gsm", "text": "x"}]))

    with pytest.raises(DuplicateId, match=r"'gsm'.*jsonl:7 .*jsonl:11"):
        build(source, BYTES, tmp_path / "tokens")
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".partial"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, size_limit: Callable[[int], Any]
) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", [{"text": "x" * 100_000}]))

    with size_limit(50_000), pytest.raises(CannotWrite, match="File too large"):
        build(source, BYTES, tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


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


class CountingTokenizer(ByteTokenizer):
    """Counts the texts it tokenises, in whatever thread."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    @property
    def texts(self) -> int:
        return sum(self._sizes)

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        self._sizes.append(len(texts))
        return super().encode_batch(texts, special=special)


def texts_of(n: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "text": "otters " * (i % 23 + 1)} for i in range(n)]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def interrupted(path: Path, folder: Path, after: int) -> int:
    """Stop a build after this many chunks; how many rows it has done."""

    def stop(done: int, total: int) -> None:
        if done >= after * workers_module.CHUNK_ROWS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(open_source(path), BYTES, folder, workers=1, progress=stop)
    return after * workers_module.CHUNK_ROWS


def masks(folder: Path) -> int:
    """How many masks an unfinished store holds."""
    return sum(file.stat().st_size for file in folder.glob("*.partial/mask.bin"))


def journaled(folder: Path) -> int:
    """How many rows the journal of an unfinished store holds."""
    journal = Journal(folder / "journal.jsonl", JOURNAL, BYTES.fingerprint)
    rows = sum(len(record[0]) for record in journal.replay())
    journal.close()
    return rows


def wait_until(holds: Callable[[], bool], process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + 1200
    while not holds():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "wört " * (i % 13 + 1)} for i in range(1500)]
    rows[700] = {"image": 1}
    source = open_source(written(tmp_path / "rows.jsonl", rows))
    for workers in (1, 2):
        store = build(source, BYTES, tmp_path / f"{workers}", workers=workers, on_bad_row="skip")
        assert (len(store), store.skipped.count) == (1499, 1)

    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_workers_start_by_themselves_once_they_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", texts_of(1500)))
    at_work: list[int] = []

    def built(name: str) -> None:
        at_work.clear()
        build(
            source,
            BYTES,
            tmp_path / name,
            progress=lambda *_: at_work.append(len(multiprocessing.active_children())),
        )

    built("few")
    assert set(at_work) == {0}
    monkeypatch.setattr(workers_module, "TRIAL_S", 0.0)
    monkeypatch.setattr(workers_module, "WORTH_S", float("-inf"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    built("many")
    assert at_work[0] == 0
    assert max(at_work) == 2
    assert content(tmp_path / "few") == content(tmp_path / "many")


class FailingTokenizer(ByteTokenizer):
    """Raises at a text."""

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        if "fatal" in texts:
            raise MemoryError("no memory for this text")
        return super().encode_batch(texts, special=special)


def test_a_tokenizer_that_fails_raises_its_own_error_and_what_came_before_is_kept(
    tmp_path: Path,
) -> None:
    rows = texts_of(8 * workers_module.CHUNK_ROWS)
    rows[5 * workers_module.CHUNK_ROWS + 7]["text"] = "fatal"
    path = written(tmp_path / "rows.jsonl", rows)

    with pytest.raises(MemoryError, match="no memory for this text"):
        build(open_source(path), FailingTokenizer(), tmp_path / "tokens")
    assert journaled(unfinished(tmp_path / "tokens")) == 5 * workers_module.CHUNK_ROWS
    counting = CountingTokenizer()
    build(open_source(path), counting, tmp_path / "tokens")
    build(open_source(path), BYTES, tmp_path / "whole")

    assert counting.texts == 3 * workers_module.CHUNK_ROWS
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")


@pytest.mark.slow
def test_a_build_killed_in_the_middle_resumes_and_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "rows.jsonl", texts_of(6000))
    folder = tmp_path / "tokens"
    # Slowed through the progress hook, so that the kill falls into the middle.
    script = (
        "import sys, time\n"
        "from batchwright.data import load_tokenizer, open_source\n"
        "from batchwright.data.tokens import make_store\n"
        "make_store(open_source(sys.argv[1]), load_tokenizer('bytes'),\n"
        "    workers=2, progress=lambda *_: time.sleep(0.05))\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", script, str(path)]
    env = {**os.environ, "TMPDIR": str(temporary), "BATCHWRIGHT_TOKENS": str(folder)}
    rows = 0
    for _ in range(2):
        size = masks(folder)
        process = subprocess.Popen(command, text=True, env=env)
        wait_until(lambda size=size: masks(folder) > size + 30_000, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before, rows = rows, journaled(unfinished(folder))
        assert before < rows < 6000
    with (unfinished(folder) / "tokens.bin").open("ab") as file:
        file.write(b"torn")
    counting = CountingTokenizer()
    build(open_source(path), counting, tmp_path / "tokens")
    build(open_source(path), BYTES, tmp_path / "whole")

    assert counting.texts == 6000 - rows
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")
    # Workers outlive a killed parent for a moment, and clean up after it.
    wait_until(lambda: not list(temporary.glob("batchwright-*")))


@pytest.mark.training
def test_train_sft_killed_while_it_tokenises_resumes_by_the_same_command(tmp_path: Path) -> None:
    # Slow rows, so that the kill falls into the middle: a conversation is rendered many times.
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo " * 9}]
    rows = [{"messages": turns * (i % 4 + 3)} for i in range(4000)]
    path = written(tmp_path / "rows.jsonl", rows)
    line = f"train sft --model tiny --data {path} --token-budget 1024 --max-steps 1 --run-dir run"
    command = [sys.executable, "-m", "batchwright", *line.split()]

    process = subprocess.Popen(command, cwd=tmp_path, text=True)
    folder = Path(os.environ["BATCHWRIGHT_TOKENS"])
    wait_until(lambda: masks(folder) > 100_000, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = journaled(unfinished(folder))
    assert 0 < done < 4000
    assert not (tmp_path / "run" / "tokens").exists()
    again = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False
    )
    assert again.returncode == 0, again.stderr
    config = SftConfig(model="tiny", data=str(path), token_budget=1024, run_dir=tmp_path / "whole")
    prepare(config, BYTES, world_size=1)

    assert f"resuming: {done:,} rows are tokenised already" in again.stderr
    for part in ("tokens", "plan"):
        assert content(tmp_path / "run" / part) == content(tmp_path / "whole" / part)
    assert not list(folder.glob("*.partial"))


REFUSED: dict[str, dict[str, Any]] = {
    "pack_max_length must be at most token_budget=1,024, got 2,048": {
        "pack": True,
        "token_budget": 1024,
    },
    "bucket edge 8,192 makes rows wider": {"bucket_edges": "128,8192"},
    "must be integers": {"bucket_edges": "few"},
    "no data at": {"eval_data": "nowhere.jsonl"},
    "no batch plan at": {"batchplan": Path("nowhere")},
    "built for tokenizer": {"batchplan": Path("of_gpt2")},
    "world size must be at most 1, the microbatches of an epoch, got 9": {
        "batchplan": Path("of_bytes")
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_run_that_contradicts_itself_is_refused_before_a_row_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "rows.jsonl", ROWS)
    for name in ("gpt2", "bytes"):
        lengths = build_lengths(path, name, tmp_path / f"{name}.jsonl").cache
        BatchPlanBuilder(lengths, BatchingConfig(token_budget=4096)).build().save(
            tmp_path / f"of_{name}"
        )
    counting = CountingTokenizer()
    config = SftConfig(model="tiny", data=str(path), run_dir=tmp_path / "run", **REFUSED[reason])

    with pytest.raises(BatchwrightError, match=reason):
        prepare(config, counting, world_size=9)
    assert counting.texts == 0
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_after_tokenising_tokenises_nothing_again(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [*texts_of(600), {"id": "long", "text": "x" * 999}])
    held = written(tmp_path / "held.jsonl", texts_of(300))
    counting = CountingTokenizer()

    def config(**changed: Any) -> SftConfig:
        return SftConfig(model="tiny", data=str(path), run_dir=tmp_path / "run", **changed)

    with pytest.raises(BatchwrightError, match="1 of 601 samples are longer than 500 tokens"):
        prepare(config(token_budget=500), counting, world_size=1)
    assert counting.texts == 601
    with pytest.raises(MissingFile):
        prepare(config(eval_data="nowhere.jsonl"), counting, world_size=1)
    prepare(config(eval_data=str(held)), counting, world_size=1)

    assert counting.texts == 601 + 300
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        *("eval_plan", "eval_tokens", "plan", "tokens")
    ]


def test_rows_that_changed_since_an_interruption_are_the_only_ones_tokenised_again(
    tmp_path: Path,
) -> None:
    rows = texts_of(900)
    path = written(tmp_path / "rows.jsonl", rows)
    done = interrupted(path, tmp_path / "tokens", after=2)
    rows[17]["text"] = "changed"
    del rows[100:110]
    written(path, [*rows[400:], {"id": "new", "text": "new"}, *rows[:400]])
    counting = CountingTokenizer()
    build(open_source(path), counting, tmp_path / "tokens")
    build(open_source(path), BYTES, tmp_path / "whole")

    assert counting.texts == len(rows) + 1 - (done - 11)
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")


def test_a_bad_row_far_down_costs_only_itself_once_it_is_mended(tmp_path: Path) -> None:
    rows = texts_of(900)
    path = written(tmp_path / "rows.jsonl", [*rows[:600], {"id": "r600"}, *rows[601:]])
    with pytest.raises(BadRow, match=r"rows\.jsonl:601: "):
        build(open_source(path), BYTES, tmp_path / "tokens")
    written(path, rows)
    counting = CountingTokenizer()
    build(open_source(path), counting, tmp_path / "tokens")

    assert counting.texts == 900 - 512


@pytest.mark.parametrize("name", ["tokens.bin", "mask.bin", "journal.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "removed"])
def test_a_damaged_unfinished_store_gives_only_true_tokens(
    tmp_path: Path, name: str, damage: str
) -> None:
    path, folder = written(tmp_path / "rows.jsonl", texts_of(900)), tmp_path / "tokens"
    interrupted(path, folder, after=3)
    file = unfinished(folder) / name
    raw = file.read_bytes()
    middle = len(raw) // 2
    if damage == "removed":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(raw[:middle])
    else:
        file.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
    counting = CountingTokenizer()
    build(open_source(path), counting, folder)
    build(open_source(path), BYTES, tmp_path / "whole")

    assert counting.texts == (900 if damage == "removed" else 900 - 256)
    assert content(folder) == content(tmp_path / "whole")


def test_another_tokenizer_resumes_nothing(tmp_path: Path) -> None:
    path, folder = written(tmp_path / "rows.jsonl", texts_of(600)), tmp_path / "tokens"
    interrupted(path, folder, after=1)
    store = build(open_source(path), load_tokenizer("gpt2"), folder)

    assert store.lengths.tokenizer_hash == load_tokenizer("gpt2").fingerprint
    assert same(store(0), encode_row(texts_of(1)[0], load_tokenizer("gpt2"), "0"))


def test_of_two_processes_one_tokenises_and_the_other_waits(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", texts_of(2000))
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from batchwright.data import load_tokenizer, open_source\n"
        "from batchwright.data.tokens import make_store\n"
        "here = Path(sys.argv[1]).parent\n"
        "def progress(*_):\n"
        "    while len(list(here.glob('ready.*'))) < 3: time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"
        "(here / f'ready.{os.getpid()}').touch()\n"
        "store, made = make_store(open_source(sys.argv[1]), load_tokenizer('bytes'),\n"
        "    workers=1, progress=progress)\n"
        "print(len(store), made)\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(path)], text=True, stdout=-1, stderr=-1)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=1200) for process in started]

    assert sorted(out for out, _ in said) == ["2000 0\n", "2000 0\n", "2000 2000\n"]
    assert sum("another process is tokenising this data" in err for _, err in said) == 2


def test_a_store_is_not_written_over_somebody_elses_folder(tmp_path: Path) -> None:
    source = open_source(written(tmp_path / "rows.jsonl", ROWS))
    path = build(source, BYTES, tmp_path / "tokens").path
    shutil.rmtree(path)
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")

    with pytest.raises(BatchwrightError, match="not overwritten"):
        build(source, BYTES, tmp_path / "tokens")
    assert (path / "thesis.tex").read_text() == "years of work"


FILES = (
    *("manifest.json", "tokens.bin", "mask.bin", "offsets.bin", "loss.bin", "content.bin"),
    *("id_offsets.bin", "id_data.bin", "tokens_crc32.bin", "mask_crc32.bin"),
)
LATER = ("tokens.bin", "mask.bin", "tokens_crc32.bin", "mask_crc32.bin")
"""Read with the samples, not when a store is opened."""


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


@pytest.mark.parametrize("name", [n for n in FILES if n not in LATER])
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


@pytest.mark.parametrize("name", LATER)
def test_a_flipped_bit_in_the_tokens_is_refused_when_they_are_read(
    store: TokenStore, name: str
) -> None:
    """They are not read as a whole when a store is opened."""
    file = store.path / name
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(bytes(raw))
    opened = TokenStore(store.path)

    with pytest.raises(BadFile, match=f"{name} does not match its checksum"):
        opened(0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damage_is_refused_where_it_is_and_nowhere_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A sample is read with the pages it stands on: others may be damaged, or not there yet."""
    folder = tmp_path_factory.mktemp("pages")
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=5, max_size=60))
    rows = [{"input_ids": [size % 7] * size} for size in sizes]
    store = build(open_source(written(folder / "rows.jsonl", rows)), BYTES, folder / "tokens")
    name, width = data.draw(st.sampled_from([("tokens", 4), ("mask", 1)]))
    file = store.path / f"{name}.bin"
    raw = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(bytes(raw))
    opened, page, end = TokenStore(store.path), place // PAGE, 0
    for item, size in enumerate(sizes):
        first, last = end * width // PAGE, ((end + size) * width - 1) // PAGE
        end += size
        if first <= page <= last:
            with pytest.raises(BadFile, match=f"{name}.bin does not match its checksum"):
                opened(item)
        else:
            assert opened(item).input_ids.tolist() == rows[item]["input_ids"]
    with pytest.raises(BadFile):
        getattr(opened, name).whole()


NOWHERE = {"BATCHWRIGHT_TOKENS": "", "BATCHWRIGHT_HOME": "", "XDG_CACHE_HOME": ""}


def test_a_home_that_cannot_be_written_to_is_no_hindrance(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "tmp").mkdir()
    env = {**NOWHERE, "HOME": "/dev/null/home", "TMPDIR": str(tmp_path / "tmp")}
    line = "data lengths build -d rows.jsonl -t bytes -o lengths.jsonl"

    first, again = run(line, tmp_path, env), run(line, tmp_path, env)

    assert (first.code, again.code) == (0, 0), first.err + again.err
    folder = tmp_path / "tmp" / f"batchwright-{os.getuid()}"
    assert first.err.count(f"they are kept in {folder}/tokens") == 1
    assert [store.is_dir() for store in (folder / "tokens").iterdir()] == [True]
    assert folder.stat().st_mode & 0o077 == 0
    listed = run("data tokens ls --format json", tmp_path, env)
    assert len(json.loads(listed.out)["stores"]) == 1


def test_a_temporary_folder_of_others_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    theirs = tmp_path / f"batchwright-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    env = {**NOWHERE, "HOME": "/dev/null/home", "TMPDIR": str(tmp_path)}

    done = run("data lengths build -d rows.jsonl -t bytes -o lengths.jsonl", tmp_path, env)

    assert done.code == 1
    assert f"{theirs} is not a folder of this user alone; set BATCHWRIGHT_TOKENS" in done.err


def test_no_folder_for_temporary_files_is_one_sentence(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    script = (
        "import tempfile, runpy, sys; tempfile._candidate_tempdir_list = lambda: ['/proc/none'];"
        "sys.argv = ['batchwright', 'data', 'lengths', 'build', '-d', 'rows.jsonl', '-t', 'bytes',"
        " '-o', 'lengths.jsonl']; from batchwright.cli.app import main; main()"
    )
    env = {**os.environ, **NOWHERE, "HOME": "/dev/null/home"}

    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot keep tokens in /dev/null/home"), done.stderr
    assert "Traceback" not in done.stderr
