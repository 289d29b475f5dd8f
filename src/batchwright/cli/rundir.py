"""Run directories of commands that do not train: `--run-dir`, for `batchwright view`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.errors import ConfigError, one_line

if TYPE_CHECKING:
    from batchwright.events import EventLog

__all__ = ["RunDir", "recorded"]

RunDir = Annotated[
    Path | None, Parameter(help="Record what happens here, for view and report (default: nowhere).")
]


@contextmanager
def recorded(
    folder: Path | None, kind: str, settings: Mapping[str, Any], **fields: Any
) -> "Iterator[EventLog | None]":
    """The log of a run directory, with a record of how it began and of how it ended.

    The same command again adds to it; the directory of another kind of run is refused.
    """
    if folder is None:
        yield None
        return
    import json

    from batchwright.addresses import without_secrets
    from batchwright.events import EventLog
    from batchwright.files import parse_toml, read_regular_text, write_atomic
    from batchwright.sealed import sealed_text
    from batchwright.train.run import write_stamp

    config, again = folder / "config.toml", (folder / "events.jsonl").exists()
    if again or config.exists():
        try:
            found = parse_toml(read_regular_text(config)).get("run")
        except (FileNotFoundError, ValueError):
            found = None
        if found != kind:
            raise ConfigError(f"--run-dir {folder} holds another run; choose another folder")
    with EventLog(folder / "events.jsonl") as log:
        if not again:
            write_stamp(folder, int(settings.get("seed") or 0))
            lines = {"run": kind, **{n: v for n, v in settings.items() if v is not None}}
            shown = {
                n: without_secrets(v) if isinstance(v, str) and "://" in v else v
                for n, v in lines.items()
            }
            text = "".join(f"{n} = {json.dumps(v, ensure_ascii=False)}\n" for n, v in shown.items())
            write_atomic(config, sealed_text(text, "settings of this run").encode())
        log.write("resume" if again else "start", run=kind, **fields)
        try:
            yield log
        except KeyboardInterrupt:
            log.write("stop", why="stopped", by="Ctrl-C")
            raise
        except BaseException as error:
            log.write("stop", why="error", error=one_line(error))
            raise
        log.write("stop", why="done")
