"""Ways to rewrite a question, each an instruction to a mutator model."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchwright.errors import BadFile, ConfigError
from batchwright.files import existing

__all__ = ["NOOP", "OPERATORS", "STOP", "Operator", "find_operator", "load_operators", "rewritten"]

_RULES = (
    "Keep its meaning, keep all of its names and numbers, and do not answer it. "
    "Reply with the new question only."
)


@dataclass(frozen=True, slots=True)
class Operator:
    """One action of the agent. Without a template no model is asked."""

    name: str
    template: str = ""

    @property
    def asks(self) -> bool:
        return bool(self.template)

    def prompt(self, question: str, other: str = "") -> str:
        """What the mutator is told.

        >>> find_operator("shorten").prompt("What is it?").splitlines()[-1]
        'Question: What is it?'
        """
        # Not str.format: questions may hold braces.
        fields = {"question": question, "other": other}
        return re.sub(r"\{(question|other)\}", lambda match: fields[match.group(1)], self.template)


def _built_in(name: str, instruction: str) -> Operator:
    return Operator(name, f"{instruction} {_RULES}\n\nQuestion: {{question}}")


NOOP = Operator("noop")
"""Ask the question as it stands."""
STOP = Operator("stop")
"""End the episode with what was reached."""

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

_ALIASES = {
    "rephrase": "paraphrase",
    "add_context": "expand",
    "generate_similar": "similar",
    "change_perspective": "perspective",
    "add_politeness": "politeness",
    "synonym_replace": "synonym",
    "passive_voice": "passive",
    "no-op": "noop",
}


def find_operator(name: str, operators: Sequence[Operator] = OPERATORS) -> Operator:
    """An operator by its name or one of its other names.

    >>> find_operator("rephrase").name
    'paraphrase'
    """
    wanted = _ALIASES.get(name, name)
    for operator in operators:
        if operator.name == wanted:
            return operator
    known = ", ".join(operator.name for operator in operators)
    raise ConfigError(f"no operator {name!r}; there are {known}")


def load_operators(path: Path) -> tuple[Operator, ...]:
    """The built-in operators and those of a TOML file, which may replace them by name.

    The file holds tables `[[operator]]` with `name` and `template`; a template has `{question}`
    in it and may have `{other}`, another question of the set.
    """
    try:
        found = tomllib.loads(existing(path, "operator file").read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadFile(f"{path} is not TOML: {error}") from None
    tables = found.get("operator")
    if not isinstance(tables, list) or not tables or found.keys() != {"operator"}:
        raise BadFile(f"{path} holds {sorted(found)}; write tables [[operator]] and nothing else")
    own: dict[str, Operator] = {}
    for number, table in enumerate(tables, start=1):
        name, template = table.get("name"), table.get("template")
        good = isinstance(name, str) and isinstance(template, str) and "{question}" in template
        if not good or table.keys() != {"name", "template"}:
            raise BadFile(
                f"{path}, operator {number}: it needs a name and a template with {{question}} in "
                f"it, and nothing else; it has {sorted(table)}"
            )
        if name in (NOOP.name, STOP.name):
            raise BadFile(f"{path}, operator {number}: {name} asks no model; choose another name")
        own[name] = Operator(name, template)
    kept = [own.pop(operator.name, operator) for operator in OPERATORS]
    # Stop stays last, so that it is the same action in every set.
    return (*kept[:-1], *own.values(), kept[-1])


def rewritten(text: str) -> str | None:
    """The question in a mutator's answer; None if there is nothing that could be one.

    >>> rewritten('New question: "What is the capital of France?"')
    'What is the capital of France?'
    >>> rewritten('{"mutated_query": "How many?"}')
    'How many?'
    >>> rewritten("...") is None
    True
    """
    inside = text.strip()
    if inside.startswith("{"):
        try:
            values = json.loads(inside)
        except ValueError:
            values = None
        if isinstance(values, dict):
            inside = next((value for value in values.values() if isinstance(value, str)), "")
    lines = [line.strip() for line in inside.splitlines() if line.strip()]
    if not lines:
        return None
    # Small models like to put a heading before, and reasons behind.
    heading = r"^[\s*#]*(?:[\w ]{0,24}question[\w ]{0,10}|rewritten|answer)\s*:[\s*]*"
    first = re.sub(heading, "", lines[0], flags=re.IGNORECASE)
    chosen = first or (lines[1] if len(lines) > 1 else "")
    chosen = chosen.strip("\"'“”* ")
    return chosen if re.search(r"\w", chosen) else None
