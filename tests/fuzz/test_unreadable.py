"""What the system does not give is not damage, and what is no file is not waited for."""

import contextlib
import os
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from formats import FORMATS

from batchwright.errors import BadFile, BatchwrightError, MissingFile
from fuzz import make

# Torch is loaded for the embedding alone, which is a sealed folder as the others are.
NAMES = [name for name in FORMATS if "embedding" not in name and not FORMATS[name].crafted]
SECONDS = 60


@pytest.fixture(params=NAMES)
def example(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path, Any]:
    for variable in ("BATCHWRIGHT_HOME", "BATCHWRIGHT_TOKENS"):
        monkeypatch.setenv(variable, str(tmp_path))
    folder = tmp_path / "example"
    return request.param, folder, make(request.param, folder)


@contextlib.contextmanager
def within_a_minute() -> Iterator[None]:
    def hangs(*_: object) -> None:
        raise TimeoutError("it waits for what is no file")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
        one.bind(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def taken(name: str, folder: Path) -> Any:
    """What a reader makes of a folder, an error of the system or of ours too."""
    try:
        with within_a_minute(), contextlib.redirect_stdout(None):
            return FORMATS[name].read(folder)
    except TimeoutError:
        raise
    except (OSError, BatchwrightError) as error:
        return error


def test_a_pipe_a_folder_a_socket_or_a_device_in_the_place_of_a_file_is_refused(
    example: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder, whole = example
    place = tmp_path / "place"
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(place))
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    # Rows may come from a pipe; a lock holds nothing.
    files = [file for file in files if file.name not in ("rows.jsonl", ".lock")]
    kinds = (pipe, Path.mkdir, bound, endless)
    # All four in the place of one file, and one of them in the place of each other.
    puts = [(files[0], put) for put in kinds]
    puts += [(file, kinds[number % 4]) for number, file in enumerate(files[1:])]
    for file, put in puts:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        (place / file).unlink()
        put(place / file)
        seen = taken(name, place)
        if isinstance(seen, BatchwrightError):
            assert "\n" not in str(seen)
        else:
            assert seen == whole or FORMATS[name].kept(seen, whole), (file, put)


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """As many as are open now, and so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def another_user(number: int) -> Iterator[None]:
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


def check(name: str, seen: Any, whole: Any) -> None:
    """A reader gave all that was written, or said what the system refused."""
    if isinstance(seen, Exception):
        assert isinstance(seen, OSError), seen
        assert not isinstance(seen, BadFile | MissingFile), seen
    else:
        # Limits that were learned are learned again.
        assert seen == whole or name == "limits"


def test_too_few_descriptors_are_never_taken_for_damage(example: tuple[str, Path, Any]) -> None:
    name, folder, whole = example
    for more in range(5):
        with few_descriptors(more):
            seen = taken(name, folder)
        check(name, seen, whole)
    assert FORMATS[name].read(folder) == whole


def test_files_that_may_not_be_read_are_never_taken_for_damage(
    example: tuple[str, Path, Any],
) -> None:
    name, folder, whole = example
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    with another_user(65534):
        seen = taken(name, folder)
    check(name, seen, whole)
    assert FORMATS[name].read(folder) == whole
