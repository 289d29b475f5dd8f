"""A simulated target with a hidden rule: which wordings of a question it understands.

It knows every answer, and returns one only if the wording shows the traits that the question's
category requires. The simulated mutator changes those traits in known ways, so the optimal
rewriting of every question can be computed, and a learned policy compared with it.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from batchwright.errors import BadRow, ConfigError, MissingFile
from batchwright.files import parse_json, short_lines

__all__ = [
    "OPERATOR_WORDS",
    "RULES",
    "TRAITS",
    "UNCLEAR",
    "Question",
    "Target",
    "mutate",
    "read_questions",
    "traits",
    "uniform",
]

OPERATOR_WORDS = {
    "paraphrase": r"paraphras|rephras|reword|other words|different words",
    "expand": r"expand|elaborat|add(?:s|ing)? (?:some |more )?(?:context|detail)",
    "shorten": r"short|concise|brief",
    "crossover": r"crossover|cross over|combin|merg",
    "similar": r"similar",
    "perspective": r"perspective|point of view|first person",
    "politeness": r"polite",
    "synonym": r"synonym",
    "passive": r"passive",
}
"""The operators that the simulated mutator knows, and the words in a prompt that name each."""

TRAITS = {
    "polite": r"\b(?:please|kindly|thank you|thanks)\b",
    "passive": r"\b(?:is|are|was|were|be|being) (?:asked|requested|sought|wanted|required)\b",
    "personal": r"\b(?:i|my|me)\b",
    "formal": r"\b(?:state|determine|compute|specify|quantity)\b",
    "indirect": r"^[^?]*$",
    "detailed": r"(?:\S+\s+){17}",
    "terse": r"",
}
"""The traits of a wording, as patterns. `terse` has none: it is the absence of stop words."""

RULES: Mapping[str, Sequence[str]] = {
    "arithmetic": ("terse",),
    "geography": ("polite",),
    "units": ("detailed",),
    "dates": ("passive",),
    "science": ("personal",),
}
"""The hidden rule: the traits that a question of each category needs to be understood."""

UNCLEAR = "Unclear."
"""The reply to a wording that the target does not understand; it contains no answer."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SMALL = _words(
    "a an the of in on at to for from by with and or is are was were be been being do does did "
    "has have had what which who whom whose when where why how many much there it its this that "
    "these those you your he she they them his her their if then than so as about into will would "
    "can could should shall may might i my me we us our"
)
FILLER = _words(
    "please kindly thank thanks answer question asked requested sought wanted required following "
    "context general knowledge short exact know like tell state"
)
"""Words that operators add; questions are never recognised by them."""

SYNONYMS = {
    "find": "determine",
    "calculate": "compute",
    "name": "specify",
    "number": "quantity",
    "big": "large",
    "country": "nation",
    "fast": "quick",
    "city": "town",
}
CANONICAL = {other: word for word, other in SYNONYMS.items()}
STRANGE = ("amber", "basalt", "cedar", "ember", "fjord", "garnet", "juniper", "kelp", "opal")
PATTERNS = {name: re.compile(p, re.I | re.S) for name, p in TRAITS.items() if p}
TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|(?<=[\d\s])[-+*/\u00d7\u00f7%^=](?=[\d\s])")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its reference answer."""

    question: str
    answer: str
    category: str = ""
    id: str = ""


class Target:
    """A model that knows all answers and understands some wordings.

    A question is recognised by its numbers, which must be exactly the same, and by its content
    words: the question that shares the largest part of them wins.
    """

    def __init__(
        self, questions: Sequence[Question], rules: Mapping[str, Sequence[str]] = RULES
    ) -> None:
        self.questions = tuple(questions)
        self.rules = {category: frozenset(needed) for category, needed in rules.items()}
        for category, needed in self.rules.items():
            if unknown := needed - TRAITS.keys():
                raise ConfigError(
                    f"the rule of {category!r} requires the trait {min(unknown)!r}; "
                    f"known traits: {', '.join(TRAITS)}"
                )
        self._tags = [_tag(one.question) for one in self.questions]
        self._by_word: dict[str, list[int]] = {}
        for place, (words, _) in enumerate(self._tags):
            for word in words:
                self._by_word.setdefault(word, []).append(place)

    def recognise(self, wording: str) -> Question | None:
        """The question that is meant, if the wording has more than half of its content words."""
        words, numbers = _tag(wording)
        common: dict[int, int] = {}
        for word in words:
            for place in self._by_word.get(word, ()):
                common[place] = common.get(place, 0) + 1
        best, best_share = None, 0.0
        for place in sorted(common):
            own_words, own_numbers = self._tags[place]
            if own_numbers == numbers and 2 * common[place] > len(own_words):
                share = common[place] / (len(words) + len(own_words) - common[place])
                if share > best_share:
                    best, best_share = self.questions[place], share
        return best

    def needed(self, category: str) -> frozenset[str]:
        """The traits a category requires; without a rule, one that a hash of its name picks."""
        if category in self.rules:
            return self.rules[category]
        return frozenset({list(TRAITS)[int(uniform("rule", category) * len(TRAITS))]})

    def reply(self, wording: str) -> str:
        """The answer, or `UNCLEAR`."""
        meant = self.recognise(wording)
        if meant is None or not self.needed(meant.category) <= traits(wording):
            return UNCLEAR
        return meant.answer

    def best_plan(self, question: str, most: int = 2) -> tuple[str, ...] | None:
        """The shortest sequence of operators after which the target answers `question` correctly.

        Every sequence of at most `most` operators is tried with the simulated mutator, so this is
        the true optimum. () means that the original wording is understood, None that no sequence
        helps. `crossover` is excluded: its effect depends on the other question.
        """
        meant = self.recognise(question)
        if meant is None:
            return None
        alone = [name for name in OPERATOR_WORDS if name != "crossover"]
        for length in range(most + 1):
            for plan in product(alone, repeat=length):
                wording = question
                for operator in plan:
                    wording = mutate(operator, wording)
                if self.recognise(wording) is meant and self.reply(wording) != UNCLEAR:
                    return plan
        return None


def traits(wording: str) -> frozenset[str]:
    """The traits of a wording, which the hidden rule is about.

    >>> sorted(traits("Please tell me the capital of France."))
    ['indirect', 'personal', 'polite']
    >>> sorted(traits("17 + 25?"))
    ['terse']
    """
    found = {name for name, pattern in PATTERNS.items() if pattern.search(wording)}
    if SMALL.isdisjoint(TOKEN.findall(wording.lower())):
        found.add("terse")
    return frozenset(found)


def mutate(operator: str, question: str, other: str = "", seed: int = 0) -> str:
    """The question as the simulated mutator rewrites it.

    `crossover` appends `other`; `similar` changes the meaning, as real models often do.

    >>> mutate("shorten", "What is the capital of France?")
    'capital France?'
    >>> mutate("perspective", "What is the capital of France?")
    'I would like to know: what is the capital of France?'
    """
    core = question.strip()
    lower = core[:1].lower() + core[1:] if re.match(r"[A-Z][a-z]|A ", core) else core
    match operator:
        case "noop":
            return core
        case "shorten":
            idle = SMALL | FILLER
            kept = [word for word in core.split() if word.strip(".,;:?!'\"").lower() not in idle]
            return (" ".join(kept) or core).rstrip(".,;:?! ") + "?"
        case "politeness":
            return f"Please answer: {core}"
        case "passive":
            return f"An answer is requested: {lower}"
        case "perspective":
            return f"I would like to know: {lower}"
        case "paraphrase":
            return f"Tell us, {lower.replace('?', '').rstrip('.! ')}."
        case "synonym":
            return "State: " + re.sub(
                r"[A-Za-z]+", lambda word: SYNONYMS.get(word[0].lower(), word[0]), lower
            )
        case "expand":
            return (
                f"{core} For context: this is a question of general knowledge, "
                f"and a short and exact answer to it will do."
            )
        case "crossover":
            return f"{core} {other.strip()}".rstrip()
        case "similar":
            drawn = uniform(seed, "similar", core)
            if re.search(r"\d", core):
                return re.sub(r"\d+", lambda number: str(int(number[0]) + 1 + int(drawn * 9)), core)
            strange = STRANGE[int(drawn * len(STRANGE))]
            return re.sub(r"\w+(?=\W*$)", strange, core)
    known = ", ".join(OPERATOR_WORDS)
    raise ConfigError(f"unknown operator {operator!r}; known operators: noop, {known}")


def read_questions(path: Path) -> tuple[Question, ...]:
    """Questions from JSON lines with `question`, `answer` and optionally `category` and `id`."""
    if not path.is_file():
        raise MissingFile(f"{path} is not a file; pass JSON lines with question and answer")
    found = []
    with path.open("rb") as file:
        for number, line in enumerate(short_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                more = {name: str(row.get(name, "")) for name in ("category", "id")}
                found.append(Question(str(row["question"]), str(row["answer"]), **more))
            except (ValueError, KeyError, AttributeError) as error:
                raise BadRow(
                    f"{path} line {number} is not a question ({type(error).__name__}: {error}); "
                    f"each line must be a JSON object with question and answer"
                ) from None
    return tuple(found)


def uniform(*parts: object) -> float:
    """A number in [0, 1) that is a hash of `parts`.

    >>> uniform(0, "fault", 1) == uniform(0, "fault", 1) != uniform(0, "fault", 2)
    True
    """
    hashed = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=7)
    return int.from_bytes(hashed.digest(), "big") / (1 << 56)


def _tag(text: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Content words and numbers of a text; synonyms count as one word."""
    tokens = TOKEN.findall(text.lower())
    numbers = tuple(sorted(token for token in tokens if token[0].isdigit()))
    others = {token for token in tokens if not token[0].isdigit()}
    words = {CANONICAL.get(token, token) for token in others - SMALL - FILLER}
    return frozenset(words or others or {"#"}), numbers
