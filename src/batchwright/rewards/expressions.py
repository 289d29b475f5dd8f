"""Answers that are expressions, compared by math-verify in a process that can be stopped."""

import atexit
import json
import os
import re
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import Field

from batchwright.calls.outcome import Outcome
from batchwright.errors import need
from batchwright.rewards.answers import compare, find_answer, read_answer, read_truth
from batchwright.rewards.numbers import Several
from batchwright.rewards.reward import Part, Response
from batchwright.rewards.rules import Rule, verdict_part

__all__ = ["Math"]

_WORD = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{2,}|[\u3040-\u9fff\uac00-\ud7af]")
_BASE = re.compile(r"\d\s?(?:_|<sub>|[₀-₉])")
_MEMORY = 2 << 30
"""Bytes that one comparison may take; a tower of powers would take all there are."""


class Math(Rule):
    """1 if the answer of the response equals the truth as mathematics, else 0.

    Numbers, lists, ranges and ratios are compared as by `Numeric`; anything else by math-verify,
    which gets the place of the answer only. An answer that it cannot parse is wrong.
    """

    kind: Literal["math"] = "math"
    tolerance: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """As of `Numeric`."""
    ambiguous: Literal["invalid", "wrong"] = "invalid"
    timeout_s: float = Field(default=10.0, gt=0)
    """An expression that takes longer is invalid: `timeout`."""

    @property
    def fact_names(self) -> tuple[str, ...]:
        # Where it stood is text, and shown by `reward explain`: trainers average columns.
        return ("number",)

    def part_of(self, response: Response, outcomes: Sequence[Outcome]) -> Part:
        if response.truth is None or not str(response.truth).strip():
            return Part.missing("bad_truth", f"the truth {response.truth!r} is empty")
        truth = read_truth(response.truth)
        answer = read_answer(response.text)
        if answer.doubt and (truth is None or answer.readings is None):
            # What stands around an expression is not evaluated.
            return verdict_part("ambiguous", answer, self.ambiguous)
        if truth is not None and answer.readings is None:
            prose = answer.where not in ("boxed", "formula") and _WORD.search(answer.text)
            if prose or _BASE.search(answer.text):
                # math-verify would take the number out of "more than 5" and out of 5_8.
                return verdict_part("ambiguous", answer, self.ambiguous)
        if truth is not None and answer.readings is not None:
            single = not any(isinstance(known.value, Several) for known in truth.readings or ())
            read = any(known.value != Several("other") for known in answer.readings)
            if single or read:
                verdict = compare(answer, truth, self.tolerance)
                return verdict_part(verdict, answer, self.ambiguous)
        gold = find_answer(str(response.truth)).text
        if find_spec("math_verify") is None:
            need("math_verify", extra="math")
        found = _VERIFIER.same(gold, find_answer(response.text).text, self.timeout_s)
        if found == "timeout":
            shown = answer.text[:60]
            return Part.missing(
                "timeout", f"{shown!r} took longer than {self.timeout_s:g} s, or over 2 GiB"
            )
        if found == "bad_truth":
            return Part.missing("bad_truth", f"the truth {response.truth!r} cannot be parsed")
        return verdict_part("right" if found == "right" else "wrong", answer, self.ambiguous)


class _Verifier:
    """A child process with math-verify: its own timeouts are signals, which threads cannot have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def same(self, gold: str, answer: str, timeout_s: float) -> str:
        """`right`, `wrong`, `bad_truth`, or `timeout`, after which the child was stopped."""
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                child.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
                child.stdin.flush()
                with selectors.DefaultSelector() as ready:
                    ready.register(child.stdout, selectors.EVENT_READ)
                    line = child.stdout.readline() if ready.select(timeout_s) else b""
            except OSError:
                line = b""
            if not line:
                # It is busy with one expression, or ran out of memory over it.
                self.close()
                return "timeout"
            return str(json.loads(line))

    def close(self) -> None:
        """Stop the child, if this process has one."""
        child, self._child = self._child, None
        if child is not None and self._pid == os.getpid():
            # Leaving the block closes its pipes and waits for it.
            with suppress(OSError), child:
                child.kill()

    def _started(self) -> "subprocess.Popen[bytes]":
        # A child belongs to one process; after a fork the copy starts its own.
        if self._child is None or self._pid != os.getpid():
            code = "from batchwright.rewards.expressions import _serve; _serve()"
            self._pid = os.getpid()
            self._child = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._child.stdout is not None
            # The imports take seconds on a busy machine; they do not count as time of an answer.
            if not self._child.stdout.readline():
                self.close()
                raise RuntimeError("the process with math-verify ended while it started")
        return self._child


_VERIFIER = _Verifier()
atexit.register(_VERIFIER.close)


def _serve() -> None:
    """The child: compare the pairs that come on standard input, until it is closed."""
    import resource

    verifier = need("math_verify", extra="math")
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        gold, answer = (verifier.parse(f"${text}$") for text in json.loads(line))
        if not gold:
            verdict = "bad_truth"
        else:
            verdict = "right" if verifier.verify(gold, answer) else "wrong"
        print(json.dumps(verdict), flush=True)
