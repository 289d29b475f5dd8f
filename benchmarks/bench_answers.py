"""Error rates of answer readers: right answers scored wrong, wrong answers scored right.

Two sets of texts. The corpus is that of tests/answer_formats.py: formats that answers come in, by
class, judged by hand. A third was held out while our reader was written; the few of them that
failed their first run were repaired since. GSM8K is real solutions with their gold answer after
`####`, in `\\boxed{}` and after "The answer is", and the same texts with a wrong neighbour of it:
one more, one less, the other sign, ten times, digits reversed.

    numeric, math        ours; a reader that says "ambiguous" has decided nothing
    math-verify          parse and verify with its defaults; truths that are LaTeX in dollar signs
    trl accuracy_reward  math-verify as TRL configures it
    verl gsm8k           strict (after ####) and flexible (last number)
    verl math_reward     the last \\boxed, compared as text; math_dapo: Minerva's rules

The readers of TRL and verl are made for one or two formats and miss the others by design.
Texts that nobody could judge count for nobody; how many a reader scores as right is shown.
"""

import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.rewards import Math, Numeric, Response, Rule
from common import Report, arguments

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from answer_formats import Entry, entries  # noqa: E402

Reader = Callable[[str, str], bool | None]


@dataclass
class Count:
    """Decisions of one reader."""

    right: int = 0
    missed: int = 0
    wrong: int = 0
    accepted: int = 0
    undecided: int = 0
    guessed: int = 0

    def add(self, verdict: bool | None, found: bool | None) -> None:
        if verdict is None:
            self.guessed += found is True
            return
        self.right += verdict
        self.wrong += not verdict
        self.undecided += found is None
        self.missed += verdict and found is False
        self.accepted += not verdict and found is True

    @property
    def errors(self) -> int:
        return self.missed + self.accepted

    def row(self) -> list[Any]:
        shares = (100 * self.missed / max(1, self.right), 100 * self.accepted / max(1, self.wrong))
        return [self.missed, self.accepted, *shares, self.undecided, self.guessed]


COLUMNS = (
    *("", "right scored wrong", "wrong scored right", "% of right", "% of wrong"),
    *("undecided", "unclear scored right"),
)


def ours(rule: Rule) -> Reader:
    def read(text: str, truth: str) -> bool | None:
        part = rule.part_of(Response(text, truth), ())
        return bool(part.value) if part.valid else None

    return read


def math_verify() -> Reader:
    from math_verify import parse, verify

    logging.disable(logging.ERROR)

    def read(text: str, truth: str) -> bool | None:
        plain = re.fullmatch(r"-?[\d.,/]+%?", truth)
        return bool(verify(parse(truth if plain else f"${truth}$"), parse(text)))

    return read


def trl() -> Reader:
    from trl.rewards import accuracy_reward

    def read(text: str, truth: str) -> bool | None:
        plain = re.fullmatch(r"-?[\d.,/]+%?", truth)
        (value,) = accuracy_reward([[{"content": text}]], [truth if plain else f"${truth}$"])
        return None if value is None else bool(value)

    return read


def verl(file: str, **more: Any) -> Reader:
    """A scoring file of verl, executed alone: the package imports a training stack."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'verl'")
    path = Path(spec.submodule_search_locations[0]) / "utils" / "reward_score" / f"{file}.py"
    found = importlib.util.spec_from_file_location(f"verl_{file}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def read(text: str, truth: str) -> bool | None:
        # Its data sets have no thousands separators in the truth of GSM8K.
        given = truth.replace(",", "") if file == "gsm8k" else truth
        score = module.compute_score(text, given, **more)
        return bool((score["acc"] if isinstance(score, dict) else score) > 0)

    return read


READERS: dict[str, Callable[[], Reader]] = {
    "batchwright numeric": lambda: ours(Numeric()),
    "batchwright math": lambda: ours(Math()),
    "math-verify": math_verify,
    "trl accuracy_reward": trl,
    "verl gsm8k, strict": lambda: verl("gsm8k", method="strict"),
    "verl gsm8k, flexible": lambda: verl("gsm8k", method="flexible"),
    "verl math_reward": lambda: verl("math_reward"),
    "verl math_dapo": lambda: verl("math_dapo"),
}


def gsm8k(n: int) -> list[Entry] | None:
    """Real solutions, with their gold answer and with wrong neighbours of it."""
    shared = HERE.parents[1] / "shared" / "data"
    path = Path(os.environ.get("BATCHWRIGHT_DATA", shared)) / "text" / "gsm8k_train.jsonl"
    if not path.is_file():
        return None
    found = []
    with path.open() as lines:
        for _, line in zip(range(n), lines, strict=False):
            steps, _, gold = json.loads(line)["answer"].rpartition("####")
            truth = gold.strip()
            value = int(truth.replace(",", ""))
            found += [Entry("gsm8k", truth, text, True) for text in written(steps, truth)]
            for other in sorted(neighbours(value)):
                found += [Entry("gsm8k", truth, text, False) for text in written(steps, str(other))]
    return found


def written(steps: str, answer: str) -> Iterable[str]:
    return (
        f"{steps}#### {answer}",
        f"{steps}So the result is $\\boxed{{{answer}}}$.",
        f"{steps}The answer is {answer}.",
    )


def neighbours(value: int) -> set[int]:
    reverse = int(str(abs(value))[::-1]) * (-1 if value < 0 else 1)
    return {value + 1, value - 1, -value, 10 * value, reverse} - {value}


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("answers", args)
    corpus = entries()[:: 40 if args.smoke else 1]
    numbers = [entry for entry in corpus if entry.kind != "expression"]
    real = gsm8k(1 if args.smoke else 20 if args.quick else 300)
    if real is None:
        report.not_measured("GSM8K", "no text/gsm8k_train.jsonl; set BATCHWRIGHT_DATA")
    sets = {
        "numbers of the corpus": [entry for entry in numbers if not entry.held_out],
        "numbers of the corpus, held out": [entry for entry in numbers if entry.held_out],
        "expressions of the corpus": [entry for entry in corpus if entry.kind == "expression"],
        "GSM8K and wrong neighbours": real or [],
    }
    readers = {}
    for name, make in READERS.items():
        try:
            readers[name] = make()
            readers[name](r"\boxed{\sqrt{2}}", r"\sqrt{2}")
        except ImportError as error:
            readers.pop(name, None)
            report.not_measured(name, str(error).splitlines()[0])
    totals = {}
    for title, texts in sets.items():
        counts = {name: count(reader, texts) for name, reader in readers.items()}
        totals[title] = counts
        judged = sum(entry.verdict is not None for entry in texts)
        report.table(
            f"{title}: {judged:,} judged texts",
            COLUMNS,
            [[name, *counts[name].row()] for name in counts],
        )
    targets(report, totals)
    report.close()


def count(reader: Reader, texts: Iterable[Entry]) -> Count:
    found = Count()
    for entry in texts:
        try:
            verdict = reader(entry.text, entry.truth)
        except Exception:
            # A reader that raises gives no reward.
            verdict = False
        found.add(entry.verdict, verdict)
    return found


def targets(report: Report, totals: dict[str, dict[str, Count]]) -> None:
    """Fewer errors than math-verify, and no wrong answer scored right."""
    for title, counts in totals.items():
        name = "batchwright math" if title.startswith("expressions") else "batchwright numeric"
        mine, peer = counts.get(name), counts.get("math-verify")
        if mine is None:
            continue
        report.target(f"{title}, wrong scored right, {name}", mine.accepted, most=0)
        if peer is not None:
            ratio = mine.errors / peer.errors if peer.errors else None
            shown = "no ratio" if ratio is None else f"ratio {ratio:.3f}"
            print(f"{title}: {mine.errors} errors, math-verify {peer.errors}, {shown}")
            if ratio is not None:
                report.target(f"{title}, errors relative to math-verify", ratio, most=1.0)


if __name__ == "__main__":
    main()
