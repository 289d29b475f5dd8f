"""Replay buffers on disk: whole or refused, however the writer ended and whoever reads."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import BadFile, ConfigError, Mismatch, MissingFile
from batchwright.streaming import ReplayBuffer, ReplayBufferConfig, StreamSample

FORMS = ("buffer.json", "buffer.safetensors", "buffer")


def sample(number, length=3):
    tokens = np.arange(length) + number
    return StreamSample(
        input_ids=tokens,
        loss_mask=tokens % 2,
        sample_id=f"s{number}",
        dataset_id="test",
        source="gym",
        reward=number / 4,
    )


def grow(buffer, number):
    """One step of a run: what every process of these tests does at this number."""
    buffer.add(sample(number, 1 + number % 5), 1 + number % 7)
    if number % 3 == 0:
        batch = buffer.sample(4)
        buffer.update_priorities(batch, (batch.serials + number) % 5 + 0.5)
    if number % 11 == 10:
        buffer.evict(2)


def grown(steps, policy="fifo", size=12):
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=size, eviction_policy=policy))
    for number in range(steps):
        grow(buffer, number)
    return buffer


def same(a, b):
    return (
        a.config == b.config
        and a.counters() == b.counters()
        # As text, because NaN, which stands for None, does not equal itself.
        and repr(a.snapshot().rows.tolist()) == repr(b.snapshot().rows.tolist())
        and a.get_all() == b.get_all()
        and a._tree.tolist() == b._tree.tolist()
        and a._first.tolist() == b._first.tolist()
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", ["fifo", "priority", "random"])
def test_a_buffer_comes_back_from_every_form_and_continues_exactly(form, policy, tmp_path):
    buffer = grown(40, policy)
    loaded = ReplayBuffer.load(buffer.save(tmp_path / form))

    for number in range(40, 80):
        assert same(loaded, buffer)
        grow(loaded, number)
        grow(buffer, number)


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_buffer_can_be_saved(form, tmp_path):
    assert same(ReplayBuffer.load(ReplayBuffer().save(tmp_path / form)), ReplayBuffer())


@settings(max_examples=20, deadline=None)
@given(keep=st.integers(1, 4), saves=st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_the_state_of_every_part_that_is_kept_can_be_read(tmp_path_factory, keep, saves):
    folder = tmp_path_factory.mktemp("parts")
    buffer, states, numbers = grown(0), {}, itertools.count()
    for more in saves:
        for number in itertools.islice(numbers, more):
            grow(buffer, number)
        buffer.save(folder, keep=keep)
        states[buffer.saved.number] = ReplayBuffer.from_dict(buffer.to_dict())
    left = {int(path.name[:8]): path.name for path in folder.glob("*.safetensors")}
    full = [part for part in sorted(left) if ".full." in left[part]]

    assert len(full) <= keep
    assert sorted(left) == list(range(full[0], len(saves) + 1))
    for part in left:
        assert same(ReplayBuffer.load(folder, part=part), states[part])
    assert full[0] == 1 or len(full) == keep
    with pytest.raises(BadFile, match="it has no part"):
        ReplayBuffer.load(folder, part=len(saves) + 1)


def test_a_buffer_that_continues_from_an_older_part_is_saved_whole(tmp_path):
    buffer = grown(20)
    for number in range(20, 23):
        buffer.save(tmp_path / "buffer", keep=3)
        grow(buffer, number)
    older = ReplayBuffer.load(tmp_path / "buffer", part=2)
    older.save(tmp_path / "buffer", keep=3)

    assert older.saved.number == 4
    assert (tmp_path / "buffer/00000004.full.safetensors").exists()
    assert same(ReplayBuffer.load(tmp_path / "buffer"), older)
    assert same(ReplayBuffer.load(tmp_path / "buffer", part=2), older)


def test_only_a_folder_has_parts(tmp_path):
    path = grown(3).save(tmp_path / "buffer.json")
    with pytest.raises(ConfigError, match="only a folder has parts"):
        ReplayBuffer.load(path, part=1)


def test_the_json_form_has_the_keys_of_the_document(tmp_path):
    path = grown(5).save(tmp_path / "buffer.json")
    data = json.loads(path.read_text())

    assert list(data)[:5] == ["config", "samples", "priorities", "total_added", "total_evicted"]
    assert data["samples"][1]["input_ids"] == [1, 2]
    assert data["samples"][1]["loss_mask"] == [1, 0]
    assert data["config"]["eviction_policy"] == "fifo"
    assert len(data["samples"]) == len(data["priorities"]) == 5


def test_a_json_file_that_somebody_wrote_by_hand_is_read(tmp_path):
    data = grown(5).to_dict()
    for name in ("serials", "draws"):
        del data[name]
    (tmp_path / "hand.json").write_text(json.dumps(data, indent=2))
    loaded = ReplayBuffer.load(tmp_path / "hand.json")

    assert loaded.get_all() == grown(5).get_all()
    loaded.evict()
    assert "s0" not in loaded


@pytest.mark.parametrize(
    "change",
    [
        {"samples": []},
        {"priorities": [-1.0] * 5},
        {"priorities": [1.0] * 4},
        {"total_added": 3},
        {"serials": [0, 0, 1, 2, 3]},
        {"config": {"max_size": 2}},
        {"config": {"sizes": 2}},
        {"extra": 1},
        {"samples": [{"input_ids": [1]}] * 5},
        {"priorities": None},
    ],
)
def test_json_that_contradicts_itself_is_refused(change, tmp_path):
    (tmp_path / "buffer.json").write_text(json.dumps({**grown(5).to_dict(), **change}))

    with pytest.raises(BadFile, match="holds no replay buffer"):
        ReplayBuffer.load(tmp_path / "buffer.json")


@pytest.mark.parametrize("form", ["buffer.json", "buffer.safetensors"])
def test_a_file_cut_at_any_byte_is_refused(form, tmp_path):
    whole = grown(3).save(tmp_path / form).read_bytes()
    cut = tmp_path / f"cut-{form}"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        if whole[size:].isspace():
            assert same(ReplayBuffer.load(cut), grown(3))
            continue
        with pytest.raises(BadFile):
            ReplayBuffer.load(cut)


@pytest.mark.parametrize("form", ["buffer.json", "buffer.safetensors"])
def test_a_file_with_one_wrong_byte_is_refused(form, tmp_path):
    whole = bytearray(grown(2).save(tmp_path / form).read_bytes())
    changed = tmp_path / f"changed-{form}"
    for place in range(len(whole)):
        spoiled = whole.copy()
        spoiled[place] ^= 1 + place % 255
        changed.write_bytes(spoiled)
        try:
            loaded = ReplayBuffer.load(changed)
        except BadFile:
            continue
        # White space at the end, or in the header of safetensors, says nothing.
        assert same(loaded, grown(2))
        assert whole[place : place + 1].isspace()


def test_a_part_of_a_folder_cut_at_any_byte_is_refused(tmp_path):
    folder = saved_folder(tmp_path, 10, 1)
    (newest,) = folder.glob("*.delta.*")
    whole = newest.read_bytes()
    for size in range(len(whole)):
        newest.write_bytes(whole[:size])
        with pytest.raises(BadFile):
            ReplayBuffer.load(folder)
    newest.unlink()
    assert same(ReplayBuffer.load(folder), grown(10, size=50))


def saved_folder(tmp_path, first, saves):
    buffer = grown(first, size=50)
    folder = buffer.save(tmp_path / "buffer")
    for number in range(first, first + saves):
        grow(buffer, number)
        buffer.save(folder)
    return folder


@settings(max_examples=15, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    policy=st.sampled_from(["fifo", "priority"]),
)
def test_a_folder_saved_at_any_steps_holds_the_last_of_them(gaps, policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "buffer"
    buffer, done = grown(0, policy), 0
    for gap in gaps:
        for number in range(done, done + gap):
            grow(buffer, number)
        done += gap
        buffer.save(folder)
        assert same(ReplayBuffer.load(folder), buffer)
        if gap == 2:
            # A process that starts again continues the same folder.
            buffer = ReplayBuffer.load(folder)
            assert buffer.saved is not None


def test_a_save_writes_what_has_changed_and_old_parts_go(tmp_path):
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=5000))
    for number in range(2000):
        buffer.add(sample(number, 50))
    folder = buffer.save(tmp_path / "buffer")
    (full,) = folder.glob("*.safetensors")
    buffer.add(sample(9999, 50))
    buffer.update_priority("s3", 9.0)
    buffer.save(folder)
    delta = folder / "00000002.delta.safetensors"
    (folder / ".00000009.full.safetensors.0123abcd.unfinished").write_bytes(b"half")

    assert delta.stat().st_size < full.stat().st_size / 50
    for turn in range(30):
        for number in range(200):
            buffer.add(sample(10_000 + 200 * turn + number, 50))
        buffer.save(folder)
        assert sum(path.stat().st_size for path in folder.iterdir()) < 3 * buffer_bytes(buffer)
    assert not full.exists()
    assert not list(folder.glob(".0*"))
    assert buffer.is_full
    assert same(ReplayBuffer.load(folder), buffer)


def buffer_bytes(buffer):
    held = buffer.snapshot()
    return held.rows.nbytes + sum(map(len, held.contents))


def test_missing_and_exchanged_parts_are_refused(tmp_path):
    folder = saved_folder(tmp_path, 10, 5)
    parts = sorted(folder.glob("*.delta.*"))
    held = {path: path.read_bytes() for path in parts}
    parts[1].unlink()
    with pytest.raises(BadFile, match="a part is missing"):
        ReplayBuffer.load(folder)
    parts[1].write_bytes(held[parts[2]])
    with pytest.raises(BadFile, match="under another name"):
        ReplayBuffer.load(folder)
    parts[1].write_bytes(held[parts[1]])
    assert same(ReplayBuffer.load(folder), grown(15, size=50))
    next(folder.glob("*.full.*")).unlink()
    with pytest.raises(BadFile, match="no full part"):
        ReplayBuffer.load(folder)


def test_a_delta_of_another_history_is_refused(tmp_path):
    (tmp_path / "b").mkdir()
    one, other = saved_folder(tmp_path, 10, 3), saved_folder(tmp_path / "b", 20, 3)
    name = "00000003.delta.safetensors"
    (one / name).write_bytes((other / name).read_bytes())

    with pytest.raises(BadFile, match="does not follow part 2"):
        ReplayBuffer.load(one)


def test_a_buffer_saved_over_another_replaces_it(tmp_path):
    folder = saved_folder(tmp_path, 10, 3)
    other = grown(4, "priority")
    other.save(folder)

    assert same(ReplayBuffer.load(folder), other)
    assert len(list(folder.glob("*.safetensors"))) == 1


def test_a_writer_that_was_overtaken_by_another_is_refused(tmp_path):
    folder = saved_folder(tmp_path, 10, 1)
    a, b = ReplayBuffer.load(folder), ReplayBuffer.load(folder)
    older = ReplayBuffer.load(folder, part=1)
    grow(a, 11)
    grow(b, 12)
    a.save(folder)
    for late in (b, older):
        with pytest.raises(Mismatch, match=r"another writer has saved to .* load this one again"):
            late.save(folder)

    assert same(ReplayBuffer.load(folder), a)
    a.save(folder)
    assert same(ReplayBuffer.load(b.save(tmp_path / "elsewhere")), b)


def test_a_folder_in_which_nothing_was_saved_yet_has_its_own_sentence(tmp_path):
    (tmp_path / ".lock").touch()
    with pytest.raises(MissingFile, match="has no saved buffer yet; wait until its writer"):
        ReplayBuffer.load(tmp_path)
    assert same(ReplayBuffer.load(grown(3).save(tmp_path)), grown(3))


STOPPED = """
    import os, signal, sys
    from pathlib import Path
    from batchwright.files import writing
    with writing(Path(sys.argv[1])) as temporary:
        print(temporary, flush=True)
        signal.pause()
"""


@pytest.mark.parametrize("form", ["buffer.json", "buffer.safetensors"])
def test_what_a_killed_writer_left_goes_with_the_next_save_and_no_sooner(form, tmp_path):
    other = tmp_path / f".{form}.notes"
    other.write_text("mine")
    code = textwrap.dedent(STOPPED)
    command = [sys.executable, "-c", code, str(tmp_path / form)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        left = Path(process.stdout.readline().strip())
        grown(3).save(tmp_path / form)
        assert left.exists()
    finally:
        process.kill()
        process.communicate()
    assert left.exists()
    grown(3).save(tmp_path / form)
    assert sorted(tmp_path.iterdir()) == sorted([other, tmp_path / form])


def test_places_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds files that are no replay buffer"):
        grown(2).save(tmp_path / "notes")
    with pytest.raises(ConfigError, match="is a file"):
        grown(2).save(tmp_path / "notes" / "todo.txt")
    with pytest.raises(MissingFile, match="no replay buffer at"):
        ReplayBuffer.load(tmp_path / "nothing")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(BadFile, match="cannot be used"):
        ReplayBuffer.load(tmp_path / "other.safetensors")


WRITER = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_replay_files import *
    buffer = grown(0, size=40)
    for number in range(100_000):
        grow(buffer, number)
        buffer.save({folder!r})
        print(number, flush=True)
"""


def writer(folder):
    code = textwrap.dedent(WRITER).format(tests=os.path.dirname(__file__), folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_killed_writer_leaves_the_last_state_it_saved(seed, tmp_path):
    folder = tmp_path / "buffer"
    draw = random.Random(seed)
    process = writer(folder)
    try:
        for _ in range(draw.randrange(3, 60)):
            process.stdout.readline()
        # Somewhere in the middle of a save: the process is never idle.
        process.stdout.read(draw.randrange(1, 4))
    finally:
        process.send_signal(signal.SIGKILL)
        reported = [line for line in process.stdout.read().split() if line.isdigit()]
        process.wait(timeout=60)
        process.stdout.close()

    loaded = ReplayBuffer.load(folder)
    steps = loaded.total_added
    assert same(loaded, grown(steps, size=40))
    assert steps >= int(reported[-2] if len(reported) > 1 else 0)
    # What the killed process left behind does not disturb the next one.
    grow(loaded, steps)
    loaded.save(folder)
    assert same(ReplayBuffer.load(folder), grown(steps + 1, size=40))


FULL_DISK = """
    import resource, sys
    sys.path.insert(0, {tests!r})
    from test_replay_files import *
    from batchwright.errors import CannotWrite
    buffer = grown(20, size=50)
    for form in FORMS:
        buffer.save({folder!r} + "/" + form)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for number in range(20, 40):
        grow(buffer, number)
    for form in FORMS:
        try:
            buffer.save({folder!r} + "/" + form)
        except CannotWrite as error:
            print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    buffer.save({folder!r} + "/buffer")
"""


def test_a_save_that_the_disk_refuses_changes_nothing_and_can_be_repeated(tmp_path):
    tests = os.path.dirname(__file__)
    code = textwrap.dedent(FULL_DISK).format(tests=tests, folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert len(done.stdout.splitlines()) == 3
    assert all("cannot write" in line for line in done.stdout.splitlines())
    for form in FORMS[:2]:
        assert same(ReplayBuffer.load(tmp_path / form), grown(20, size=50))
    assert same(ReplayBuffer.load(tmp_path / "buffer"), grown(40, size=50))
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]


READER = """
    import sys
    sys.path.insert(0, {tests!r})
    from test_replay_files import *
    seen = 0
    for _ in range(12):
        loaded = ReplayBuffer.load({folder!r})
        assert same(loaded, grown(loaded.total_added, size=40))
        assert loaded.total_added >= seen
        seen = loaded.total_added
    print("all whole", seen)
"""


@pytest.mark.slow
def test_two_readers_see_whole_states_while_a_writer_saves(tmp_path):
    folder = tmp_path / "buffer"
    code = textwrap.dedent(READER).format(tests=os.path.dirname(__file__), folder=str(folder))
    process = writer(folder)
    readers = []
    try:
        process.stdout.readline()
        readers = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        # The writer goes on for as long as the readers read; its pipe must not fill.
        while any(reader.poll() is None for reader in readers):
            assert process.stdout.readline()
        outputs = [reader.communicate(timeout=120)[0] for reader in readers]
    finally:
        for started in (process, *readers):
            started.kill()
            started.wait(timeout=60)
            started.stdout.close()

    assert all(output.startswith("all whole") for output in outputs)


@pytest.mark.parametrize("name", ["priorities", "serials"])
def test_a_list_of_another_length_than_the_samples_is_named(name):
    data = grown(5).to_dict()
    with pytest.raises(BadFile, match=f"it has 6 {name} for 5 samples"):
        ReplayBuffer.from_dict({**data, name: [*data[name], 9]})
