"""What every training run shares: its settings, folder, log, checkpoints, stop and resume.

Light to import, as the settings of each trainer are made from it, and commands' help from those.
"""

import json
import math
import os
import signal
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args, get_origin
from typing import get_type_hints as type_hints

from batchwright.errors import BadFile, ConfigError, MissingFile
from batchwright.events import EventLog
from batchwright.files import existing, write_atomic
from batchwright.world import World

if TYPE_CHECKING:
    from batchwright.checkpoint import Checkpoint, State

__all__ = ["FORMAT", "Run", "RunConfig", "changes", "threads"]

FORMAT = 2
"""Of the run folder; 2: one checkpoint format for all trainers, `checkpoints/step_<n>`."""


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

    def __post_init__(self) -> None:
        # A path may be given as text.
        for name, hint in type_hints(type(self)).items():
            if hint in (Path, Path | None) and isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))

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
        try:
            text = existing(path, "run configuration").read_text("utf-8")
            found: dict[str, Any] = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
        saved = cls.load(run / "config.toml")
        try:
            stamp = json.loads(existing(run / "stamp.json", "stamp of a run").read_bytes())
            version, format = stamp["batchwright"], stamp.get("format", 1)
        except (ValueError, KeyError, TypeError) as error:
            raise BadFile(f"{run}/stamp.json cannot be read: {error}") from None
        if format != FORMAT:
            raise BadFile(
                f"the run {run} has format {format}, of batchwright {version}; this version reads "
                f"format {FORMAT}: use that version, or start a new run in another folder"
            )
        here: dict[str, Any] = {cls.FOLDER: run, "stop_after": 0}
        return replace(saved, **here)


def _check_type(path: Path, name: str, value: Any, hint: Any) -> None:
    # Settings are checked by their values only where flags were parsed; a file was typed by hand.
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise BadFile(f"{path}: {name} is {_shown(value)}: {said}; correct it") from None


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
    """A run while it trains: its folder, its log and its checkpoints.

    A run `in_memory` has no folder: it finds and writes nothing. One that does not write is that
    of a rank other than the first: it finds what the first one writes.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        resume: bool = False,
        in_memory: bool = False,
        writes: bool = True,
    ) -> None:
        self.config = config
        self.folder = Path() if in_memory else config.named().folder
        self.resumed = resume
        self.writes = writes and not in_memory
        self._changed: dict[str, Any] = {}
        self._passed_over: tuple[str, ...] = ()
        self._log: EventLog | None = None
        if resume:
            self._changed = changes(type(config).of_run(self.folder), vars(config))
        elif not in_memory and (self.folder / "config.toml").exists():
            raise ConfigError(
                f"{self.folder} already holds a run; resume it with --resume {self.folder} or "
                f"choose another {config.flag(config.FOLDER)}"
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        if self._log:
            self._log.close()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def log(self) -> EventLog:
        """`events.jsonl`, opened when it is first needed."""
        if self._log is None:
            self._log = EventLog(self.folder / "events.jsonl")
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
        self._passed_over = found.passed_over if found else ()
        return found

    def start(self, **fields: Any) -> None:
        """Write stamp and settings of a new run, and the first event of this call.

        To be called when nothing can be refused any more: until then the folder holds no run, and
        one can be started there.
        """
        if self.writes and not self.resumed:
            _write_stamp(self.folder, self.config.seed)
            write_atomic(self.folder / "config.toml", self.config.to_toml().encode())
        kind = "resume" if self.resumed else "start"
        self.event(kind, **fields, passed_over=self._passed_over, changed=self._changed)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append a record to the log of the run."""
        if self.writes:
            self.log.write(kind, **fields)

    def save(self, step: int, state: "State", *, keep: int = 2) -> None:
        """Write a checkpoint, and remove older ones until `keep` are left."""
        if self.writes:
            from batchwright.checkpoint import save_checkpoint

            save_checkpoint(self.checkpoints, step, state, keep=keep)

    @contextmanager
    def stopping(self) -> Iterator[Callable[[int], bool]]:
        """Whether to save and stop, given the number of steps that this call has done.

        True once Ctrl-C was pressed or `stop_after` is reached. A second Ctrl-C is not held back.
        """
        pressed = False

        def note(number: int, frame: Any) -> None:
            nonlocal pressed
            if pressed:
                raise KeyboardInterrupt
            pressed = True

        def stop(done: int) -> bool:
            return pressed or 0 < self.config.stop_after <= done

        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may handle signals.
            yield stop
            return
        before = signal.signal(signal.SIGINT, note)
        try:
            yield stop
        finally:
            signal.signal(signal.SIGINT, before)


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


def _write_stamp(run: Path, seed: int) -> None:
    """Write what a run is made with: versions, commit, machine, seed; no host name and no path."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from batchwright import __version__

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
    write_atomic(run / "stamp.json", (json.dumps(stamp, indent=2) + "\n").encode())


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
