"""Every error a user can meet, in one tree.

    BatchwrightError
    ├── ConfigError        (ValueError)   a setting contradicts another or is out of range
    ├── BadRow             (ValueError)   one row of the data cannot become a sample
    ├── BadLength          (ValueError)   a sample length is zero, negative or too large
    ├── OversizedSample    (ValueError)   a sample is longer than the policy allows
    ├── NoLoss             (ValueError)   a sample has no token with loss and the policy is `error`
    ├── DuplicateId        (ValueError)   two samples share an id
    ├── UnknownSample      (KeyError)     an id or a position that is not there
    ├── BadFile            (ValueError)   a file is cut, foreign, corrupted or of another version
    ├── MissingFile        (FileNotFoundError)
    ├── CannotRead         (OSError)      the system refuses: no rights, too many open files
    ├── CannotWrite        (OSError)      the disk is full, read-only or otherwise refuses
    ├── Mismatch           (ValueError)   two things that must agree do not: plan and lengths, ranks
    ├── BadLoss            (ArithmeticError)  a loss is not a number, or no token carries one
    ├── NoTokenizer        (LookupError)  a tokenizer cannot be found or lacks what is needed
    ├── NoServer           (ConnectionError)  no endpoint can serve: down, wrong address or model
    ├── BudgetExceeded     (RuntimeError) too many calls failed, or the spending cap was reached
    ├── BadReply           (ValueError)   a gym server sent what its protocol does not have
    ├── BadReward          (ValueError)   a sample has no valid reward and the policy is `raise`
    ├── BadProgram         (ValueError)   a fact, rule or query cannot be read or contradicts itself
    └── MissingExtra       (ImportError)  an optional dependency is not installed

Each has a parent from the standard library as well, so callers can catch either. A message
says what was seen, what is allowed and the way out. No class has a constructor of its own, so
errors can be pickled from process to process.
"""

import importlib
import re
from types import ModuleType

__all__ = [
    "BadFile",
    "BadLength",
    "BadLoss",
    "BadProgram",
    "BadReply",
    "BadReward",
    "BadRow",
    "BatchwrightError",
    "BudgetExceeded",
    "CannotRead",
    "CannotWrite",
    "ConfigError",
    "DuplicateId",
    "Mismatch",
    "MissingExtra",
    "MissingFile",
    "NoLoss",
    "NoServer",
    "NoTokenizer",
    "OversizedSample",
    "UnknownSample",
    "need",
    "one_line",
    "printable",
]


class BatchwrightError(Exception):
    """The root: `except BatchwrightError` catches everything this package raises on purpose."""

    def __str__(self) -> str:
        # KeyError would show its message in quotes, and OSError its errno.
        return str(self.args[0]) if self.args else ""


class ConfigError(BatchwrightError, ValueError):
    """A setting contradicts another or is out of range."""


class BadRow(BatchwrightError, ValueError):
    """One row of the data cannot become a sample; the message names file, line and reason."""


class BadLength(BatchwrightError, ValueError):
    """A sample length is zero, negative or 2**31 and more."""


class OversizedSample(BatchwrightError, ValueError):
    """A sample is longer than the limit and the overflow policy is `error`."""


class DuplicateId(BatchwrightError, ValueError):
    """Two samples share an id, so neither could be found again by it."""


class UnknownSample(BatchwrightError, KeyError):
    """An id, an epoch or a position that is not there."""


class BadFile(BatchwrightError, ValueError):
    """A file is cut, foreign, corrupted or of another version."""


class MissingFile(BatchwrightError, FileNotFoundError):
    """A file or folder that should be there is not."""


class CannotRead(BatchwrightError, OSError):
    """The system refuses to read a file, which says nothing about what is in it."""


class CannotWrite(BatchwrightError, OSError):
    """The disk is full, read-only or otherwise refuses; nothing half-written is left behind."""


class Mismatch(BatchwrightError, ValueError):
    """Two things that must agree do not."""


class NoLoss(BatchwrightError, ValueError):
    """Samples have no token that carries loss, and the policy for them is `error`."""


class BadLoss(BatchwrightError, ArithmeticError):
    """A loss is not finite, or no token of a step carries one; training cannot continue."""


class NoTokenizer(BatchwrightError, LookupError):
    """A tokenizer cannot be found, or lacks what is needed, such as a chat template."""


class NoServer(BatchwrightError, ConnectionError):
    """No endpoint can serve: it is down, or its address or the model's name is wrong."""


class BudgetExceeded(BatchwrightError, RuntimeError):
    """Too many calls failed, or the spending cap was reached; completed responses are kept."""


class BadReply(BatchwrightError, ValueError):
    """A gym server sent what its protocol does not have; no sample is made of it."""


class BadReward(BatchwrightError, ValueError):
    """A sample has no valid reward, and the policy for missing rewards is `raise`."""


class BadProgram(BatchwrightError, ValueError):
    """A fact, rule or query cannot be read or contradicts itself; the message names the place."""


class MissingExtra(BatchwrightError, ImportError):
    """An optional dependency is not installed."""


def need(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra brings it.

    >>> need("json", extra="all").__name__
    'json'
    >>> need("no_such_module", extra="hf")
    Traceback (most recent call last):
    batchwright.errors.MissingExtra: no_such_module is missing; run: pip install 'batchwright[hf]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingExtra(
            f"{module} is missing; run: pip install 'batchwright[{extra}]'"
        ) from None


def one_line(error: object) -> str:
    """The text of an error with every run of white space made one space."""
    return " ".join(str(error).split())


# Control characters but for tabs and line breaks, and those that turn the order of characters
# round or end a line in some terminals. Green and plain are ours, and harmless from anybody.
_STEERING = re.compile(
    r"\x1b(?!\[(?:32|0)m)|[\0-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def printable(text: str, *, line: bool = False) -> str:
    r"""Text from anywhere as a terminal may have it: what would steer it is shown as an escape.

    With `line` it stays on one line: tabs and line breaks are escapes too.

    >>> printable("\x1b]0;title\x07 and\r over")
    '\\x1b]0;title\\x07 and\\r over'
    """
    if text.isascii() and text.isprintable():
        return text
    text = _STEERING.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text.replace("\n", "\\n").replace("\t", "\\t") if line else text
