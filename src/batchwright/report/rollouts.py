"""The episodes of a run: `rollouts/*.jsonl`, one turn or one proof a line."""

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.errors import BadFile, one_line
from batchwright.files import parse_json, read_regular
from batchwright.lines import has_check, read_lines
from batchwright.report.columns import is_number, tame
from batchwright.report.links import refusal

__all__ = ["Rollouts", "turns_of"]

LAST = 60
INVALID = 40
"""Episodes that are kept for reading: the newest, and the newest with invalid steps."""
CHARACTERS = 2000
"""Of one text; the number of those left out is shown."""
BINS = 24
ENVS_END = 2**31
ENVS = 4096
"""Squares of the grid."""


class Rollouts:
    """Reads files of episodes once each, newest last, and keeps counts of all of them."""

    def __init__(self, folder: Path, inside: Path | None = None) -> None:
        self._folder = folder
        self._inside = (inside or folder).resolve()
        self.refused: dict[str, str] = {}
        """Files that are not read, and why."""
        self._read: set[str] = set()
        self._rewards = array("d")
        self._last: deque[dict[str, Any]] = deque(maxlen=LAST)
        self._invalid: deque[dict[str, Any]] = deque(maxlen=INVALID)
        self._envs: dict[int, dict[str, Any]] = {}
        self.reasons: Counter[str] = Counter()
        self.damaged: list[str] = []
        """What is wrong with files that are not as they were written; the rest is left out."""
        self.turns = self.episodes = self.invalid = self.bad = 0

    def update(self, most: int = 64) -> bool:
        """Read files that are new, at most so many; whether there were any."""
        try:
            if self._folder.is_symlink() and (why := refusal(self._folder, self._inside)):
                self.refused = {self._folder.name: why}
                return False
            names = sorted(p.name for p in self._folder.iterdir() if p.suffix == ".jsonl")
        except OSError:
            return False
        new = [name for name in names if name not in self._read][:most]
        for name in new:
            self._read.add(name)
            if why := refusal(self._folder / name, self._inside):
                self.refused[f"{self._folder.name}/{name}"] = why
            else:
                self._read_file(self._folder / name)
        return bool(new)

    def _read_file(self, path: Path) -> None:
        episodes: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        try:
            for turn in turns_of(path, read_regular(path)):
                if turn is None:
                    self.bad += 1
                else:
                    episodes.setdefault((turn["env"], turn["episode"]), []).append(turn)
        except (BadFile, OSError) as error:
            # What stands behind a changed line is not known to be whole either.
            self.damaged.append(one_line(error))
        for turns in episodes.values():
            self._add(path.stem, turns)

    def _add(self, file: str, turns: list[dict[str, Any]]) -> None:
        invalid = 0
        total = 0.0
        for turn in turns:
            why, reward = _invalid(turn), _reward(turn)
            if why:
                invalid += 1
                self.reasons[str(why)] += 1
            elif reward is not None:
                total += reward
                self._rewards.append(reward)
        self.turns += len(turns)
        self.episodes += 1
        self.invalid += invalid
        first, last = turns[0], turns[-1]
        episode = {
            "file": file,
            "env": tame(first["env"], CHARACTERS),
            "episode": tame(first["episode"], CHARACTERS),
            "question": tame(first.get("question", ""), CHARACTERS),
            "reward": total,
            "invalid": invalid,
            "turns": [tame(turn, CHARACTERS) | {"invalid": _invalid(turn)} for turn in turns],
        }
        self._last.append(episode)
        if invalid:
            self._invalid.append(episode)
        if type(first["env"]) is int and abs(first["env"]) < ENVS_END and len(self._envs) < ENVS:
            seen = self._envs.setdefault(first["env"], {"env": first["env"], "episodes": 0})
            seen["episodes"] += 1
            seen["reward"] = total
            seen["invalid"] = bool(_invalid(last))

    def summary(self) -> dict[str, Any] | None:
        """Counts of all turns, and the episodes that are kept; None if there are none."""
        if not self.turns:
            return None
        shown = {(e["file"], e["env"], e["episode"]): e for e in (*self._invalid, *self._last)}
        rewards = np.frombuffer(self._rewards) if len(self._rewards) else np.zeros(0)
        counts, edges = (
            np.histogram(rewards, BINS if np.ptp(rewards) else 1) if rewards.size else ((), ())
        )
        return {
            "turns": self.turns,
            "episodes": self.episodes,
            "invalid": self.invalid,
            "reasons": dict(self.reasons.most_common(20)),
            "files": len(self._read),
            "mean_reward": float(rewards.mean()) if rewards.size else None,
            "histogram": {
                "counts": np.asarray(counts, int).tolist(),
                "edges": [float(f"{edge:.6g}") for edge in np.asarray(edges, float).tolist()],
            },
            "envs": [self._envs[k] for k in sorted(self._envs)],
            "shown": list(shown.values()),
        }


def turns_of(path: Path, raw: bytes) -> Iterator[dict[str, Any] | None]:
    """Turns of a file, each line checked, unless none has a check: then others wrote it."""
    if any(map(has_check, raw.split(b"\n"))):
        yield from read_lines(path, raw, "transcript", _turn)
        return
    for line in filter(None, raw.split(b"\n")):
        try:
            yield _turn(parse_json(line))
        except (ValueError, KeyError, TypeError):
            yield None


def _turn(row: dict[str, Any]) -> dict[str, Any]:
    hash((row["env"], row["episode"]))
    return row


def _reward(turn: Mapping[str, Any]) -> float | None:
    for name in ("gain", "reward"):
        if is_number(value := turn.get(name)):
            return float(value)
    return None


def _invalid(turn: Mapping[str, Any]) -> str:
    """Why a turn is not learnt from, "" if it is: its reward could not be computed."""
    named = [name for name in ("gain", "reward") if name in turn]
    if not named or _reward(turn) is not None:
        return ""
    why = turn.get("why")
    return why[:CHARACTERS] if isinstance(why, str) and why else "no reward"
