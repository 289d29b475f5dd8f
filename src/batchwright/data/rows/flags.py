"""What rows and messages say of their own training, by the names that people give it.

`weight`, `train`, `training`, `loss` and `loss_weight` of a message are followed. Under any other
name with a word of loss in it (`masked`, `is_trainable`, `lossMask`), whether 1 means to train or
to leave out is a guess, so it is an error that names it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np

from batchwright.data.rows import Row
from batchwright.data.rows.turns import TURN_FLAGS
from batchwright.errors import BadRow

__all__ = ["refuse_row_flags", "refuse_turn_flags"]

LOSS = re.compile(r"mask|loss|train|weight|learn|supervis|ignore|exclude|skip|backprop|no_?grad")
LABEL = re.compile(r"label")
"""Of a message; beside a row it is a class as often, and `VERDICTS` are what is read of it."""

OTHER_WORDS = re.compile(r"constrain|restrain|(?<![a-z])strain|gloss|blossom|lossless|lightweight")
COUNTS = re.compile(
    r"^(num|n|count|total)_|learning|"
    r"_(ids?|idx|index|steps?|rate|count|time|timestamp|date|tokens|epochs?|version|size|split|set|kg|lbs?)$"
)
"""Names of numbers that have such a word in them and say nothing of the loss."""

ROW_YES = re.compile(
    r"(is_|do_|to_|for_|sample_|example_|row_|instance_|loss_|train_|training_|supervised_)*"
    r"(train|training|trainable|trained|learn|learnable|supervised|loss|weights?)"
)
"""Names of a row under which 1 means what no flag means."""
ROW_NO = re.compile(r"(is_|do_|to_|be_)*(masked|ignored?|excluded?|skip|skipped|untrained)")
"""Names of a row under which 0 means that."""
TEXT_FLAGS = ("true", "false", "yes", "no", "none", "never", "all", "0", "1", "0.0", "1.0")
DETAILS = ("train_detail", "training_detail")
"""Axolotl's ranges of characters inside a turn."""


def refuse_turn_flags(
    message: Mapping[str, Any], number: int, column: str, known: frozenset[str]
) -> None:
    """Refuse what a message says of its training that cannot be followed."""
    if message.keys() <= known:
        return
    names = _named(tuple(message), True)
    for name in names:
        value = message[name]
        if value is None:
            continue
        if name in TURN_FLAGS:
            _check_turn_flag(message, name, number, column)
        elif name in DETAILS:
            if value:
                raise BadRow(
                    f"its message {number} has a {name}, and turns are trained whole; leave it out "
                    f"with --ignore-column {column}.{name}"
                )
        elif _is_flag(value):
            raise BadRow(_turn_sentence(number, name, value, f"{column}.{name}"))
    for name, value in message.items():
        if name not in known and isinstance(value, Mapping):
            for inner in _named(tuple(value), True):
                if _is_flag(value[inner]):
                    sentence = _turn_sentence(number, f"{name}.{inner}", value[inner], "")
                    raise BadRow(f"{sentence}{column}.{name}")


def _turn_sentence(number: int, name: str, value: Any, column: str) -> str:
    return (
        f"its message {number} has {name} {_shown(value)}, which may speak of the loss and is not "
        f"followed; write it as train true or false, or leave it out with --ignore-column {column}"
    )


def _check_turn_flag(message: Mapping[str, Any], name: str, number: int, column: str) -> None:
    value = message[name]
    if value not in (0, 1):
        raise BadRow(f"its message {number} has a {name} of {value!r}, not 0 or 1")
    if value and name != "weight" and message["role"] != "assistant":
        raise BadRow(
            f"its message {number} has {name} {value!r} and the role "
            f"{message['role']!r}; only assistant turns can be trained apart from the rest, "
            f"choose --loss-on everything and --ignore-column {column}.{name}"
        )


def refuse_row_flags(row: Row, names: tuple[str, ...], used: Sequence[str], lists: bool) -> None:
    """Refuse a row that says that it is not to be trained, or with a weight that is not used.

    With `lists`, also numbers for each of its tokens or turns.
    """
    for name in _named(names, False):
        value = row[name]
        if name in used or not _is_flag(value) or _is_list(value) > lists:
            continue
        number, plain = _number(value), _plain(name)
        if number == 0 and ROW_YES.fullmatch(plain):
            raise BadRow(
                f"its {name} is {_shown(value)}, so it says that it is not to be trained; leave "
                f"such rows out with --on-bad-row skip, or train them with --ignore-column {name}"
            )
        said = ROW_YES.fullmatch(plain) if number == 1 else ROW_NO.fullmatch(plain)
        if not said or number not in (0, 1):
            raise BadRow(
                f"its {name} is {_shown(value)}, a weight or a flag of training that is not used; "
                f"train its rows alike with --ignore-column {name}, or leave such rows out with "
                f"--on-bad-row skip"
            )


@lru_cache(1024)
def _named(names: tuple[str, ...], of_message: bool) -> tuple[str, ...]:
    """Those of the names that have a word of loss in them."""
    found = []
    for name in names:
        plain = OTHER_WORDS.sub("", _plain(name))
        if (LOSS.search(plain) or (of_message and LABEL.search(plain))) and not COUNTS.search(
            plain
        ):
            found.append(name)
    return tuple(found)


def _plain(name: str) -> str:
    """A name in small letters, its words parted: `lossMask` is `loss_mask`."""
    return re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).lower())


def _is_flag(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in TEXT_FLAGS
    return isinstance(value, Number | np.bool_) or _is_list(value)


def _is_list(value: Any) -> bool:
    if not isinstance(value, list | tuple | np.ndarray):
        return False
    return len(value) > 0 and all(isinstance(one, Number | np.bool_) for one in value)


def _number(value: Any) -> float:
    """A flag as a number; a text, where it is one that says yes or no."""
    if isinstance(value, str):
        said = value.strip().lower()
        return {"true": 1, "yes": 1, "all": 1, "1": 1, "1.0": 1}.get(said, 0)
    return -1 if _is_list(value) else float(value)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."
