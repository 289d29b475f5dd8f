"""Data, plans and batch files in object stores: a real S3 server on loopback, and a web server."""

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("s3fs", reason="s3fs is not installed; `make machines` installs and runs this")
pytest.importorskip("moto", reason="moto is not installed; `make machines` installs and runs this")
import s3fs

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, BatchReader
from batchwright.data import open_source
from batchwright.errors import CannotRead, Mismatch, MissingFile
from batchwright.events import read_events
from batchwright.remote import RANGE, fetched

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """moto's S3 server in a process of its own."""
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    yield address
    process.kill()
    process.wait()


SERVER = """
from moto.server import ThreadedMotoServer
import time
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def store(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[s3fs.S3FileSystem, dict[str, str]]]:
    """An empty bucket `data`, and the environment of who may use it."""
    env = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "BATCHWRIGHT_HOME": str(tmp_path.with_name(f"{tmp_path.name}-home")),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    if files.exists("data"):
        files.rm("data", recursive=True)
    files.mkdir("data")
    yield files, env
    files.rm("data", recursive=True)


def rows_of(path: Path, count: int = 300) -> bytes:
    raw = "".join(
        json.dumps({"id": f"r{n}", "text": "word " * (n % 50 + 1)}) + "\n" for n in range(count)
    )
    path.write_text(raw)
    return raw.encode()


def test_every_command_on_an_object_store_gives_the_bytes_of_local_files(
    store: tuple[Any, dict[str, str]], tmp_path: Path, run: Any
) -> None:
    files, env = store
    files.pipe_file("data/train.jsonl", rows_of(tmp_path / "train.jsonl"))
    lines = """
    data lengths build -d {}train.jsonl -t bytes -o {}lengths.jsonl
    data batchplan build -l {}lengths.jsonl -e 2 -b 2048 --layout packed -o {}plan
    data batchplan verify -p {}plan -l {}lengths.jsonl
    data batchplan shard -p {}plan -w 2 -o {}shards
    data batch generate -p {}plan -d {}train.jsonl -t bytes -o {}batches
    """
    for line in lines.strip().splitlines():
        here = run(line.replace("{}", "").strip(), tmp_path, env)
        there = run(line.replace("{}", "s3://data/").strip(), tmp_path, env)
        assert here.code == 0, here.err
        assert there.code == 0, there.err
        assert env["AWS_SECRET_ACCESS_KEY"] not in there.out + there.err
    assert not (tmp_path / "s3:").exists()
    assert files.cat("data/lengths.jsonl") == (tmp_path / "lengths.jsonl").read_bytes()
    for folder in ("plan", "shards", "batches"):
        local = {
            path.relative_to(tmp_path).as_posix(): path.read_bytes()
            for path in (tmp_path / folder).rglob("*")
            if path.is_file()
        }
        remote = {
            name.removeprefix("data/"): files.cat(name) for name in files.find(f"data/{folder}")
        }
        assert local.keys() == remote.keys()
        # Archives hold the time at which they were written.
        same = [n for n in local if local[n] == remote[n] or n.endswith((".npz", "manifest.json"))]
        assert len(same) == len(local)
    assert (
        BatchPlan.load("s3://data/plan").fingerprint
        == BatchPlan.load(tmp_path / "plan").fingerprint
    )
    assert BatchReader("s3://data/batches").num_batches(1) == BatchReader(
        tmp_path / "batches"
    ).num_batches(1)


def test_a_folder_of_objects_with_splits_is_read_as_a_local_one(
    store: tuple[Any, dict[str, str]], tmp_path: Path
) -> None:
    files, _ = store
    for name in ("train-0", "train-1", "test-0"):
        files.pipe_file(f"data/set/{name}.jsonl", rows_of(tmp_path / f"{name}.jsonl", 7))
    both = open_source("s3://data/set:train")
    assert len(both) == 14
    assert both[0]["id"] == "r0"
    assert both.fingerprint == open_source(f"{tmp_path}:train").fingerprint


def test_an_object_is_read_in_ranges_once_and_then_from_its_copy(
    store: tuple[Any, dict[str, str]], tmp_path: Path
) -> None:
    files, _ = store
    line = json.dumps({"text": "x" * 10_000}).encode() + b"\n"
    raw = line * (2 * RANGE // len(line) + 5)
    files.pipe_file("data/large.jsonl", raw)
    copy = fetched("s3://data/large.jsonl")
    assert copy.read_bytes() == raw
    before = copy.stat().st_mtime_ns
    assert fetched("s3://data/large.jsonl") == copy
    assert copy.stat().st_mtime_ns == before
    # What the disk changed is fetched again, and what was cut off is resumed.
    damaged = bytearray(raw)
    damaged[1234] ^= 1
    copy.write_bytes(damaged)
    assert fetched("s3://data/large.jsonl").read_bytes() == raw
    copy.unlink()
    part = copy.with_name(f".{copy.name}.part")
    part.write_bytes(raw[: RANGE + 77])
    assert fetched("s3://data/large.jsonl").read_bytes() == raw


def test_an_object_that_changes_while_it_is_read_is_refused(
    store: tuple[Any, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, _ = store
    raw = b'{"text": "a"}\n' * (2 * RANGE // 14)
    files.pipe_file("data/moving.jsonl", raw)
    read = s3fs.S3FileSystem.cat_file
    reads = []

    def and_change(self: Any, path: str, **more: Any) -> bytes:
        found = read(self, path, **more)
        if not reads:
            reads.append(1)
            files.pipe_file("data/moving.jsonl", raw.replace(b"a", b"b"))
        return found

    monkeypatch.setattr(s3fs.S3FileSystem, "cat_file", and_change)
    with pytest.raises(
        Mismatch, match=r"s3://data/moving.jsonl changed while it was read; run again"
    ):
        open_source("s3://data/moving.jsonl")
    # The next run has the new version, none of the old one.
    assert open_source("s3://data/moving.jsonl")[0] == {"text": "b"}


def test_what_is_not_there_or_not_allowed_is_one_sentence(
    store: tuple[Any, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Any
) -> None:
    _, env = store
    with pytest.raises(MissingFile, match=r"no data at s3://data/nothing.jsonl; check the address"):
        open_source("s3://data/nothing.jsonl")
    away = {**env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    nowhere = run("data lengths build -d s3://data/a.jsonl -t bytes -o a.jsonl", tmp_path, away)
    assert nowhere.code == 1
    assert re.fullmatch(r"(error: )?cannot read s3://data/a.jsonl \(.*\); check .*\n", nowhere.err)
    with pytest.raises(CannotRead, match=r"cannot read https://127.0.0.1:9/a.jsonl"):
        open_source("https://user:word@127.0.0.1:9/a.jsonl?token=x")
    plan = BatchPlanBuilder([3, 4, 5], BatchingConfig(token_budget=16)).build()
    with pytest.raises(OSError, match="cannot write to s3://no-such-bucket/plan"):
        plan.save("s3://no-such-bucket/plan")


class Denied(http.server.BaseHTTPRequestHandler):
    """A store in which nobody has any right."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


def test_a_store_without_rights_is_one_sentence_and_what_is_here_stays(
    store: tuple[Any, dict[str, str]], tmp_path: Path, run: Any
) -> None:
    _, env = store
    rows_of(tmp_path / "train.jsonl")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denied) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        denied = {**env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{web.server_port}"}
        lines = (
            "data lengths build -d s3://data/train.jsonl -t bytes -o lengths.jsonl",
            "data lengths build -d train.jsonl -t bytes -o s3://data/lengths.jsonl",
            "train sft --model tiny --data s3://data/train.jsonl --run-dir run",
        )
        found = [run(line, tmp_path, denied) for line in lines]
        web.shutdown()
    for line, one in zip(lines, found, strict=True):
        assert one.code == 1, line
        *before, last = one.err.strip().splitlines()
        assert "these have no right to it" in last, one.err
        assert "Traceback" not in one.err
        assert not [said for said in before if "error" in said], one.err
        assert env["AWS_SECRET_ACCESS_KEY"] not in one.out + one.err
    assert not (tmp_path / "lengths.jsonl").exists()
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_rows_it_began_with_whatever_became_of_the_object(
    store: tuple[Any, dict[str, str]], tmp_path: Path, run: Any
) -> None:
    """Its tokens are in its folder: a change of the object can neither mix in nor stop it."""
    files, env = store
    raw = rows_of(tmp_path / "train.jsonl", 40)
    files.pipe_file("data/train.jsonl", raw)
    start = "train sft --model tiny --data s3://data/train.jsonl --token-budget 512 --max-steps 3"
    for more in ("--run-dir whole", "--stop-after 2 --run-dir two"):
        done = run(f"{start} {more} --quiet", tmp_path, env)
        assert done.code == 0, done.err

    files.pipe_file("data/train.jsonl", raw.replace(b"word", b"verb"))
    resumed = run("train sft --resume two --quiet", tmp_path, env)

    assert resumed.code == 0, resumed.err
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")


def losses(folder: Path) -> dict[int, float]:
    events = read_events(folder / "events.jsonl")
    return {e.fields["step"]: e.fields["loss"] for e in events if e.kind == "step"}


def test_a_web_server_with_and_without_ranges_serves_data(
    store: tuple[Any, dict[str, str]], tmp_path: Path
) -> None:
    raw = rows_of(tmp_path / "web.jsonl", 40)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = lambda *given: Quiet(*given, directory=os.fspath(tmp_path))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        source = open_source(f"http://127.0.0.1:{web.server_port}/web.jsonl")
        web.shutdown()
    assert len(source) == 40
    assert raw.startswith(json.dumps(source[0]).encode())
