"""Lengths and tokens on Ray clusters: files and ranges of rows that the workers read themselves."""

import gzip
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from object_stores import opened, serving
from ray_cluster import cluster_of, lose, new_node  # isort: split

from ray.cluster_utils import Cluster

pytestmark = pytest.mark.filterwarnings("ignore")
SENT = "the rows are read here and sent"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of(2, 2) as found:
        yield found


def rows_of(path: Path, count: int) -> Path:
    rows = [{"id": f"{path.name}-{n}", "text": "some words " * (n % 90 + 1)} for n in range(count)]
    if path.suffix == ".parquet":
        # Row groups that no task ends with.
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    else:
        write = gzip.open if path.suffix == ".gz" else open
        with write(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.mark.parametrize(
    ("names", "sent"),
    [
        (["train.jsonl"], 0),
        (["train.parquet"], 0),
        # With the rows of the second file that share a chunk with the first of the third.
        (["a.jsonl", "b.parquet", "c.jsonl.gz"], 2600 + 5200 % 256),
    ],
)
def test_workers_read_the_files_themselves_and_what_only_one_can_read_is_sent(
    cluster: Cluster,
    names: list[str],
    sent: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from batchwright.data import build_lengths, open_source
    from batchwright.integrations.ray import RayWorkers

    source = open_source(
        [str(rows_of(tmp_path / name, 2600)) for name in names], ignore_columns=["other"]
    )
    workers = RayWorkers()
    for name, using in (("one", 1), ("many", workers)):
        monkeypatch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path / name))
        build_lengths(source, "bytes", tmp_path / f"{name}.jsonl", workers=using)
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert workers.sent == sent


def test_a_file_that_is_replaced_under_the_build_is_the_one_it_began_with(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.data import build_lengths, open_source
    from batchwright.integrations.ray import RayWorkers

    data = rows_of(tmp_path / "train.jsonl", 60_000)
    build_lengths(data, "bytes", tmp_path / "one.jsonl", workers=1)
    monkeypatch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path / "many"))
    source, workers = open_source(data), RayWorkers()
    other = tmp_path / "other.jsonl"
    other.write_bytes(data.read_bytes().replace(b"words", b"verbs"))

    def progress(done: int, total: int) -> None:
        if other.exists():
            other.replace(data)

    out = tmp_path / "many.jsonl"
    build_lengths(source, "bytes", out, workers=workers, progress=progress)
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert 0 < workers.sent < 60_000


def test_a_node_that_does_not_see_the_file_is_named_and_its_rows_are_sent(
    cluster: Cluster, tmp_path: Path, run: Any
) -> None:
    rows_of(tmp_path / "train.jsonl", 3000)
    # Another folder for each process, as a path on a disk of its own is for each node.
    line = "data lengths build -d {} -t bytes -o {}"
    here = run(line.format("train.jsonl", "here.jsonl"), tmp_path)
    there = run(
        f"{line.format('/proc/self/cwd/train.jsonl', 'there.jsonl')} --on ray "
        f"--address {cluster.address}",
        tmp_path,
        {"BATCHWRIGHT_TOKENS": str(tmp_path / "there")},
    )
    assert (here.code, there.code) == (0, 0), here.err + there.err
    assert there.err.count(SENT) == 1
    assert "node 127.0.0.1 cannot read train.jsonl (" in there.err
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_workers_read_an_object_themselves_where_they_have_the_right(
    cluster: Cluster, scheme: str, tmp_path: Path, run: Any
) -> None:
    local = rows_of(tmp_path / "train.jsonl", 3000)
    with serving(scheme) as address, opened(scheme, address, str(tmp_path / "home")) as store:
        store.put("set/train-0.jsonl", local.read_bytes())
        line = f"data lengths build -d {store.root}/set -t bytes -o {{}} {{}}"
        for name, flags in (
            ("one", "--workers 1"),
            # Started by the command, with its environment.
            ("own", "--on ray"),
            # Nodes without the environment of the store.
            ("theirs", f"--on ray --address {cluster.address}"),
        ):
            tokens = {"BATCHWRIGHT_TOKENS": str(tmp_path / name)}
            done = run(line.format(f"{name}.jsonl", flags), tmp_path, {**store.env, **tokens})
            assert done.code == 0, done.err
            assert done.err.count(SENT) == (name == "theirs"), done.err
            assert "secret" not in done.err
    found = {(tmp_path / f"{name}.jsonl").read_bytes() for name in ("one", "own", "theirs")}
    assert len(found) == 1


def test_lengths_built_on_a_cluster_that_loses_a_node_are_those_of_one_machine(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.data import build_lengths
    from batchwright.errors import BadRow
    from batchwright.integrations.ray import RayWorkers, workers

    monkeypatch.setattr(workers, "TASK_CHUNKS", 1)
    data = tmp_path / "train.jsonl"
    lines = [json.dumps({"id": f"r{n}", "text": "some words " * (n % 90)}) for n in range(20_000)]
    lines[7], lines[15_000] = '{"id": "bad"', '{"nothing": 1}'
    data.write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path / "one"))
    one = build_lengths(data, "bytes", tmp_path / "one.jsonl", workers=1, on_bad_row="skip")
    monkeypatch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path / "many"))
    doomed = new_node(cluster, 4)
    lost = False

    def progress(done: int, total: int) -> None:
        nonlocal lost
        if not lost and done > 2000:
            lost = True
            lose(cluster, doomed)

    many = build_lengths(
        data,
        "bytes",
        tmp_path / "many.jsonl",
        workers=RayWorkers(),
        on_bad_row="skip",
        progress=progress,
    )
    assert lost
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert many.skipped == one.skipped
    stores = [
        {
            path.name: path.read_bytes()
            for path in report.store.path.rglob("*")
            if path.is_file() and path.name != "manifest.json"
        }
        for report in (one, many)
    ]
    assert len(stores[0]) > 2
    assert stores[0] == stores[1]
    # What a row or the tokenizer raises there is raised here as it is.
    monkeypatch.setenv("BATCHWRIGHT_TOKENS", str(tmp_path / "refused"))
    with pytest.raises(BadRow, match=r"train\.jsonl:1: its text is empty"):
        build_lengths(data, "bytes", tmp_path / "refused.jsonl", workers=RayWorkers())


def dying(*_: Any) -> Any:
    """As the kernel ends a process that has taken too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_rows_that_kill_every_worker_end_the_build_in_one_sentence(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.data import load_tokenizer, open_source
    from batchwright.errors import BatchwrightError
    from batchwright.integrations.ray import RayWorkers, workers

    monkeypatch.setattr(workers, "RETRIES", 1)
    known: Any = None
    source = open_source(rows_of(tmp_path / "train.jsonl", 3))
    with pytest.raises(BatchwrightError, match="lost with their worker 2 times") as found:
        list(RayWorkers().map(dying, source, iter([(0, 3)]), load_tokenizer("bytes"), known))
    assert "perhaps out of memory" in str(found.value)
    assert "run again to resume" in str(found.value)
    assert "\n" not in str(found.value)


def test_a_command_starts_a_cluster_of_its_own_or_joins_that_of_the_environment(
    cluster: Cluster, tmp_path: Path, run: Any
) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "a", "text": "some words"}\n')
    line = "data lengths build -d train.jsonl -t bytes -o {} --on ray"
    own = run(line.format("own.jsonl"), tmp_path)
    assert own.code == 0, own.err
    assert "Ray: a cluster at 127.0.0.1:" in own.err
    assert "started here and for this command" in own.err
    theirs = run(line.format("theirs.jsonl"), tmp_path, {"RAY_ADDRESS": cluster.address})
    assert theirs.code == 0, theirs.err
    assert f"Ray: the cluster at {cluster.address} (2 nodes, 4 cores)" in theirs.err
    assert (tmp_path / "own.jsonl").read_bytes() == (tmp_path / "theirs.jsonl").read_bytes()
