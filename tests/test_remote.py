"""Data, plans and batch files in object stores: S3, GCS and the hub on loopback, and the web."""

import contextlib
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

sys.path.insert(0, str(Path(__file__).parent))
from object_stores import SCHEMES, SECRET, Store, denying, environment, opened, serving  # isort: split

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, BatchReader
from batchwright.data import open_source
from batchwright.errors import CannotRead, Mismatch, MissingFile
from batchwright.events import read_events
from batchwright.remote import RANGE, fetched

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with serving(request.param) as address:
        yield request.param, address


@pytest.fixture
def store(server: tuple[str, str], tmp_path: Path) -> Iterator[Store]:
    """Each of the stores in turn, empty."""
    with opened(*server, str(tmp_path.with_name(f"{tmp_path.name}-home"))) as found:
        yield found


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Store]:
    """One of them, for what is the same in all."""
    with (
        serving("s3") as address,
        opened("s3", address, str(tmp_path.with_name(f"{tmp_path.name}-home"))) as found,
    ):
        yield found


def rows_of(path: Path, count: int = 300) -> bytes:
    raw = "".join(
        json.dumps({"id": f"r{n}", "text": "word " * (n % 50 + 1)}) + "\n" for n in range(count)
    )
    path.write_text(raw)
    return raw.encode()


def test_every_command_on_an_object_store_gives_the_bytes_of_local_files(
    store: Store, tmp_path: Path, run: Any
) -> None:
    store.put("train.jsonl", rows_of(tmp_path / "train.jsonl"))
    lines = """
    data lengths build -d {}train.jsonl -t bytes -o {}lengths.jsonl
    data batchplan build -l {}lengths.jsonl -e 2 -b 2048 --layout packed -o {}plan
    data batchplan verify -p {}plan -l {}lengths.jsonl
    data batchplan shard -p {}plan -w 2 -o {}shards
    data batch generate -p {}plan -d {}train.jsonl -t bytes -o {}batches
    """
    for line in lines.strip().splitlines():
        here = run(line.replace("{}", "").strip(), tmp_path, store.env)
        there = run(line.replace("{}", f"{store.root}/").strip(), tmp_path, store.env)
        assert here.code == 0, here.err
        assert there.code == 0, there.err
        assert SECRET not in there.out + there.err
        # What is shown can be typed again.
        assert there.out.count(f"{store.scheme}:/") == there.out.count(f"{store.scheme}://")
    assert not (tmp_path / f"{store.scheme}:").exists()
    assert store.cat("lengths.jsonl") == (tmp_path / "lengths.jsonl").read_bytes()
    for folder in ("plan", "shards", "batches"):
        local = {
            path.relative_to(tmp_path).as_posix(): path.read_bytes()
            for path in (tmp_path / folder).rglob("*")
            if path.is_file()
        }
        remote = {name: store.cat(name) for name in store.names(folder)}
        assert local.keys() == remote.keys()
        # Archives hold the time at which they were written.
        same = [n for n in local if local[n] == remote[n] or n.endswith((".npz", "manifest.json"))]
        assert len(same) == len(local)
    plans = [BatchPlan.load(root) for root in (f"{store.root}/plan", tmp_path / "plan")]
    assert plans[0].fingerprint == plans[1].fingerprint
    rank = BatchPlan.load(f"{store.root}/shards/rank_1")
    assert rank.fingerprint == BatchPlan.load(tmp_path / "shards" / "rank_1").fingerprint
    batches = [BatchReader(root) for root in (f"{store.root}/batches", tmp_path / "batches")]
    assert batches[0].num_batches(1) == batches[1].num_batches(1)


def test_training_takes_rows_and_plan_from_an_object_store(
    store: Store, tmp_path: Path, run: Any
) -> None:
    store.put("train.jsonl", rows_of(tmp_path / "train.jsonl", 40))
    for root in (str(tmp_path), store.root):
        for line in (
            f"data lengths build -d {root}/train.jsonl -t bytes -o {root}/lengths.jsonl",
            f"data batchplan build -l {root}/lengths.jsonl -b 512 -o {root}/plan",
        ):
            done = run(line, tmp_path, store.env)
            assert done.code == 0, done.err
    line = "train sft --model tiny --data {0}/train.jsonl --batchplan {0}/plan --max-steps 2"
    dry = run(f"{line.format(store.root)} --run-dir dry --dry-run", tmp_path, store.env)
    assert dry.code == 0, dry.err
    assert not (tmp_path / "dry").exists()
    for root, name in ((str(tmp_path), "here"), (store.root, "there")):
        done = run(f"{line.format(root)} --run-dir {name} --quiet", tmp_path, store.env)
        assert done.code == 0, done.err
    assert losses(tmp_path / "here") == losses(tmp_path / "there")


def losses(folder: Path) -> dict[int, float]:
    events = read_events(folder / "events.jsonl")
    return {e.fields["step"]: e.fields["loss"] for e in events if e.kind == "step"}


def test_a_folder_of_objects_with_splits_is_read_as_a_local_one(
    store: Store, tmp_path: Path
) -> None:
    for name in ("train-0", "train-1", "test-0"):
        store.put(f"set/{name}.jsonl", rows_of(tmp_path / f"{name}.jsonl", 7))
    both = open_source(f"{store.root}/set:train")
    assert len(both) == 14
    assert both[0]["id"] == "r0"
    assert both.fingerprint == open_source(f"{tmp_path}:train").fingerprint


def test_an_object_is_read_in_ranges_once_and_then_from_its_copy(store: Store) -> None:
    line = json.dumps({"text": "x" * 10_000}).encode() + b"\n"
    raw = line * (2 * RANGE // len(line) + 5)
    store.put("large.jsonl", raw)
    address = f"{store.root}/large.jsonl"
    copy = fetched(address)
    assert copy.read_bytes() == raw
    before = copy.stat().st_mtime_ns
    assert fetched(address) == copy
    assert copy.stat().st_mtime_ns == before
    # What the disk changed is fetched again, and what was cut off is resumed.
    damaged = bytearray(raw)
    damaged[1234] ^= 1
    copy.write_bytes(damaged)
    assert fetched(address).read_bytes() == raw
    copy.unlink()
    part = copy.with_name(f".{copy.name}.part")
    part.write_bytes(raw[: RANGE + 77])
    assert fetched(address).read_bytes() == raw
    # Another version of the same size is another object.
    store.put("large.jsonl", raw.replace(b"x", b"y"))
    assert fetched(address).read_bytes() == raw.replace(b"x", b"y")


def test_an_object_that_changes_while_it_is_read_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b'{"text": "a"}\n' * (2 * RANGE // 14)
    store.put("moving.jsonl", raw)
    kind = type(store.files)
    read = kind.cat_file
    reads = []

    def and_change(self: Any, path: str, **more: Any) -> bytes:
        found: bytes = read(self, path, **more)
        if not reads:
            reads.append(1)
            store.put("moving.jsonl", raw.replace(b"a", b"b"))
        return found

    monkeypatch.setattr(kind, "cat_file", and_change)
    address = f"{store.root}/moving.jsonl"
    with pytest.raises(Mismatch, match=f"{address} changed while it was read; run again"):
        open_source(address)
    # The next run has the new version, none of the old one.
    assert open_source(address)[0] == {"text": "b"}


def test_what_is_not_there_is_one_sentence(store: Store) -> None:
    with pytest.raises(MissingFile, match=f"no data at {store.root}/nothing.jsonl; check the"):
        open_source(f"{store.root}/nothing.jsonl")
    plan = BatchPlanBuilder([3, 4, 5], BatchingConfig(token_budget=16)).build()
    other = {"s3": "s3://no-such-bucket", "gs": "gs://none", "hf": "hf://datasets/you/none"}
    with pytest.raises(OSError, match=f"cannot write to {other[store.scheme]}/plan"):
        plan.save(f"{other[store.scheme]}/plan")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_store_without_rights_is_one_sentence_and_what_is_here_stays(
    scheme: str, tmp_path: Path, run: Any
) -> None:
    rows_of(tmp_path / "train.jsonl")
    root = "hf://datasets/me/data" if scheme == "hf" else f"{scheme}://data"
    lines = (
        f"data lengths build -d {root}/train.jsonl -t bytes -o lengths.jsonl",
        f"data lengths build -d train.jsonl -t bytes -o {root}/lengths.jsonl",
        f"train sft --model tiny --data {root}/train.jsonl --run-dir run",
    )
    with denying() as address:
        env = {**environment(scheme, address), "BATCHWRIGHT_HOME": str(tmp_path / "home")}
        found = [run(line, tmp_path, env) for line in lines]
    for line, one in zip(lines, found, strict=True):
        assert one.code == 1, line
        *before, last = one.err.strip().splitlines()
        assert "these have no right to it" in last, one.err
        assert "Traceback" not in one.err
        assert not [said for said in before if "error" in said], one.err
        assert SECRET not in one.out + one.err
    assert not (tmp_path / "lengths.jsonl").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("scheme", "library"), [("s3", "s3fs"), ("gs", "gcsfs"), ("hf", "huggingface_hub")]
)
def test_a_missing_library_is_named_with_what_installs_it(
    scheme: str, library: str, tmp_path: Path
) -> None:
    hide = f"import sys; sys.modules[{library!r}] = None; "
    words = f"data lengths build -d {scheme}://datasets/me/data/train.jsonl -t bytes -o l.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "-c", hide + "from batchwright.cli.app import main; main()"),
            *words.split(),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (said,) = done.stderr.strip().splitlines()
    assert f"{scheme}:// needs a library that is missing" in said
    assert "pip install 'batchwright[remote]'" in said


def test_nobody_at_the_address_is_one_sentence(s3: Store, tmp_path: Path, run: Any) -> None:
    away = {**s3.env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    nowhere = run("data lengths build -d s3://data/a.jsonl -t bytes -o a.jsonl", tmp_path, away)
    assert nowhere.code == 1
    assert re.fullmatch(r"(error: )?cannot read s3://data/a.jsonl \(.*\); check .*\n", nowhere.err)
    with pytest.raises(CannotRead, match=r"cannot read https://127.0.0.1:9/a.jsonl"):
        open_source("https://user:word@127.0.0.1:9/a.jsonl?token=x")


def test_a_run_goes_on_with_the_rows_it_began_with_whatever_became_of_the_object(
    s3: Store, tmp_path: Path, run: Any
) -> None:
    """Its tokens are in its folder: a change of the object can neither mix in nor stop it."""
    raw = rows_of(tmp_path / "train.jsonl", 40)
    s3.put("train.jsonl", raw)
    start = "train sft --model tiny --data s3://data/train.jsonl --token-budget 512 --max-steps 3"
    for more in ("--run-dir whole", "--stop-after 2 --run-dir two"):
        done = run(f"{start} {more} --quiet", tmp_path, s3.env)
        assert done.code == 0, done.err

    s3.put("train.jsonl", raw.replace(b"word", b"verb"))
    resumed = run("train sft --resume two --quiet", tmp_path, s3.env)

    assert resumed.code == 0, resumed.err
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")


class Web(http.server.SimpleHTTPRequestHandler):
    """A web server that has no ranges; `says` is whether it names versions."""

    says = True

    def send_header(self, keyword: str, value: str) -> None:
        if self.says or keyword != "Last-Modified":
            super().send_header(keyword, value)

    def log_message(self, *_: object) -> None: ...


class Ranged(Web):
    """One that has them."""

    def do_GET(self) -> None:
        raw = Path(self.translate_path(self.path)).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), int(asked[2])) if asked else (0, len(raw) - 1)
        if asked:
            first, last = self.sends(first, last)
        part = raw[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        if self.says:
            self.send_header("ETag", '"1"')
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(raw)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)
            if not self.says:
                swapped = raw.replace(b"www", b"vvv") if b"www" in raw else raw.replace(b"v", b"w")
                Path(self.translate_path(self.path)).write_bytes(swapped)

    do_HEAD = do_GET

    def sends(self, first: int, last: int) -> tuple[int, int]:
        return first, last


class Silent(Web):
    says = False


class Short(Ranged):
    """One that sends less than it was asked for and says so, as HTTP allows."""

    def sends(self, first: int, last: int) -> tuple[int, int]:
        return first, min(last, first + 1_000_000)


class Elsewhere(Ranged):
    """One that always sends the beginning, and says so."""

    def sends(self, first: int, last: int) -> tuple[int, int]:
        return 0, last - first


class Swapped(Ranged):
    """One that names no version and has another file of the same size after each request."""

    says = False


@contextlib.contextmanager
def web(kind: type[Web], folder: Path) -> Iterator[str]:
    handler = lambda *given: kind(*given, directory=os.fspath(folder))  # noqa: E731
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def large_file(path: Path) -> bytes:
    """More than one range, each line of 1,024 bytes so that a wrong range is of whole lines."""
    lines = [json.dumps({"id": f"r{n:07d}", "text": ""}) for n in range(RANGE // 1024 + 2048)]
    raw = "".join(f"{one[:-2]}{'w' * (1023 - len(one))}{one[-2:]}\n" for one in lines).encode()
    path.write_bytes(raw)
    return raw


@pytest.mark.parametrize("kind", [Web, Ranged, Short, Swapped])
def test_what_a_web_server_sends_in_pieces_is_one_version_of_the_file(
    kind: type[Web], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    raw = large_file(tmp_path / "web.jsonl")
    versions = {raw, raw.replace(b"www", b"vvv")}
    with web(kind, tmp_path) as address:
        assert fetched(f"{address}/web.jsonl").read_bytes() in versions


def test_a_range_that_was_not_asked_for_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    raw = large_file(tmp_path / "web.jsonl")
    with web(Elsewhere, tmp_path) as address:
        with pytest.raises(
            CannotRead, match=rf"asked for bytes {RANGE} to .*, the server answered"
        ):
            fetched(f"{address}/web.jsonl")
        monkeypatch.setattr(Elsewhere, "sends", Ranged.sends)
        assert fetched(f"{address}/web.jsonl").read_bytes() == raw


@pytest.mark.parametrize("status", [200, 302, 403, 404, 500])
def test_what_is_secret_in_an_address_is_in_no_sentence_and_no_name(
    status: int, tmp_path: Path, run: Any
) -> None:
    class Answers(Web):
        def do_GET(self) -> None:
            self.send_response(status)
            if status == 302:
                self.send_header("Location", self.path)
            self.send_header("Content-Length", "9")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"not JSON\n")

        do_HEAD = do_GET

    with web(Answers, tmp_path) as address:
        given = address.replace("://", f"://me:{SECRET}@") + f"/a.jsonl?X-Amz-Signature={SECRET}"
        for line in (
            f"data lengths build -t bytes -o l.jsonl -d {given}",
            f"data rows show {given}",
        ):
            outcome = run(line, tmp_path, {"BATCHWRIGHT_HOME": str(tmp_path / "home")})
            assert outcome.code == 1
            said = outcome.out + outcome.err
            assert "a.jsonl" in said
            assert SECRET not in said
    assert not [one for one in tmp_path.rglob("*") if SECRET in one.name]


def test_addresses_that_differ_in_their_query_are_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))

    class Chosen(Web):
        def do_GET(self) -> None:
            raw = self.path[-1:].encode() * 5
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(raw)

        do_HEAD = do_GET

    with web(Chosen, tmp_path) as address:
        copies = [fetched(f"{address}/a.jsonl?part={n}") for n in range(3)]
    assert [one.read_bytes() for one in copies] == [b"00000", b"11111", b"22222"]


def test_the_empty_object_that_stands_for_a_folder_is_no_data(s3: Store, tmp_path: Path) -> None:
    raw = rows_of(tmp_path / "a.jsonl", 5)
    s3.files.pipe_file(f"{s3.root}/train/part-0.jsonl", raw)
    # The library writes no key that ends in a slash; consoles do.
    bucket, _, key = s3.root.partition("://")[2].partition("/")
    s3.files.call_s3("put_object", Bucket=bucket, Key=f"{key}/train/".lstrip("/"), Body=b"")
    for address in (f"{s3.root}/train", f"{s3.root}/train/"):
        assert len(open_source(address)) == 5


@pytest.mark.parametrize("kind", [Web, Ranged, Silent])
def test_a_web_server_serves_data_with_and_without_ranges_and_versions(
    kind: type[Web], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    raw = rows_of(tmp_path / "web.jsonl", 40)
    with web(kind, tmp_path) as root:
        address = f"{root}/web.jsonl"
        source = open_source(address)
        assert len(source) == 40
        assert raw.startswith(json.dumps(source[0]).encode())
        if kind is Silent:
            # Nothing says that it is another one, so none is kept for the next time.
            (tmp_path / "web.jsonl").write_bytes(raw.replace(b"word", b"verb"))
            assert "verb" in str(open_source(address)[0])
