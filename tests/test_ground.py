"""The ground: keys, canonical bytes, whole files, ranks and the run log."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright
from batchwright import rng
from batchwright.errors import (
    BadFile,
    CannotWrite,
    ConfigError,
    MissingFile,
)
from batchwright.events import Event, EventLog, read_events
from batchwright.files import atomic_folder, write_atomic, writing
from batchwright.fingerprint import canonical, digest, digest_array, merkle_root
from batchwright.lines import checked_line
from batchwright.sealed import SealedFolder
from batchwright.world import World


def test_keys_and_streams_never_change() -> None:
    assert rng.key(42, "shuffle", 1) == 3300132526427687007
    assert rng.key(-1, "", 0, 2**70) == 15495872563648167896
    assert rng.stream(42, "noise", 3).bit_generator.random_raw(4).tolist() == [
        6213569162292412279,
        8226897542125863930,
        7367714288465251833,
        16814093946087642847,
    ]
    assert digest("plan", 1, [None, True, 2.5, b"x"], {"b": 1, "a": [-0.0]}) == (
        "81f06125079c623f1c5112736f9e2676b959fad6b434880e50f5a95edf94033c"
    )


def test_canonical_bytes_are_spelled_out() -> None:
    assert canonical(["rng", 42, "ü", [1]]) == b"l23:s3:rngi2:42s2:\xc3\xbcl4:i1:1"
    assert canonical({"b": None, "a": (True, b"\x00")}) == b"m22:s1:al8:b1:\x01y1:\x00s1:bn0:"


def test_seeds_and_epochs_do_not_add_up() -> None:
    keys = {
        rng.key(s, p, *c) for s in range(9) for p in "ab" for c in [(), *((e,) for e in range(9))]
    }

    assert len(keys) == 9 * 2 * 10
    assert rng.key(1, "a", 23) != rng.key(1, "a2", 3) != rng.key(1, "a", 2, 3)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("ab:1sli\x00", max_size=4)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("ab1:", max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """A form in which == means what the fingerprint promises: 1, True and 1.0 differ."""
    if isinstance(value, dict):
        return ("map", frozenset((k, typed(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(typed(v) for v in value))
    return (type(value).__name__, value)


@settings(deadline=None, max_examples=300)
@given(plain, plain)
def test_canonical_bytes_are_equal_only_for_equal_values(a: Any, b: Any) -> None:
    assert (canonical(a) == canonical(b)) == (typed(a) == typed(b))
    assert canonical([a, b]) != canonical([[a, b]])
    assert canonical([a]) != canonical(a)


@settings(deadline=None, max_examples=200)
@given(st.lists(plain, max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_moving_a_boundary_changes_the_bytes(values: list[Any], i: int, j: int) -> None:
    i, j = min(i, len(values)), min(j, len(values))

    same = canonical([values[:i], values[i:]]) == canonical([values[:j], values[j:]])

    assert same == (i == j)


def test_equal_values_of_other_types_have_equal_bytes() -> None:
    assert canonical((1, "a")) == canonical([1, "a"])
    assert canonical(-0.0) == canonical(0.0)
    assert canonical({"x": 1, "y": 2}) == canonical({"y": 2, "x": 1})
    with pytest.raises(TypeError):
        canonical(object())  # type: ignore[arg-type]


def test_array_digests_see_type_shape_and_values_but_not_memory() -> None:
    a = np.arange(12, dtype=np.int32)

    assert digest_array(a) == digest_array(np.arange(24, dtype=np.int32).reshape(-1, 2)[:, 0] // 2)
    assert digest_array(a) == digest_array(a.astype(">i4"))
    others = [
        a.astype(np.int64),
        a.reshape(3, 4),
        a.reshape(4, 3),
        a[:0],
        a.view(np.uint32),
        a[::-1],
    ]
    assert len({digest_array(x) for x in [a, *others]}) == 7
    assert digest_array(a[:0]) != digest_array(np.empty(0, np.int64))


def test_merkle_roots_differ_for_every_list_of_leaves() -> None:
    lists = [list(s) for s in ("", "a", "aa", "aaa", "ab", "ba", "abc", "abcc", "abcd", "abcdd")]
    lists.append([merkle_root("ab"), merkle_root("cd")])
    roots = {merkle_root(leaves) for leaves in lists}

    assert len(roots) == len(lists)
    # Four leaves by hand: two pairs, then their pair.
    leaf = [digest("leaf", x) for x in "abcd"]
    by_hand = digest("node", digest("node", leaf[0], leaf[1]), digest("node", leaf[2], leaf[3]))
    assert merkle_root("abcd") == by_hand


def only(folder: Path, *names: str) -> bool:
    return sorted(p.name for p in folder.iterdir()) == sorted(names)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write_atomic(path, b"old")

    def half_done(error: BaseException) -> None:
        with writing(path) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(KeyboardInterrupt):
        half_done(KeyboardInterrupt())
    with pytest.raises(CannotWrite, match="No space"):
        half_done(OSError(28, "No space left on device"))

    assert path.read_bytes() == b"old"
    assert only(tmp_path, "x.bin")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_our_own_errors_pass_through_a_write_unchanged(tmp_path: Path) -> None:
    # MissingFile is an OSError too, but it does not mean that writing failed.
    with pytest.raises(MissingFile), writing(tmp_path / "x"):
        raise MissingFile("no data at y")
    with pytest.raises(MissingFile), atomic_folder(tmp_path / "f", "marker"):
        raise MissingFile("no data at y")

    assert only(tmp_path)


def test_unwritable_places_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()

    for bad in (tmp_path / "file" / "x", tmp_path / "folder"):
        with pytest.raises(CannotWrite) as caught:
            write_atomic(bad, b"content")
        assert "\n" not in str(caught.value)
    assert only(tmp_path, "file", "folder")
    with pytest.raises(ConfigError, match="is a file"), atomic_folder(tmp_path / "file", "m"):
        pass


def run(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=120,
        check=False,
    )


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """A limit on file size stands in for a full disk: writes go through in part, then fail."""
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "marker").write_text("old")
    write_atomic(tmp_path / "x", b"old")
    code = """
import resource, sys
from pathlib import Path
from batchwright.errors import CannotWrite
from batchwright.events import EventLog
from batchwright.files import atomic_folder, write_atomic
here = Path(sys.argv[1])
log = EventLog(here / "log")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 2000))
try:
    write_atomic(here / "x", b"n" * 5000)
except CannotWrite as error:
    print("file", "\\n" not in str(error))
try:
    with atomic_folder(here / "plan", "marker") as folder:
        (folder / "marker").write_text("new")
        (folder / "big").write_bytes(b"n" * 5000)
except CannotWrite:
    print("folder")
log.write("first", x=1)
try:
    log.write("big", x="n" * 3000)
except CannotWrite as error:
    print("log", "\\n" not in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
log.write("last", x=2)
"""
    done = run(code, str(tmp_path))

    assert done.stdout.split() == ["file", "True", "folder", "log", "True"], done.stderr
    assert (tmp_path / "x").read_bytes() == b"old"
    assert (tmp_path / "plan" / "marker").read_text() == "old"
    assert only(tmp_path, "x", "plan", "log")
    assert only(tmp_path / "plan", "marker")
    # The record that did not fit is torn; the ones before and after it are whole.
    assert [event.kind for event in read_events(tmp_path / "log")] == ["first", "last"]


def test_folders_replace_their_own_kind_and_refuse_others(tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "1.jpg").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="not overwritten"), atomic_folder(foreign, "marker"):
        raise AssertionError("must not begin")
    assert (foreign / "1.jpg").read_bytes() == b"precious"

    ours = tmp_path / "deep" / "plan"
    for content in ("one", "two"):
        with atomic_folder(ours, "marker") as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / content).write_text(content)
            (folder / "marker").write_text(content)
    assert only(ours, "marker", "sub")
    assert only(ours / "sub", "two")
    with pytest.raises(ZeroDivisionError), atomic_folder(ours, "marker") as folder:
        (folder / "marker").write_text(f"three {1 // 0}")
    assert (ours / "marker").read_text() == "two"
    assert only(ours.parent, "plan")


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan"
    with atomic_folder(path, "marker") as folder:
        (folder / "marker").write_text("old")
    rename = Path.rename

    def refuse_the_second(self: Path, target: Path) -> Path:
        if Path(target) == path and not self.name.endswith(".replaced"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    # As on a file system that cannot exchange two names.
    monkeypatch.setattr("batchwright.files._exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", refuse_the_second)
    with pytest.raises(CannotWrite), atomic_folder(path, "marker") as folder:
        (folder / "marker").write_text("new")
    monkeypatch.undo()

    assert (path / "marker").read_text() == "old"
    assert only(tmp_path, "plan")


def test_ranks_come_from_torchrun_then_slurm_then_nothing() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}

    assert World.detect({**slurm, "SLURM_NTASKS_PER_NODE": "4"}) == World(5, 8, 1, 4, "SLURM")
    assert World.detect({**slurm, **torchrun}) == World(2, 4, 0, 2, "torchrun")
    assert World.detect({}) == World(0, 1, 0, 1, "single process")
    # Inside an allocation but not started by srun: no rank, so a process alone.
    assert World.detect({"SLURM_NTASKS": "8"}).size == 1
    # The batch script itself is one process; only what srun starts has ranks.
    assert World.detect(batch).size == 1


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2.0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "-3"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"},
        {"SLURM_PROCID": "9", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
    ],
)
def test_ranks_that_make_no_sense_are_one_sentence(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        World.detect(environ)
    assert "\n" not in str(caught.value)


def test_records_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "events.jsonl"
    with EventLog(path) as log:
        log.write(
            "step", loss=float("nan"), rates=[1.5, float("inf")], deep={"x": (float("-inf"),)}
        )
        log.write("note", text="line\nbreak \u2028 ü", flag=True, nothing=None)

    first, second = read_events(path)

    assert isinstance(first, Event)
    assert first.t >= 0
    assert first.fields == {"loss": None, "rates": [1.5, None], "deep": {"x": [None]}}
    assert (second.kind, second.fields["text"]) == ("note", "line\nbreak \u2028 ü")
    assert second.fields["flag"] is True
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_fields_cannot_take_the_place_of_time_and_kind(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        for clash in ({"t": "x"}, {"kind": "y"}):
            with pytest.raises(ConfigError):
                log.write("step", **clash)
    assert list(read_events(tmp_path / "log")) == []


def test_a_log_can_be_torn_anywhere_and_written_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(path) as log:
        log.write("a", n=1)
        log.write("b", x={"deep": [1, {"y": 2}]}, s='quote " and }')
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1

    for cut in range(second, len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = ["a", "b"] if cut >= len(whole) - 1 else ["a"]
        assert [event.kind for event in read_events(path)] == kept
        with EventLog(path) as log:
            log.write("c")
        assert [event.kind for event in read_events(path)] == [*kept, "c"], whole[:cut]


def chain(*bodies: bytes) -> bytes:
    """Lines as a log has them."""
    raw, before = b"", 0
    for body in bodies:
        line = checked_line(body, before)
        raw, before = raw + line, int(line[-11:-3], 16)
    return raw


def test_lines_that_are_no_records_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record = b'{"t":1,"kind":"a"}'
    good = checked_line(record)
    for bad in (
        *(b"hello", b"{}", b"[1]", b"", record, good[:-1], b'{"t":1,x}', b"\xff\xfe"),
        # Checked, and no record all the same.
        *(chain(record, body).splitlines()[1] for body in (b'{"t":1}', b'{"t":1,x}', b'{"t":[]}')),
    ):
        path.write_bytes(good + bad + b"\n" + good)
        with pytest.raises(BadFile, match="line 2"):
            list(read_events(path))
    with pytest.raises(MissingFile):
        list(read_events(tmp_path / "none"))
    path.write_bytes(b"")
    assert list(read_events(path)) == []


def test_a_line_taken_out_moved_or_repeated_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = chain(*(b'{"t":%d,"kind":"a"}' % n for n in range(4))).splitlines(keepends=True)
    for order, line in (((0, 2, 3), 2), ((1, 2), 1), ((0, 2, 1, 3), 2), ((0, 1, 1), 3)):
        path.write_bytes(b"".join(lines[n] for n in order))
        with pytest.raises(BadFile, match=f"line {line}:"):
            list(read_events(path))
    path.write_bytes(b"foreign\n")
    with pytest.raises(BadFile, match="move it away"):
        EventLog(path)
    assert path.read_bytes() == b"foreign\n"


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 200), st.integers(1, 255), st.booleans())
def test_a_damaged_log_gives_its_first_records_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    whole = chain(*(b'{"t":0.%d,"kind":"step","text":"x}y"}' % n for n in range(3)))
    raw = bytearray(whole)
    raw[at % len(raw)] ^= flip
    path.write_bytes(whole[: at % len(raw)] if cut else bytes(raw))

    try:
        found = [event.t for event in read_events(path)]
    except BadFile as error:
        assert not cut
        assert "line" in str(error)  # noqa: PT017
    else:
        assert found == [0.0, 0.1, 0.2][: len(found)]
        # What looks like a torn last line is one that was hit at its end.
        assert cut or (len(found) == 2 and at % len(raw) >= raw.rindex(b"{"))


def test_a_killed_writer_loses_no_acknowledged_record(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from batchwright.events import EventLog
log = EventLog(Path(sys.argv[1]))
for n in range(10**9):
    log.write("step", n=n, padding="x" * (n % 300))
    print(n, flush=True)
"""
    path = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 500:
            break
    process.send_signal(signal.SIGKILL)
    acknowledged = [500, *map(int, process.stdout.read().split()[:-1])]
    process.wait()
    process.stdout.close()

    numbers = [event.fields["n"] for event in read_events(path)]

    assert numbers == list(range(len(numbers)))
    assert len(numbers) > acknowledged[-1]


def test_numpy_numbers_become_plain_ones_in_the_run_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("step", loss=np.float32(0.5), step=np.int64(3), nan=np.float64("nan"), ok=True)
    (event,) = read_events(tmp_path / "events.jsonl")

    assert event.fields == {"loss": 0.5, "step": 3, "nan": None, "ok": True}


def test_a_folder_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    mine = SealedFolder("batchwright.mine", 1, "thing", "make it again")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"format": "somebody.elses"}')

    with pytest.raises(ConfigError, match="not overwritten"), mine.replacing(tmp_path / "web"):
        pass
    for _ in range(2):
        with mine.replacing(tmp_path / "own") as folder:
            mine.write(folder, {"a": 1})

    assert mine.read(tmp_path / "own")["a"] == 1
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["manifest.json"]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_numba_is_imported_by_the_first_kernel_that_is_called() -> None:
    done = python("""
import sys
import numpy as np
from batchwright.jit import interpreted
from batchwright.permutation import permute
with interpreted():
    plain = permute(3, 1000, np.uint64(7))
assert "numba" not in sys.modules
assert permute(3, 1000, np.uint64(7)) == plain
assert "numba" in sys.modules
""")

    assert done.returncode == 0, done.stderr


def test_numba_that_somebody_else_imported_is_not_started_for_a_small_thing() -> None:
    done = python("""
import numba
from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.permutation import permute
plan = BatchPlanBuilder({str(i): i % 50 + 1 for i in range(100)}, BatchingConfig()).build()
assert len(list(plan.iter_epoch(0)))
assert "dispatcher" not in vars(permute)
""")

    assert done.returncode == 0, done.stderr


def test_numba_is_loaded_when_many_small_things_are_done() -> None:
    done = python("""
import sys
from batchwright.batching import BatchingConfig, BatchPlanBuilder
plan = BatchPlanBuilder({str(i): i % 50 + 1 for i in range(100)}, BatchingConfig()).build()
first = [batch for batch in plan.iter_epoch(0)]
assert "numba" not in sys.modules
for epoch in range(100):
    list(plan.iter_epoch(epoch))
assert "numba" in sys.modules
assert [batch for batch in plan.iter_epoch(0)] == first
""")

    assert done.returncode == 0, done.stderr


def test_kernels_run_where_nothing_can_be_cached(tmp_path: Path) -> None:
    # Nobody, not even root, can write into a wheel on the path or under /proc.
    archive = tmp_path / "package.whl"
    root = Path(batchwright.__file__).parent
    with zipfile.ZipFile(archive, "w") as file:
        for path in root.rglob("*.py"):
            file.write(path, f"batchwright/{path.relative_to(root)}")
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"), "/proc/none")

    done = python(
        """
import numpy as np
import batchwright
from batchwright.permutation import mix
assert ".whl" in batchwright.__file__
print(int(mix(np.uint64(42), np.uint64(7))))
""",
        PYTHONPATH=str(archive),
        **nowhere,
    )

    assert done.stdout.strip() == "14769051326987775908", done.stderr
