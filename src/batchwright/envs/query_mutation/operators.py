"""The operators that rewrite a question, each an instruction to a mutator model."""

import re
from dataclasses import dataclass
from pathlib import Path

from batchwright.errors import BadFile
from batchwright.files import existing, parse_toml, read_regular_text

__all__ = ["NOOP", "OPERATORS", "STOP", "Operator", "load_operators"]

_RULES = (
    "Keep its meaning, keep all of its names and numbers, and do not answer it. "
    "Reply with the new question only."
)


@dataclass(frozen=True, slots=True)
class Operator:
    """One action of the agent; without a template it makes no call."""

    name: str
    template: str = ""

    @property
    def asks(self) -> bool:
        return bool(self.template)

    def prompt(self, question: str, other: str = "") -> str:
        """The prompt for the mutator.

        >>> OPERATORS[0].prompt("What is it?").splitlines()[-1]
        'Question: What is it?'
        """
        # Not str.format: questions may hold braces.
        fields = {"question": question, "other": other}
        return re.sub(r"\{(question|other)\}", lambda match: fields[match.group(1)], self.template)


def _built_in(name: str, instruction: str) -> Operator:
    return Operator(name, f"{instruction} {_RULES}\n\nQuestion: {{question}}")


NOOP = Operator("noop")
"""Ask the question in its current wording."""
STOP = Operator("stop")
"""End the episode with the current wording."""

OPERATORS: tuple[Operator, ...] = (
    _built_in("paraphrase", "Paraphrase the question below: say the same in other words."),
    _built_in("expand", "Expand the question below: add context that makes it clearer."),
    _built_in("shorten", "Shorten the question below: leave out every word that is not needed."),
    Operator(
        "crossover",
        "Combine the wording of the two questions below: ask the first one in the manner of the "
        f"second one. {_RULES}\n\nQuestion B: {{other}}\n\nQuestion A: {{question}}",
    ),
    _built_in("similar", "Write a question that is similar to the one below, with one answer."),
    _built_in(
        "perspective", "Rewrite the question below from the perspective of the first person."
    ),
    _built_in("politeness", "Rewrite the question below more politely."),
    _built_in("synonym", "Rewrite the question below with synonyms for some of its words."),
    _built_in("passive", "Rewrite the question below in the passive voice."),
    NOOP,
    STOP,
)


def load_operators(path: Path) -> tuple[Operator, ...]:
    """The built-in operators and those of a TOML file, which override them by name.

    The file holds tables `[[operator]]` with `name` and `template`; a template contains
    `{question}` and optionally `{other}`, another question of the data set.
    """
    try:
        found = parse_toml(read_regular_text(existing(path, "operator file")))
    except BadFile:
        raise
    except ValueError as error:
        raise BadFile(f"{path} is not TOML: {error}") from None
    tables = found.get("operator")
    if not isinstance(tables, list) or not tables or found.keys() != {"operator"}:
        raise BadFile(f"{path} has the keys {sorted(found)}; allowed: tables [[operator]] only")
    own: dict[str, Operator] = {}
    for number, table in enumerate(tables, start=1):
        name, template = table.get("name"), table.get("template")
        good = isinstance(name, str) and isinstance(template, str) and "{question}" in template
        if not good or table.keys() != {"name", "template"}:
            raise BadFile(
                f"{path}, operator {number} has the keys {sorted(table)}; it must have a name and "
                f"a template that contains {{question}}, and nothing else"
            )
        if name in (NOOP.name, STOP.name):
            raise BadFile(f"{path}, operator {number}: the name {name} is reserved; choose another")
        own[name] = Operator(name, template)
    kept = [own.pop(operator.name, operator) for operator in OPERATORS]
    # Stop stays last, so that its action has the same position in every set.
    return (*kept[:-1], *own.values(), kept[-1])
