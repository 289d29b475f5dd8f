"""A run directory as one plain dict: all that the page, the report and the figures show.

Reading only: nothing is written, locked or imported of what made the run. A run that is being
written, one that was killed and one that finished are read alike. Sums and counts are of every
record in the files; curves are means over runs of records when there are too many to draw.
"""

import fcntl
import math
import os
import re
import struct
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchwright.errors import BadFile, BatchwrightError, Mismatch, MissingFile
from batchwright.events import Event, EventTail
from batchwright.files import parse_json, parse_toml, read_regular, read_regular_text
from batchwright.report.advice import advise
from batchwright.report.columns import MOST, Columns, is_number, tame
from batchwright.report.links import refusal
from batchwright.report.rollouts import Rollouts
from batchwright.sealed import check_text, read_sealed_json

__all__ = ["RunReader", "find_runs", "is_run", "summarise", "summarise_plan"]

SCHEMA = 1
FORMAT = 3
"""Of run folders, as `stamp.json` has it; others are shown as far as they can be read."""
EVENTS = "events.jsonl"
FINISHED = "finished.json"
LEFT = (FINISHED, "model", "checkpoints")
"""What a run that has recorded something leaves beside its log."""
STEPS = ("step", "update", "round", "epoch", "episode")
"""Kinds of records that are one step of a trainer each, and the names of their numbers."""
QUIET_S = 60.0
"""A run without a lock counts as live for so long after its last record."""
WORDS = 2000
"""Characters of one text of a record."""
SLOWEST = 200
"""Records that are listed by the time they took."""
CHANGES = 1000
"""Limit changes that are listed; all are counted."""
ADDITIVE = ("tokens", "padded", "loss_tokens", "seconds", "data_wait_s")
DEEPEST = 3
MOST_RUNS = 500


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run: its log, or its settings before the first record."""
    return (folder / EVENTS).is_file() or (
        (folder / "config.toml").is_file() and (folder / "stamp.json").is_file()
    )


def find_runs(root: Path) -> dict[str, Path]:
    """The runs in a folder, by their paths in it, newest first; `.` if the folder is one itself.

    Links that lead out of the folder are not followed.
    """
    inside = root.resolve()
    found: dict[str, Path] = {}
    seen: set[Path] = set()
    level = [root]
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for folder in level:
            resolved = folder.resolve()
            if resolved in seen or (resolved != inside and inside not in resolved.parents):
                continue
            seen.add(resolved)
            if is_run(folder):
                found[str(folder.relative_to(root))] = folder
                continue
            try:
                below += sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")
            except OSError:
                continue
        level = below
    newest = sorted(found, key=lambda name: -_changed(found[name]))
    return {name: found[name] for name in newest[:MOST_RUNS]}


def summarise(run: Path | str) -> dict[str, Any]:
    """The summary of a run directory as it is now."""
    reader = RunReader(Path(run))
    while reader.update():
        pass
    return reader.summary()


def summarise_plan(path: Path) -> dict[str, Any]:
    """A batch plan as a summary with nothing but its two panels."""
    from batchwright.batching.plan.plan import BatchPlan
    from batchwright.report.plans import plan_summary

    plan = plan_summary(BatchPlan.load(path))
    state = {"name": "plan", "text": "a batch plan"}
    summary = _empty(path.resolve().name, "plan", state) | {"plan": plan}
    return summary | {"strip": _strip(summary), "advice": advise(summary)}


class RunReader:
    """Reads a run as it grows: `update` until it gives False, then `summary`, and again later.

    Links that lead out of `inside`, by default the run itself, are not followed, and said.
    """

    def __init__(self, run: Path, name: str | None = None, inside: Path | None = None) -> None:
        if not run.is_dir():
            raise MissingFile(f"there is no folder {run}; name a run directory")
        if not is_run(run):
            raise BadFile(
                f"{run} is not a run directory: it has no {EVENTS}; batchwright train writes runs, "
                f"and so do calls run and gym run with --run-dir"
            )
        self.run = run
        self.name = name or run.resolve().name
        self._inside = (inside or run).resolve()
        self._start()

    def _start(self) -> None:
        self._tail = EventTail(self.run / EVENTS)
        self._rollouts = Rollouts(self.run / "rollouts", self._inside)
        self._refused: dict[str, str] = {}
        self._steps, self._calls, self._evals = Columns(), Columns(), Columns()
        self._limits: list[dict[str, Any]] = []
        self._reasons: Counter[str] = Counter()
        self._failed_by: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._windows: list[dict[str, Any]] = []
        self._unknown: Counter[str] = Counter()
        self._begun: dict[str, Any] = {}
        self._stop: dict[str, Any] | None = None
        self._parts: dict[str, list[float]] = {}
        self._unit = "step"
        self._resumed = self._repeated = self._odd = 0
        self._failed_before = 0.0
        """Failed calls that do not stand: those of a process whose run was resumed since."""
        self._unlogged = 0.0
        """What the calls of a killed process cost that it had no time to log."""
        self._before = self._now = 0.0
        self._trackers = 0
        self._missing = False
        self._plan: tuple[float, dict[str, Any] | None, str] | None = None

    def update(self) -> bool:
        """Read what is new, a part of it if it is much; whether there may be more."""
        new = self._rollouts.update()
        if self._refuses(EVENTS):
            return new
        try:
            events = self._tail.read()
        except MissingFile:
            self._missing = True
            return new
        except Mismatch:
            # Another run took the place of this one.
            self._start()
            return True
        except BatchwrightError as error:
            self._refused[EVENTS] = f"cannot be read: {error}"
            return new
        self._missing = False
        for event in events:
            self._take(event)
        return new or bool(events)

    def _refuses(self, name: str) -> bool:
        """Whether a part of the run is not read; why not becomes a note."""
        why = refusal(self.run / name, self._inside)
        if why:
            self._refused[name] = why
        else:
            self._refused.pop(name, None)
        return bool(why)

    def _take(self, event: Event) -> None:
        t, kind, fields = event
        if not -MOST < t < MOST:
            self._odd += 1
            return
        if kind == "resume" or t < self._now - self._before - 1e-3:
            # The clock of a log starts anew with each process that writes to it.
            self._before = self._now
        if (now := self._before + t) > self._now:
            self._now = now
        if kind in STEPS:
            self._step(kind, fields)
        elif kind == "calls":
            self._call(fields)
        elif kind == "limit":
            self._reasons[str(tame(fields.get("why"), WORDS, 1))] += 1
            self._limits.append({"t": round(self._now, 3), **tame(fields, WORDS)})
        elif kind == "eval":
            at = next((fields[unit] for unit in STEPS if unit in fields), self._steps.rows)
            self._evals.add({"at": at, "t": self._now, **fields})
        elif kind in ("start", "resume"):
            self._begin(kind, fields)
        elif kind == "stop":
            self._stop = tame(fields, WORDS)
        elif kind == "window":
            self._windows.append({"t": round(self._now, 3), **tame(fields, WORDS)})
        elif kind == "tracker":
            self._trackers += 1
        else:
            self._unknown[kind] += 1

    def _begin(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._begun, self._stop = tame(fields, WORDS), None
        self._unit = next((unit for unit in STEPS if f"{unit}s" in fields), self._unit)
        if kind != "resume":
            return
        self._resumed += 1
        if is_number(stand := fields.get("failed")):
            # Calls that failed are made again, but for so many.
            self._failed_before = max(0.0, self._calls.total("failed") - stand)
        if is_number(spent := fields.get("spent")):
            self._unlogged = max(0.0, spent - self._calls.total("spent"))
        at = fields.get(self._unit)
        if isinstance(at, int) and is_number(at) and self._steps.rows:
            kept = int((self._steps.column("at") <= at).sum())
            self._repeated += self._steps.rows - kept
            self._steps.cut(kept)

    def _step(self, kind: str, row: dict[str, Any]) -> None:
        at = row.pop(kind, self._steps.rows + 1)
        if not is_number(at):
            self._odd += 1
            return
        self._unit = kind
        # The record itself becomes the row: logs have millions of them.
        row["at"], row["t"] = at, self._now
        row.pop("first", None)
        self._steps.add(row)
        if isinstance(part := row.get("part"), str):
            span = self._parts.setdefault(part, [at, at])
            span[1] = at

    def _call(self, fields: Mapping[str, Any]) -> None:
        row = {**fields, "t": self._now}
        kinds = fields.get("failed_by")
        cancelled = kinds.get("cancelled") if isinstance(kinds, dict) else None
        if cancelled and is_number(cancelled) and is_number(row.get("failed")):
            # Ctrl-C or a full error budget ended them: they were not made, so none failed.
            row |= {"failed": row["failed"] - cancelled, "cancelled": cancelled}
        self._calls.add(row)
        for name, counter in (("failed_by", self._failed_by), ("errors", self._errors)):
            if (found := fields.get(name)) and isinstance(found, dict):
                counter.update({str(k)[:WORDS]: int(v) for k, v in found.items() if is_number(v)})

    def summary(self, *, quick: bool = False) -> dict[str, Any]:
        """The run as far as it was read.

        To look at a plan takes a second or more; `quick`, it is left out until it was done once,
        and `planning` says so.
        """
        config: dict[str, Any] = {}
        stamp: dict[str, Any] = {}
        config_note = stamp_note = ""
        if not self._refuses("config.toml"):
            config, config_note = _toml(self.run / "config.toml")
        if not self._refuses("stamp.json"):
            stamp, stamp_note = _json(self.run / "stamp.json")
        planning = quick and self._plan_is_new()
        plan, plan_note = (None, "") if planning else self._planned()
        notes = [note for note in (config_note, stamp_note, plan_note) if note]
        summary = _empty(self.name, self._kind(config), self._state()) | {
            "read": round(self._tail.share, 4),
            "notes": notes + self._notes(stamp),
            "stamp": stamp,
            "config": config,
            "progress": self._progress(),
            "steps": self._step_summary(),
            "evals": self._eval_summary(),
            "calls": self._call_summary(),
            "rollouts": self._rollouts.summary(),
            "windows": self._windows[-CHANGES:],
            "plan": plan,
            "planning": planning,
        }
        summary["strip"] = _strip(summary)
        return summary | {"advice": advise(summary)}

    def _kind(self, config: Mapping[str, Any]) -> str:
        if isinstance(kind := self._begun.get("run"), str):
            return kind
        units = {"update": "query-mutator", "round": "prover", "epoch": "kge"}
        return units.get(self._unit, "sft" if self._steps.rows or "model" in config else "run")

    def _state(self) -> dict[str, Any]:
        if self._stop is not None:
            why = str(self._stop.get("why", ""))
            by = self._stop.get("by")
            if why in ("done", "stream ended"):
                return {"name": "finished", "text": "finished"}
            return {"name": "stopped", "text": f"stopped: {by or why}"}
        locked = _locked(self.run / ".lock")
        quiet = time.time() - _changed(self.run)
        if locked or (locked is None and quiet < QUIET_S):
            return {"name": "live", "text": "live"}
        if not self._tail.offset:
            return {"name": "empty", "text": "no records yet"}
        return {"name": "crashed", "text": "ended without a stop record: killed or crashed"}

    def _progress(self) -> dict[str, Any]:
        of = self._begun.get(f"{self._unit}s") or None
        of = int(of) if is_number(of) else None
        at = self._steps.last("at")
        if at is None and is_number(begun := self._begun.get(self._unit)):
            at = begun
        return {
            "unit": self._unit,
            "at": None if at is None else int(at),
            "of": of,
            "seconds": round(self._now, 3),
            "resumed": self._resumed,
        }

    def _notes(self, stamp: Mapping[str, Any]) -> list[str]:
        tail = self._tail
        refused = self._refused | self._rollouts.refused
        notes = [f"{name} {why}." for name, why in sorted(refused.items())]
        if self._missing:
            notes.append(f"{EVENTS} is missing: nothing was recorded, or it was removed.")
        left = next((name for name in LEFT if (self.run / name).exists()), None)
        if left and not tail.size and not self._missing:
            notes.append(
                f"{EVENTS} is empty, though the run has left {left}: its records are gone."
            )
        elif left == FINISHED and self._stop is None and self._state()["name"] == "crashed":
            notes.append(
                f"{EVENTS} has no record of how the run ended, though {FINISHED} says that it "
                f"finished: its end was cut off, or the run was killed in its last moment."
            )
        if tail.torn:
            notes.append(
                f"{EVENTS} has a line cut off in the middle, as a killed process leaves it; "
                f"the rest is shown."
            )
        if tail.bad:
            where = ", ".join(map(str, tail.bad[:5])) + (", ..." if len(tail.bad) > 5 else "")
            notes.append(
                f"{EVENTS}: {len(tail.bad):,} {'line is' if len(tail.bad) == 1 else 'lines are'} "
                f"not as written, or after a missing one, and left out (line {where})."
            )
        if odd := self._odd + self._steps.odd + self._calls.odd + self._evals.odd:
            notes.append(
                f"{EVENTS}: {odd:,} {'value is' if odd == 1 else 'values are'} not finite, beyond "
                f"1e100 or nested too deeply, and left out."
            )
        if (format := stamp.get("format")) is not None and format != FORMAT:
            notes.append(
                f"The run has format {format}, this version knows {FORMAT}: what is understood is "
                f"shown, the rest is missing."
            )
        if self._unknown:
            kinds = ", ".join(sorted(self._unknown))
            notes.append(
                f"{self._unknown.total():,} records of unknown kinds are ignored: {kinds}."
            )
        if self._resumed:
            again = f"; {self._repeated:,} {self._unit}s after its checkpoint were trained again"
            notes.append(
                f"Resumed {self._resumed:,} {'time' if self._resumed == 1 else 'times'}"
                f"{again if self._repeated else ''}."
            )
        if isinstance(passed := self._begun.get("passed_over"), list) and passed:
            notes.append(f"Damaged checkpoints were passed over: {', '.join(map(str, passed))}.")
        if self._stop is not None and (error := self._stop.get("error")):
            notes.append(f"The run stopped with an error: {error}")
        notes += [f"{why}." for why in self._rollouts.damaged]
        if self._rollouts.bad:
            notes.append(f"{self._rollouts.bad:,} lines of rollouts cannot be read.")
        if self._trackers:
            notes.append(f"{self._trackers:,} calls of trackers failed; the run went on.")
        return notes

    def _step_summary(self) -> dict[str, Any] | None:
        steps = self._steps
        if not steps.rows:
            return None
        names = [n for n in steps.names if n not in ("at", "t") and "." not in n]
        ranks = sorted(
            {int(n.rpartition(".")[2]) for n in steps.names if n.startswith("rank_padded.")}
        )
        return {
            "unit": self._unit,
            "rows": steps.rows,
            "first": steps.firsts("at"),
            "last": steps.lasts("at"),
            "t": steps.lasts("t"),
            **steps.points(names),
            "ends": steps.ends(names),
            "times": self._times(),
            "sums": {n: steps.sums(n) for n in ADDITIVE if n in steps.names},
            "totals": {n: steps.total(n) for n in (*ADDITIVE, *_invalids(names)) if n in names},
            "newest": {n: steps.last(n) for n in names},
            "parts": dict(self._parts.items()),
            "ranks": [
                {
                    "rank": rank,
                    "padded": steps.sums(f"rank_padded.{rank}"),
                    "data_wait_s": steps.sums(f"rank_data_wait_s.{rank}"),
                }
                for rank in ranks
            ],
            "rank_busiest": self._busiest(ranks),
        }

    def _times(self) -> dict[str, Any] | None:
        """What the time of the steps went on: of each kind, seconds per step over runs of records.

        A record may be of several episodes. `slowest` are records, the longest first.
        """
        import numpy as np

        steps, names = self._steps, self._steps.names
        rollout, update = "charts/rollout_s", "charts/update_s"
        parts = {name: np.nan_to_num(steps.column(name)) for name in (rollout, update)}
        whole = steps.column("seconds") if "seconds" in names else parts[rollout] + parts[update]
        if not whole[whole > 0].size:
            return None
        whole = np.nan_to_num(whole)
        if rollout in names:
            kinds = {"rollout": parts[rollout], "update": parts[update]}
            rest = np.maximum(0, whole - parts[rollout] - parts[update])
            if rest.sum() > 0.01 * whole.sum():
                kinds["other"] = rest
        elif "data_wait_s" in names:
            waited = np.nan_to_num(steps.column("data_wait_s"))
            kinds = {"compute": np.maximum(0, whole - waited), "wait for data": waited}
        else:
            kinds = {"seconds": whole}
        of = np.ones(steps.rows)
        if self._unit == "episode":
            of = np.maximum(1, np.diff(steps.column("at"), prepend=0))
        order = np.argsort(-whole / of, kind="stable")[:SLOWEST]
        at = steps.column("at")[order].tolist()
        each = [(values / of)[order].tolist() for values in kinds.values()]
        return {
            "kinds": {name: steps.sums(values) for name, values in kinds.items()},
            "of": steps.sums(of),
            "slowest": [list(row) for row in zip(at, *each, strict=True)],
        }

    def _busiest(self, ranks: list[int]) -> list[float | None]:
        """Tokens of the most loaded rank of each step, summed over runs of steps."""
        if not ranks:
            return []
        import numpy as np

        return self._steps.sums(
            np.max([self._steps.column(f"rank_padded.{rank}") for rank in ranks], axis=0)
        )

    def _eval_summary(self) -> dict[str, Any] | None:
        evals = self._evals
        if not evals.rows:
            return None
        names = [n for n in evals.names if n not in ("at", "t", *STEPS) and "." not in n]
        points = evals.points(names)
        return {"rows": evals.rows, "at": evals.lasts("at"), "t": evals.lasts("t"), **points} | {
            "newest": {n: evals.last(n) for n in names},
            "ends": evals.ends(names),
        }

    def _call_summary(self) -> dict[str, Any] | None:
        calls = self._calls
        if not calls.rows and not self._limits:
            return None
        counts = (
            *("sent", "hit", "dedup", "retry", "failed", "cancelled", "done"),
            *("window_s", "busy_s", "room_s"),
        )
        totals = {n: calls.total(n) for n in counts if n in calls.names}
        if "failed" in totals:
            totals["again"] = self._failed_before
            totals["failed"] -= self._failed_before
        failed_by = {k: n for k, n in self._failed_by.most_common() if k != "cancelled"}
        levels = [n for n in ("in_flight", "limit", "p50", "p95", "p99") if n in calls.names]
        step = -(-len(self._limits) // CHANGES) or 1
        return {
            "rows": calls.rows,
            "t": calls.lasts("t"),
            **calls.points(levels),
            "sums": {n: calls.sums(n) for n in counts if n in calls.names},
            "totals": totals,
            "ends": calls.ends(levels),
            "newest": {n: calls.last(n) for n in levels},
            "limits": self._limits[::step],
            "limit_changes": len(self._limits),
            "reasons": dict(self._reasons.most_common()),
            "failed_by": failed_by,
            "errors": dict(self._errors.most_common(20)),
            "cost": calls.total("spent") + self._unlogged if "spent" in calls.names else None,
        }

    def _plan_is_new(self) -> bool:
        path = self.run / "plan"
        if self._refuses("plan"):
            return False
        known = self._plan is not None and self._plan[0] == _changed(path / "manifest.json")
        return path.is_dir() and not known

    def _planned(self) -> tuple[dict[str, Any] | None, str]:
        """The summary of the run's plan, worked out once, and what is wrong with it."""
        path = self.run / "plan"
        if not path.is_dir() or self._refuses("plan"):
            return None, ""
        if self._plan_is_new():
            changed = _changed(path / "manifest.json")
            from batchwright.batching.plan.plan import BatchPlan
            from batchwright.report.plans import plan_summary

            try:
                self._plan = changed, plan_summary(BatchPlan.load(path)), ""
            except (BatchwrightError, OSError, ValueError, ArithmeticError) as error:
                self._plan = changed, None, f"The plan cannot be shown: {error}"
        assert self._plan is not None
        return self._plan[1], self._plan[2]


def _empty(name: str, kind: str, state: dict[str, Any]) -> dict[str, Any]:
    blank = dict.fromkeys(("steps", "evals", "calls", "rollouts", "plan"))
    return {
        "schema": SCHEMA,
        "run": name,
        "kind": kind,
        "state": state,
        "read": 1.0,
        "notes": [],
        "stamp": {},
        "config": {},
        "progress": {"unit": "step", "at": None, "of": None, "seconds": 0.0, "resumed": 0},
        "windows": [],
        "planning": False,
        **blank,
    }


def _invalids(names: list[str]) -> list[str]:
    return [n for n in names if n.endswith(("invalid_steps", "/episodes"))]


def _strip(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures of the strip: a share or a number each, and the panel that explains it."""
    cells: list[dict[str, Any]] = []

    def cell(name: str, value: float | None, form: str, panel: str, hint: str) -> None:
        if value is not None and math.isfinite(value):
            cells.append({"name": name, "value": value, "form": form, "panel": panel, "hint": hint})

    steps, calls, plan = summary["steps"], summary["calls"], summary["plan"]
    totals = steps["totals"] if steps else {}
    if totals.get("padded"):
        useful = totals["tokens"] / totals["padded"]
        cell("useful tokens", useful, "share", "packing", "tokens of samples / tokens computed")
        cell("token ullage", 1 - useful, "share", "packing", "1 - useful tokens")
    elif plan:
        cell("useful tokens", plan["efficiency"], "share", "packing", "planned, epoch 0")
        cell("token ullage", plan["ullage"], "share", "packing", "planned, epoch 0")
    if totals.get("seconds") and "data_wait_s" in totals:
        wait = totals["data_wait_s"] / totals["seconds"]
        cell("data wait", wait, "share", "ranks", "time in which the trainer had no batch")
        cell("tokens/s", totals["tokens"] / totals["seconds"], "number", "steps", "useful tokens")
    if steps and len(steps["ranks"]) > 1:
        loads = [sum(v or 0 for v in rank["padded"]) for rank in steps["ranks"]]
        most = sum(v or 0 for v in steps["rank_busiest"])
        if most:
            even = sum(loads) / len(loads) / most
            cell("rank ullage", 1 - even, "share", "ranks", "1 - mean / most loaded rank's tokens")
    if calls:
        _call_cells(calls, cell)
    if rollouts := summary["rollouts"]:
        valid = 1 - rollouts["invalid"] / rollouts["turns"]
        cell("valid turns", valid, "share", "rollouts", "turns that are learnt from")
        if rollouts["mean_reward"] is not None:
            cell("mean reward", rollouts["mean_reward"], "signed", "rollouts", "of valid turns")
    newest = steps["newest"] if steps else {}
    if "loss" in newest:
        cell("loss", newest["loss"], "number", "steps", "of the newest step")
    if summary["evals"] and "mrr" in summary["evals"]["newest"]:
        cell("MRR", summary["evals"]["newest"]["mrr"], "number", "steps", "newest, on valid")
    return cells


def _call_cells(calls: Mapping[str, Any], cell: Any) -> None:
    totals, newest = calls["totals"], calls["newest"]
    done, hit = totals.get("done", 0.0), totals.get("hit", 0.0)
    if totals.get("window_s"):
        cell("calls/s", done / totals["window_s"], "number", "calls", "answered, cache included")
    if totals.get("room_s"):
        full = totals["busy_s"] / totals["room_s"]
        cell("call slots used", min(1.0, full), "share", "calls", "call seconds / limit seconds")
    if newest.get("in_flight") is not None:
        cell("in flight", newest["in_flight"], "number", "calls", "at the newest record")
    ended = done + totals.get("failed", 0.0)
    if ended:
        cell("cache hits", hit / ended, "share", "calls", "of all calls that ended")
        cell(
            "calls failed", totals.get("failed", 0.0) / ended, "share", "calls", "of all that ended"
        )
    if calls["cost"]:
        cell("cost", calls["cost"], "number", "calls", "at the prices that were given")


def _changed(path: Path) -> float:
    """When a file, or the log of a run, was last written."""
    log = path / EVENTS if path.is_dir() else path
    try:
        return log.stat().st_mtime
    except OSError:
        return 0.0


def _locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a run; None if nothing tells. It is not taken."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        # struct flock of Linux: type, whence, start, length, pid.
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = fcntl.fcntl(handle, fcntl.F_GETLK, wanted)
        return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)
    except OSError:
        return None
    finally:
        os.close(handle)


SECRET = re.compile(r"secret|passw|credential|(^|_)(api_?key|key|token)$", re.IGNORECASE)
"""Names of settings whose values are not shown."""
KEY = re.compile(r"\b(?:sk|hf|ghp|xox[bp])[-_][A-Za-z0-9_-]{8,}|(?<=://)[^/@\s]+(?=@)")
"""Keys as services write them, and names and passwords in addresses."""


def _redacted(value: Any, name: str = "") -> Any:
    """Settings without the values that look like secrets."""
    if isinstance(value, dict):
        return {k: _redacted(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_redacted(one, name) for one in value]
    if isinstance(value, str):
        return "(hidden)" if value and SECRET.search(name) else KEY.sub("(hidden)", value)
    return value


def _toml(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = read_regular_text(path)
        if not text.strip():
            return {}, f"{path.name} is empty: the settings of the run are not known."
        check_text(text, Path(path.name), "it is left out")
        return tame(_redacted(parse_toml(text)), WORDS), ""
    except BadFile as error:
        return {}, f"{error}."
    except FileNotFoundError:
        return {}, f"{path.name} is missing: the settings of the run are not known."
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read: {error}"


def _json(path: Path) -> tuple[dict[str, Any], str]:
    try:
        found = parse_json(read_regular(path))
        if isinstance(found, dict) and found.get("format") == FORMAT:
            found = read_sealed_json(path, "stamp of a run", "it is left out")
    except BadFile as error:
        return {}, f"{error}."
    except FileNotFoundError:
        return {}, f"{path.name} is missing: versions and commit of the run are not known."
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read: {error}"
    if not isinstance(found, dict):
        return {}, f"{path.name} is not an object."
    return tame(_redacted(found), WORDS), ""
