"""What every training run shares: its settings, folder, log, checkpoints, signals and resume.

Light to import, as the settings of each trainer are made from it, and commands' help from those.
"""

import errno
import fcntl
import json
import logging
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from glob import escape as glob_escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args, get_origin
from typing import get_type_hints as type_hints

from batchwright.addresses import refuse_secret
from batchwright.errors import BadFile, CannotWrite, ConfigError, Mismatch, MissingFile
from batchwright.events import EventLog, changed_lines
from batchwright.files import (
    existing,
    parse_json,
    parse_toml,
    read_regular,
    read_regular_text,
    write_atomic,
)
from batchwright.world import World

if TYPE_CHECKING:
    from batchwright.checkpoint import Checkpoint, State

__all__ = [
    "FORMAT",
    "STOPS",
    "TERMINATED",
    "Run",
    "RunConfig",
    "changes",
    "refuse_taken",
    "refuse_unwritable",
    "threads",
    "wait_until_free",
    "write_stamp",
]

FORMAT = 3
"""Of the run folder; 3: every file that is read back has a checksum, and every line of the log."""

log = logging.getLogger(__name__)

NUMBER = "{n}"
"""Stands in the name of a run folder for the next number that is free."""
HOLDS = (
    *("config.toml", "checkpoints", "model"),
    *("config.json", "adapter_config.json", "model.safetensors", "model.safetensors.index.json"),
)
"""What a folder has one of if a run began or was copied there."""

STOPS = ("SIGTERM", "SIGUSR1", "Ctrl-C", "--stop-after")
"""What a run saves and stops for, the most pressing first."""
SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}
TERMINATED = 143
"""Exit code of a run that a scheduler stopped, by SIGTERM or SIGUSR1: saved, not finished."""
SAME_PRESS_S = 1.0
"""A Ctrl-C this soon after another is the same: a launcher passes on what its ranks got too."""
FINISHED = "finished.json"
"""Says at which step the run was last finished."""
SAVE_SHARE = 50
"""Checkpoints by time are at least this many times as far apart as the last one took."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Base of a trainer's settings: flags of its command and lines of a run's `config.toml`.

    A trainer's settings are a frozen dataclass of plain fields; their docstrings are the help.
    """

    FOLDER: ClassVar[str] = "run_dir"
    """The field with the folder of the run."""
    REQUIRED: ClassVar[tuple[str, ...]] = ()
    """Fields without which there is nothing to train."""
    CHANGEABLE: ClassVar[tuple[str, ...]] = ()
    """Fields that a resumed run may change; any other would make it another run."""

    if TYPE_CHECKING:
        # Every trainer has them, each with its own help and at its own place among the flags.
        seed: int
        stop_after: int
        save_minutes: float

    def __post_init__(self) -> None:
        # A path may be given as text.
        for name, hint in type_hints(type(self)).items():
            if hint in (Path, Path | None) and isinstance(getattr(self, name), str):
                if not getattr(self, name).strip():
                    raise ConfigError(f"{self.flag(name)} is empty; give a path")
                object.__setattr__(self, name, Path(getattr(self, name)))
        # All of them are written into the run directory.
        for name, value in vars(self).items():
            texts = value if isinstance(value, tuple) else (value,)
            for word in " ".join(text for text in texts if isinstance(text, str)).split():
                refuse_secret(self.flag(name), word)

    @property
    def folder(self) -> Path:
        """Where the run is written."""
        path: Path = getattr(self, self.FOLDER)
        return path

    @classmethod
    def flag(cls, name: str) -> str:
        """The flag of a field, as it is typed."""
        hint = type_hints(cls, include_extras=True)[name]
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        own = [flag for note in notes for flag in note.name or ()]
        return own[0] if own else "--" + name.replace("_", "-")

    @property
    def required(self) -> tuple[str, ...]:
        """The fields without which there is nothing to train, beside the others."""
        return self.REQUIRED

    def named(self) -> Self:
        """Itself, if all that is needed to train is given."""
        for name in self.required:
            if not getattr(self, name):
                raise ConfigError(
                    f"no {self.flag(name)}; give one, or resume a run with --resume RUN"
                )
        return self

    @property
    def fixed(self) -> dict[str, Any]:
        """The numbers and choices that make a run this one, and that no resumed run changes.

        Names of files and models are not among them: what they hold is compared, not its path.
        """
        hints = type_hints(type(self))
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in (self.FOLDER, *self.CHANGEABLE)
            and (isinstance(value, bool | int | float) or get_origin(hints[name]) is Literal)
        }

    def at_least(self, least: int, *names: str) -> None:
        """Refuse fields that are below `least` or not finite."""
        for name in names:
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ConfigError(f"{self.flag(name)} must be at least {least}, got {value}")

    def above_zero(self, *names: str) -> None:
        """Refuse fields that are not above 0, or not finite."""
        for name in names:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{self.flag(name)} must be above 0, got {getattr(self, name)}")

    def from_0_to_1(self, *names: str) -> None:
        """Refuse fields that are no probability or share."""
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"{self.flag(name)} must be from 0 to 1, got {getattr(self, name)}"
                )

    def to_toml(self) -> str:
        """The settings as lines `name = value`; what is None is left out."""
        lines = []
        for name, value in asdict(self).items():
            if value is None:
                continue
            if isinstance(value, Path):
                value = str(value)
            # JSON's strings, finite numbers, booleans and lists are TOML's as well.
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `to_toml` wrote, or a person in its place."""
        return cls._of_text(path, cls._text(path))

    @staticmethod
    def _text(path: Path) -> str:
        try:
            text = read_regular_text(existing(path, "run configuration"))
        except UnicodeDecodeError as error:
            raise BadFile(f"{path} is not TOML: {error}") from None
        return text

    @classmethod
    def _of_text(cls, path: Path, text: str) -> Self:
        try:
            found: dict[str, Any] = parse_toml(text)
        except ValueError as error:
            raise BadFile(f"{path} is not TOML: {error}") from None
        known = {field.name for field in fields(cls)}
        unknown = sorted(found.keys() - known)
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise BadFile(
                f"{path} has unknown settings {', '.join(unknown[:3])}{more}; if it is of another "
                f"trainer, use that one, else correct them: known are {', '.join(sorted(known))}"
            )
        hints = type_hints(cls)
        for name, value in found.items():
            if isinstance(value, str) and hints[name] in (Path, Path | None):
                found[name] = Path(value)
            elif isinstance(value, list):
                found[name] = tuple(value)
            _check_type(path, name, found[name], hints[name])
        try:
            return cls(**found)
        except TypeError as error:
            raise BadFile(f"{path} lacks settings: {error}") from None

    @classmethod
    def of_run(cls, run: Path) -> Self:
        """The settings of the run in this folder, wherever that was moved to.

        To stop after some steps was meant for the call that said so, and is left out.
        """
        if run.is_dir() and not (run / "config.toml").exists():
            raise MissingFile(
                f"no run configuration in {run}, so no training began there; start it with its "
                f"original command"
            )
        from batchwright.sealed import check_text, read_sealed_json

        way, file = "restore it, or start a new run in another folder", run / "stamp.json"
        try:
            told = parse_json(read_regular(existing(file, "stamp of a run")))
            version, format = told["batchwright"], told.get("format", 1)
        except MissingFile:
            # Settings that no run of this trainer has say more about the folder.
            cls.load(run / "config.toml")
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadFile):
                raise
            raise BadFile(f"{file} cannot be read: {error}; {way}") from None
        if format != FORMAT:
            raise BadFile(
                f"the run {run} has format {format}, of batchwright {version}; this version reads "
                f"format {FORMAT}: use that version, or start a new run in another folder"
            )
        read_sealed_json(file, "stamp of a run", way)
        text = cls._text(run / "config.toml")
        if not check_text(text, run / "config.toml", f"{way}; flags of --resume change settings"):
            raise BadFile(
                f"{run / 'config.toml'} is not as the run wrote it: the lines with its checksum "
                f"are missing; {way}"
            )
        saved = cls._of_text(run / "config.toml", text)
        here: dict[str, Any] = {cls.FOLDER: run, "stop_after": 0}
        return replace(saved, **here)


def _check_type(path: Path, name: str, value: Any, hint: Any) -> None:
    # Settings are checked by their values only where flags were parsed; a file was typed by hand.
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise BadFile(f"{path}: {name!r} is {_shown(value)}: {said}; correct it") from None


def changes(saved: RunConfig, given: Mapping[str, Any], verb: str = "resumed") -> dict[str, Any]:
    """The `given` settings that differ from the saved ones, all of which must be `CHANGEABLE`.

    What is given is heard, also if it is the default; what is given as it was saved is no change.
    """
    changed = {
        name: value for name, value in given.items() if not _same(value, getattr(saved, name))
    }
    fixed = [name for name in changed if name not in saved.CHANGEABLE]
    if fixed:
        seen = ", ".join(
            f"{saved.flag(name)} is {_shown(getattr(saved, name))}, got {_shown(changed[name])}"
            for name in fixed
        )
        raise ConfigError(
            f"a {verb} run keeps its settings: {seen}; only "
            f"{', '.join(map(saved.flag, saved.CHANGEABLE))} may change; leave out the others, "
            f"or start a new run in another {saved.flag(saved.FOLDER)}"
        )
    return changed


def _same(one: Any, other: Any) -> bool:
    """Equal, or two ways to write the path of one file."""
    if one == other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    paths = isinstance(one, str | Path) and isinstance(other, str | Path) and one and other
    return bool(paths) and os.path.exists(one) and os.path.realpath(one) == os.path.realpath(other)


class Run:
    """A run while it trains: its folder, its log, its checkpoints, and the signals that stop it.

    The folder of a new run may have `{n}` in its name: it gets the next number that is free, and
    `config` is that of the numbered run. No other process can train in the folder meanwhile.

    A run `in_memory` has no folder: it finds and writes nothing. One that does not write is that
    of a rank other than the first: it finds what the first one writes, in the folder with the
    number on which they `agree`.

    While the block lasts, Ctrl-C, SIGTERM and SIGUSR1 end it at once before `start`, when there is
    nothing to save; from then on, `stop` says that they were heard, or that `asked` says so. Only a
    second Ctrl-C ends a block that has started.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool = False,
        in_memory: bool = False,
        writes: bool = True,
        agree: Callable[[int], int] = lambda number: number,
        asked: Callable[[], str | None] | None = None,
    ) -> None:
        self.config = config
        self.folder = Path()
        self.resumed = resume
        self.writes = writes and not in_memory
        self._leads = writes
        self._in_memory = in_memory
        self._changed: dict[str, Any] = {}
        self._passed_over: tuple[str, ...] = ()
        self._log: EventLog | None = None
        self._lock: int | None = None
        self._started = False
        self._heard: dict[str, float] = {}
        self._asked = asked
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._saved_at, self._save_s = time.monotonic(), 0.0
        if not in_memory:
            self._open(agree)

    def _open(self, agree: Callable[[int], int]) -> None:
        """Find the folder of the run, refuse one that is taken, and lock it."""
        config = self.config.named()
        self.folder = config.folder
        _refuse_pattern(config)
        if self.resumed:
            self._changed = changes(type(config).of_run(self.folder), vars(config))
        elif NUMBER in self.folder.name:
            number = agree(self._number() if self.writes else 0)
            self.folder = _numbered(self.folder, number)
            here: dict[str, Any] = {config.FOLDER: self.folder}
            self.config = replace(config, **here)
            return
        else:
            refuse_taken(config)
        if self.writes:
            self._lock = _locked(self.folder)
            if self._lock is None:
                raise ConfigError(
                    f"another process trains in {self.folder}; wait for it or stop it, or choose "
                    f"another {config.flag(config.FOLDER)}"
                )

    def _number(self) -> int:
        """Lock the folder with the lowest number above those of all runs; its number."""
        pattern = self.folder
        before, _, after = pattern.name.partition(NUMBER)
        found = pattern.parent.glob(f"{glob_escape(before)}*{glob_escape(after)}")
        middles = {path: path.name[len(before) : len(path.name) - len(after)] for path in found}
        taken = [int(n) for path, n in middles.items() if n.isdecimal() and _held(path)]
        number = max(taken, default=0)
        while True:
            number += 1
            folder = _numbered(pattern, number)
            # One that holds no run is left from a command that was refused or killed: what it
            # has tokenised is used, unless that command is still at work.
            self._lock = _locked(folder)
            if self._lock is not None and not _held(folder):
                return number
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "Run":
        # Only the main thread may handle signals. A run in memory has nothing to save: what asks
        # a process to exit is left to its caller.
        if threading.current_thread() is threading.main_thread():
            for number in [signal.SIGINT] if self._in_memory else SIGNALS:
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        if self._log:
            self._log.close()
        self._unlock()
        if isinstance(error, Exception) and not self._leads and self._heard:
            # The signal reached the first rank too, which ended at once.
            raise SystemExit(TERMINATED) from error

    def _signalled(self, number: int, frame: Any) -> None:
        which = signal.Signals(number)
        if os.getpid() != self._process:
            # A forked worker, which inherited this: as if there were no run.
            before = self._before[which]
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        name, now = SIGNALS[which], time.monotonic()
        first = self._heard.setdefault(name, now)
        # Ranks other than the first stop when all do; alone, one would leave the others waiting.
        at_once = not self._started and self._leads
        if which == signal.SIGINT and (at_once or now - first > SAME_PRESS_S):
            raise KeyboardInterrupt
        if at_once:
            raise SystemExit(TERMINATED)

    def stop(self, done: int) -> str | None:
        """Which of `STOPS` asks to save and stop, given the steps that this call has done."""
        if self._asked is not None and (name := self._asked()):
            self._heard.setdefault(name, time.monotonic())
        if 0 < self.config.stop_after <= done:
            return next((name for name in STOPS if name in self._heard), "--stop-after")
        return next((name for name in STOPS if name in self._heard), None)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> EventLog:
        """`events.jsonl`, opened when it is first needed."""
        if self._log is None:
            path = self.folder / "events.jsonl"
            if self.resumed and (changed := changed_lines(path)):
                log.warning(
                    "%s, line %d: not as it was written, or one before it is missing (lines so in "
                    "all: %d); the run resumes, and its report leaves them out",
                    *(path, changed[0], len(changed)),
                )
            self._log = EventLog(path)
        return self._log

    def latest(self) -> "Checkpoint | None":
        """The newest whole checkpoint of a resumed run.

        None if the run is new or was killed before its first one; it then starts over, and comes
        to the same end.
        """
        if not self.resumed:
            return None
        from batchwright.checkpoint import latest

        found = latest(self.checkpoints)
        if found is None:
            return None
        self._passed_over = found.passed_over
        for one in found.passed_over if self.writes else ():
            log.warning("passed over: %s", one)
        given = found.state.get("run")
        own: dict[str, Any] = given if isinstance(given, dict) else {}
        for name, value in self.config.fixed.items():
            if own.get(name, value) != value:
                raise Mismatch(
                    f"{found.path} is of another run: it was written with "
                    f"{self.config.flag(name)} {_shown(own[name])}, and this run has "
                    f"{_shown(value)}; put back the checkpoints of this run"
                )
        return found

    def start(self, **fields: Any) -> None:
        """Write stamp and settings of a new run, and the first event of this call.

        To be called when nothing can be refused any more: until then the folder holds no run, and
        one can be started there. Settings that a resumed run changes are written as well.
        """
        self._started = True
        self._saved_at = time.monotonic()
        if self.writes and not self.resumed:
            write_stamp(self.folder, self.config.seed)
        if self.writes and (self._changed or not self.resumed):
            from batchwright.sealed import sealed_text

            text = sealed_text(self.config.to_toml(), "settings of this run")
            write_atomic(self.folder / "config.toml", text.encode())
        kind = "resume" if self.resumed else "start"
        self.event(kind, **fields, passed_over=self._passed_over, changed=self._changed)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append a record to the log of the run."""
        if self.writes:
            self.log.write(kind, **fields)

    def due(self) -> bool:
        """Whether it is time for a checkpoint.

        After `save_minutes`, but never so often that saving takes more than 2% of the time.
        """
        wait = max(60 * self.config.save_minutes, SAVE_SHARE * self._save_s)
        return self.config.save_minutes > 0 and time.monotonic() - self._saved_at >= wait

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure what a checkpoint costs; the next one is due by that."""
        start = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - start

    def save(self, step: int, state: "Callable[[], State]", *, keep: int = 2) -> None:
        """Write a checkpoint, and remove older ones until `keep` are left.

        All ranks make their `state`, which may be gathered; the first one writes it.
        """
        with self.saving():
            found = state()
            if self.writes:
                from batchwright.checkpoint import save_checkpoint

                found = {**found, "run": self.config.fixed}
                save_checkpoint(self.checkpoints, step, found, keep=keep)

    def is_left(self, begun: int, step: int, result: str) -> bool:
        """Whether this call, which began at one step and is at another, leaves the run as it is.

        It does if the run was finished at this very step before, its `result` is there, and
        nothing was trained since: nothing is written again.
        """
        if step != begun or self._in_memory or not (self.folder / result).exists():
            return False
        from batchwright.sealed import read_sealed_json

        try:
            saved = read_sealed_json(self.folder / FINISHED, "note of a finished run", "")
        except (BadFile, MissingFile):
            # Then all that the run leaves is written again, as it was.
            return False
        return bool(saved.get("step") == step)

    def finish(self, step: int) -> None:
        """Note that all that the run leaves behind is written."""
        if self.writes:
            from batchwright.sealed import write_sealed_json

            write_sealed_json(self.folder / FINISHED, {"step": step})

    def no_less(self, name: str, value: int, begun: int) -> None:
        """Refuse to resume with a setting that is less than what was trained, which stays."""
        if value < begun:
            what = name.rpartition("_")[2]
            raise ConfigError(
                f"{self.config.flag(name)} must be at least {begun}, the {what} that were begun "
                f"in {self.folder}, got {value}; leave it out, or start a new run"
            )


def _refuse_pattern(config: RunConfig) -> None:
    folder = config.folder
    if NUMBER in str(folder.parent) or folder.name.count(NUMBER) > 1:
        raise ConfigError(
            f"{config.flag(config.FOLDER)} {folder} may have {NUMBER} once, in its last part"
        )


def refuse_unwritable(config: RunConfig) -> None:
    """Refuse a folder that cannot be made or written; nothing is left there."""
    there = config.folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".batchwright-", dir=there))
    except OSError as error:
        raise CannotWrite(f"cannot write a run to {config.folder}: {error.strerror}") from error


def refuse_taken(config: RunConfig) -> None:
    """Refuse a folder for a new run that holds one already."""
    folder = config.named().folder
    _refuse_pattern(config)
    if held := _held(folder):
        what = "run" if held == "config.toml" else held
        way = f"resume it with --resume {folder} or " if what == "run" else ""
        raise ConfigError(
            f"{folder} already holds a {what}; {way}choose another "
            f"{config.flag(config.FOLDER)}, such as {folder}-{NUMBER} for numbered runs"
        )


def wait_until_free(folder: Path, most_s: float) -> None:
    """Wait for a process that is about to end, or was lost with its machine, to give a folder up.

    One that trains on keeps it; then the next `Run` says so.
    """
    end = time.monotonic() + most_s
    while (lock := _locked(folder)) is None and time.monotonic() < end:
        time.sleep(0.2)
    if lock is not None:
        os.close(lock)


def _held(folder: Path) -> str | None:
    """What shows that a folder holds a run; None if it is free."""
    return next((name for name in HOLDS if (folder / name).exists()), None)


def _numbered(pattern: Path, number: int) -> Path:
    return pattern.with_name(pattern.name.replace(NUMBER, str(number)))


def _locked(folder: Path) -> int | None:
    """The open lock of a folder, until it is closed or the process ends; None if it is taken."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CannotWrite(f"cannot write a run to {folder}: {error.strerror}") from error
    try:
        # Of this process alone, not flock: a forked worker that outlives it must not keep it.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(handle)
            return None
        # This file system has no locks.
    return handle


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute with this many processor threads while the block lasts."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_stamp(run: Path, seed: int) -> None:
    """Write what a run is made with: versions, commit, machine, seed; no host name and no path."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from batchwright import __version__
    from batchwright.sealed import write_sealed_json

    versions: dict[str, str | None] = {}
    for part in ("numpy", "numba", "torch", "transformers", "tokenizers", "safetensors", "peft"):
        try:
            versions[part] = version(part)
        except PackageNotFoundError:
            versions[part] = None
    stamp = {
        "format": FORMAT,
        "batchwright": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "commit": _commit(),
        "seed": seed,
        "world": World.detect().size,
    }
    write_sealed_json(run / "stamp.json", stamp)


def _commit() -> str | None:
    """The commit of the working directory, if it is a git repository."""
    import subprocess

    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _shown(value: Any) -> str:
    """A setting as a person would say it."""
    if value is None or value in ("", ()):
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
