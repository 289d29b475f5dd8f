"""Damage every format in thousands of ways, and see that its reader notices.

    python tests/fuzz/fuzz.py --mutations 10000 --seed 1

Each damaged file is read in a process that may crash without ending the others. A reader may refuse
it in one sentence, or give what was written; anything else is printed with what it takes to do it
again, and the exit code is 1.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from crafted import craft
from formats import FORMATS, Format

from batchwright.errors import BatchwrightError

SECONDS = 20
"""What a reader may take of its processor's time, before it counts as hanging."""
WAIT = 600
"""Seconds that a reader may wait for something, however busy the machine is."""
MEMORY = 8 * 2**30
"""Bytes that a reader may address: what a file claims must not be allocated."""
PART = 50
"""Damaged files that one process reads."""
GOOD = ("refused", "same", "kept")


def damage(raw: bytes, draw: random.Random) -> bytes:
    """Other bytes than these."""
    size = len(raw)
    at = draw.randrange(size) if size else 0
    some = draw.choice((1, 2, 8, 64, 512, 4096))
    part = slice(at, at + some)
    changed = bytearray(raw)
    kind = draw.choice(
        ("bit", "bit", "bit", "byte", "digit", "cut", "noise", "zeros", "gone", "twice", "moved")
    )
    if kind == "bit" and size:
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == "byte" and size:
        changed[at] = draw.randrange(256)
    elif kind == "digit":
        digits = [n for n, byte in enumerate(raw) if 48 <= byte <= 57]
        if digits:
            changed[draw.choice(digits)] = draw.randrange(48, 58)
    elif kind == "cut":
        del changed[at:]
    elif kind == "noise":
        changed[part] = draw.randbytes(len(changed[part]))
    elif kind == "zeros":
        changed[part] = bytes(len(changed[part]))
    elif kind == "gone":
        del changed[part]
    elif kind == "twice":
        changed[at:at] = changed[part]
    elif kind == "moved":
        held = changed[part]
        del changed[part]
        to = draw.randrange(len(changed) + 1)
        changed[to:to] = held
    return bytes(changed)


def mutate(folder: Path, format: Format, draw: random.Random) -> str:
    """Damage one file below a folder; its name, empty if that changed nothing."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.stat().st_size
        and (path.name in format.only or not format.only)
        and path.name not in ("rows.jsonl", "prompts.jsonl", ".lock")
    )
    file = draw.choice(files)
    if len(files) > 1 and draw.random() < 0.05:
        other = draw.choice([path for path in files if path != file])
        one, two = file.read_bytes(), other.read_bytes()
        _write(file, two)
        _write(other, one)
        return f"{file.name} <-> {other.name}" if one != two else ""
    raw = file.read_bytes()
    changed = damage(raw, draw)
    _write(file, changed)
    return file.name if changed != raw else ""


def _write(path: Path, raw: bytes) -> None:
    # Not in place: files of one folder may be one file under two names.
    path.unlink()
    path.write_bytes(raw)


def outcome(format: Format, folder: Path, whole: Any) -> tuple[str, str]:
    """How a reader takes what is in a folder."""
    signal.signal(signal.SIGPROF, _hangs)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        seen = format.read(folder)
    except BatchwrightError as error:
        words = str(error)
        return ("refused", "") if "\n" not in words and words else ("traceback", repr(words))
    except TimeoutError:
        return "hangs", ""
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if seen == whole:
        return "same", ""
    try:
        return ("kept", "") if format.kept(seen, whole) else ("wrong", "")
    except Exception:
        return "wrong", traceback.format_exc()


def _hangs(*_: object) -> None:
    raise TimeoutError


def one(name: str, seed: int, example: Path, place: Path, whole: Any) -> tuple[str, str]:
    """Mutation number `seed` of a format: how it was taken, and more about it."""
    format, draw = FORMATS[name], random.Random(f"{name} {seed}")
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(example, place, symlinks=True)
    os.environ["BATCHWRIGHT_HOME"] = str(place)
    file = craft(place, draw) if format.crafted else mutate(place, format, draw)
    how, why = outcome(format, place, whole)
    return how, f"{file}: {why}" if how not in GOOD else ""


def make(name: str, folder: Path) -> Any:
    """An example of a format in a folder, and what its reader gives."""
    folder.mkdir(parents=True)
    os.environ["BATCHWRIGHT_HOME"] = str(folder)
    os.environ["BATCHWRIGHT_TOKENS"] = str(folder.with_name(f"{folder.name}-tokens"))
    with contextlib.redirect_stdout(None):
        FORMATS[name].make(folder)
    return FORMATS[name].read(folder)


def part(name: str, seeds: range, example: Path, place: Path, whole: Any) -> list[tuple[Any, ...]]:
    """How some mutations were taken, each read in a child, which may die."""
    report = place.with_suffix(".report")
    report.write_text("")
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with report.open("a") as file, contextlib.redirect_stdout(None):
                for seed in seeds:
                    file.write(json.dumps([seed]) + "\n")
                    file.flush()
                    # Compiled code does not heed the timer of `outcome`: the system ends it later.
                    used = int(time.process_time())
                    resource.setrlimit(resource.RLIMIT_CPU, (used + 2 * SECONDS, -1))
                    found = one(name, seed, example, place, whole)
                    file.write(json.dumps([seed, *found]) + "\n")
                    file.flush()
            os._exit(0)
        except BaseException:
            # A mistake of this script: not to go on as a second copy of the parent.
            traceback.print_exc()
            os._exit(99)
    status = _wait(pid, report)
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    done = [tuple(row) for row in rows if len(row) > 1]
    if rows and len(rows[-1]) == 1:
        rest = range(rows[-1][0] + 1, seeds.stop)
        hangs = status in (-signal.SIGXCPU, -signal.SIGKILL)
        done.append((rows[-1][0], "hangs" if hangs else "crash", f"it ended with {status}"))
        done += part(name, rest, example, place, whole) if rest else []
    return done


def _wait(pid: int, report: Path) -> int:
    """The exit code of a child, which is killed if its report does not grow any more."""
    size, since = -1, 0.0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if report.stat().st_size != size:
            size, since = report.stat().st_size, time.monotonic()
        if time.monotonic() - since > WAIT:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=FORMATS, action="append")
    given = parser.parse_args(arguments)
    names = given.format or list(FORMATS)
    each = -(-given.mutations // len(names))
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="batchwright-fuzz-") as base:
        for name in names:
            example = Path(base) / name.replace(" ", "-")
            whole = make(name, example)
            counts: Counter[str] = Counter()
            first = given.seed * 1_000_000
            for start in range(first, first + each, PART):
                seeds = range(start, min(start + PART, first + each))
                for seed, how, why in part(name, seeds, example, Path(base) / "place", whole):
                    counts[how] += 1
                    if how not in GOOD:
                        print(f"{how}: {name}, mutation {seed}: {why}")
            totals += counts
            said = ", ".join(f"{count:,} {how}" for how, count in sorted(counts.items()))
            print(f"{name:22} {said}", flush=True)
    bad = {how: count for how, count in totals.items() if how not in GOOD}
    print(f"{sum(totals.values()):,} mutations of {len(names)} formats: {dict(totals)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
