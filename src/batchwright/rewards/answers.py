# ruff: noqa: RUF001
r"""Where the answer of a text is, and whether it is the true one.

The answer stands, in this order, in the last `\boxed{...}`; behind the last `####` that a number
follows; behind the last "the answer is", "Answer:" or the like; in formulas that close the text;
else it is the last number, or what the last `=` of its sentence
says. Only the text behind `</think>` counts, before the next question that a model asks
itself (`Q:`, `<|im_end|>`), and inside `<answer>` if there is one.

What stands around it counts, too: a sign, scale or factor outside of a box belongs to it, an
answer that the text denies, compares with or takes back is doubtful, and a clear correction behind
it replaces it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any, Literal

from batchwright.rewards.claims import around, denied_before, marked, taken_back
from batchwright.rewards.corrections import Revision, revision
from batchwright.rewards.notation import SCALES, in_digits, plain, spaced
from batchwright.rewards.numbers import Number, Reading, Several, Value, readings, values

__all__ = ["Answer", "Place", "Verdict", "compare", "find_answer", "read_answer", "read_truth"]

Where = Literal["boxed", "hashes", "said", "formula", "whole", "last", "none"]
Verdict = Literal["right", "wrong", "ambiguous"]
Doubt = Literal["", "denied", "part", "replaced", "checked"]
"""The text around an answer takes it back, makes it a part of something larger, gives another
value instead, or goes on with a check that ends in a value."""


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a text that holds its answer."""

    where: Where
    text: str
    doubt: Doubt = ""
    instead: str = ""
    """What the text says instead, or at the end of a check."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with all its readings."""

    where: Where
    text: str
    readings: tuple[Reading, ...] | None
    """Empty: the text has no number; None: an expression that is not evaluated here."""
    doubt: Doubt = ""


_STOP = re.compile(
    r"<\|[^|<>]*\|>|<｜[^｜<>]*｜>|</s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|\n(?:Question|Q|Problem|User|Human)(?:[ ]?\d{1,3})?:"
    r"|(?i:\n[#*> \t]{0,9}(?:Instructions?|Human|User)\**:)|(?i:\n##[# ]{0,9}(?:Input|System):)"
)
# The same for a text that gave its answer already.
_NEXT = re.compile(
    r"(?i)\n[#*> \t]{0,9}(?:next[ ])?(?:question|problem|exercise|query|instruction|input"
    r"|user|human)(?![^\W\d_])[ \t]{0,3}\d{0,3}[*:. \t]{0,9}(?:\n|(?<=[:.*])|(?<=[:.*][ ]))"
    r"|(?<=[.!?][ ])(?:user|human|next[ ]question)\s?:"
)
# Where a channel of the answer begins, behind one of the reasoning.
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)[^<]{0,99}(?:<\|constrain\|>[^<]{0,99})?<\|message\|>")
_UNSAID = re.compile(
    r"<!--(?:(?!<!--).)*?-->|(?m:^[ \t]*%[^\n]*)"
    r"|~~[^~\n]{1,200}~~|<(del|s|strike)>[^<>\n]{0,200}</\1>"
    r"|\\cancelto\s?\{[^{}]{0,200}+\}\s?\{[^{}]{0,200}+\}"
    r"|\\iffalse(?:(?!\\iffalse).)*?\\fi(?![a-z])"
    r"|\\(?:[bx]?cancel|sout|st|[hv]?phantom)\s?"
    r"\{[^{}]{0,200}+(?:\{[^{}]{0,200}+\}[^{}]{0,200}+){0,3}+\}",
    re.DOTALL,
)
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BUT_NOT = re.compile(
    r"(?i)[,;(—–-]\s*(?:and\s+|but\s+)?(?:not|never|rather than|instead of|pas|nicht|no|não|non"
    r"|niet|не)\s+[$(*]*$|[，,]\s*而?不是\s*[$(*]*$"
)
_BETWEEN = re.compile(r"(?:[\s$\\()\[\],;]|and|or|\\text\s*\{\s*(?:and|or)?\s*\}|\\q?quad)*")
# Possessive quantifiers: nothing is tried twice, so that a megabyte of # or of spaces takes as long
# to read as one of words.
_NUMBER_START = r"[-+−–]?\s*+(?:\\?[$€£¥₹]|\\frac|\\boxed|[(\[{])*+\s*+[-+−–]?\s*+[.\\]?\d"
_HASHES = re.compile(
    rf"(?<!#)####++[ \t]*+:?[ \t]*+\**+(?=\s*+{_NUMBER_START})(?!\s*+\d++[.)]\s+[A-Za-z*])\s*+"
    r"|(?<!#)####++[ \t]*+(?=[a-z])"
)
_SAID = re.compile(
    r"""(?ix)
    (?: \b(?:answer|réponse|respuesta|antwort|resposta|risposta|jawaban|jawab|jibu|svar|cevap
             |odpowiedź|đáp[ ]án)\b
      | ответ | 答案 | 答え | 回答 | 解答 | 答(?=\s*[:：]) | 답변 | 정답 | 답(?=\s*[:：]) | उत्तर
      | উত্তর | คำตอบ | సమాధానం | الإجابة | الجواب | إجابة | ^A(?=:) )
    [\s"'*_`#]*
    (?: \b(?:to|of|for|here)\b [^.\n:=]{0,60}? )?
    \s* (?: (?: \b(?:is|are|was|be|equals|ist|est|es|será)\b | \b(?:would|should|must|will)\s+be\b )
            [ \t]* [:：]? | [是为は] [:：]? | [=:：→—] | -(?=\s+[\d$])
            | (?<=\*\*)\s*\n | (?<=answer)\s*\n )
    [\s"'*_`]*
    """,
    re.MULTILINE,
)
_FORMULA = re.compile(
    # A formula that is never closed ends at the next one, or each would be read to the end.
    r"\$\$(.+?)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|(?<![\\\w])\$([^$\n]+?)(?<!\\)\$(?!\d)",
    re.DOTALL,
)
_CANNOT = r"(?:can(?:not|'t|’t|[ ]not)|could(?:n't|n’t|[ ]not)|(?:am|are|was|were)?\s*unable[ ]to)"
_REFUSED = re.compile(
    rf"""(?ix)
    \b(?:I|we)\s+(?:\w+\s+)?{_CANNOT}\s+(?:\w+ly\s+)?
        (?:determine|answer|solve|calculate|compute|tell|say|know|deduce|infer|conclude|help)\b
    | \b{_CANNOT}\s+be\s+(?:\w+ly\s+)?
        (?:determined|answered|solved|calculated|computed|found|known|deduced|inferred)\b
    | \b(?:im|not[ ])possible[ ]to\s+(?:determine|answer|solve|calculate|compute|tell|say|know)\b
    | \b(?:not[ ]enough|insufficient)\s+(?:information|data|details)\b"""
)
_AND_YET = re.compile(
    r"(?i)\b(?:but|however|instead|so|thus|therefore|hence|then|although|yet)\b|[=≈]"
)
_LISTED = re.compile(r"(?im)^\s*(?:\d+[.)]\s+(?=\D)|#*\s*\**step\s*\d+\b\**:?)")
_SENTENCE = re.compile(r"(?<=[^\W_])[.!?](?:\s|$)|(?<=[)}\]$*%])[.!?](?:\s|$)|\n")
_VERBS = "is are was be equals makes gives get has have costs cost needs need pays earns"
_NAMED = frozenset((":", *_VERBS.split()))
_WRONG_SAID = re.compile(r"(?i)\W*(?:\w+ly\s+)?(?:wrong|incorrect|false|unknown)\b")
_HEDGED = re.compile(
    r"(?i)\bif\b.*\b(?:were|was|had)\b|\bbut\s+(?:it|that)\s+(?:is|was)\s*n[o']t\b"
)
# The end of a check whose unit is not read: = 29 cookies on the floor.
_ENDS = re.compile(
    r"=\s*+(-?\d(?:[\d.,]*\d)?+)(?!\s*(?:squared|cubed|factorial|choose|mod|to\s+the|[\^*/+%]))"
    r"(?=\s)\D*$"
)
_ASKED = re.compile(
    r"(?i)(?:^|[.!?\n]\s{0,9})(?:is|are|was|could|might|can|would)\b[^.!?\n\d]*\d[^!?\n]{0,80}\?\W*$"
)
_SCALE_NAMES = frozenset(SCALES)
_ZERO = re.compile(r"(?i)\b(?:none|nothing|nobody)\b")
_NO_NUMBER = (Several("other"), Several("irrational"))
_MOST_BOXES = 9
_LONGEST = 600
"""Characters of an answer; of a text without a mark only so many are searched for it."""
_PROSE = re.compile(r"\n|[.!?]\s+\w|(?s:.){200}")
_ABBREVIATED = re.compile(
    r"\b(Rs|sq|cu|approx|ft|in|lbs?|oz|a\.m|p\.m|Mio|Mrd|Tsd|tys|mln|тыс|млн|млрд)\.(?=\s|$)"
    r"|\b(Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.(?=\s\d)"
    r"|(?<=\d)\.(?=\s(?:Januar|Februar|März|April|Mai|Juni|Juli|August|Oktober|Dezember)\b)"
)


def find_answer(text: str) -> Place:
    r"""The place of the answer, as the module tells.

    >>> find_answer(r"so \boxed{\frac{1}{2}} of 8")
    Place(where='boxed', text='\\frac{1}{2}', doubt='', instead='')
    >>> find_answer("#### 12 apples in 3 days")
    Place(where='hashes', text='12 apples in 3 days', doubt='', instead='')
    """
    text = _spoken(text)
    boxes = _boxes(text)
    while len(boxes) > 1 and _BUT_NOT.search(text[max(0, boxes[-1][0] - 40) : boxes[-1][0]]):
        boxes.pop()
    if boxes:
        return _outlined(text, boxes, "boxed")
    marks = [m for m in _HASHES.finditer(text) if _is_number_word(text, m)]
    if marks:
        line = text[marks[-1].end() :].partition("\n")[0]
        behind = text[marks[-1].end() + len(line) :]
        return _revised("hashes", line, behind, denied=taken_back(behind))
    said = None
    for said in _SAID.finditer(text):  # noqa: B007
        pass
    if said is not None:
        claim, behind = _first_sentence(text[said.end() :])
        denied = (
            denied_before(text[max(0, said.start() - 200) : said.start()])
            or taken_back(claim[:_LONGEST])
            or taken_back(behind)
            or _HEDGED.search(claim) is not None
        )
        return _revised("said", claim, behind, denied=denied)
    formulas = [
        (match.start(), match.end(), next(group for group in match.groups() if group is not None))
        for match in _FORMULA.finditer(text)
    ]
    if formulas and not re.search(r"\d", text[formulas[-1][1] :]):
        place = _outlined(text, formulas, "formula")
        if not re.search(r"(?<![\\{a-z])\b[a-z]{2,}\s+[a-z]{2,}", place.text):
            return place
    return Place("last", text, "denied" if _ASKED.search(text[-300:]) else "")


def read_answer(text: str) -> Answer:
    """The answer of a text with all its readings.

    >>> read_answer("So it is 1,200.").readings[0].value
    Number(value=Fraction(1200, 1), place=None, percent=False)
    """
    place = find_answer(text)
    written = place.text.strip()
    if len(written) > _LONGEST:
        if place.where in ("boxed", "formula"):
            return Answer(place.where, written, None, place.doubt)
        written = written[-_LONGEST:] if place.where == "last" else written[:_LONGEST]
    shown = plain(written)
    if not re.search(r"\d", shown):
        shown = in_digits(shown)
    latex = place.where in ("boxed", "formula")
    found: tuple[Reading, ...] | None
    where = place.where
    if place.where in ("hashes", "said"):
        found = _in_sentence(shown, said=place.where == "said")
    elif latex:
        found = readings(shown, latex=True)
    else:
        found = None if _PROSE.search(shown) else readings(marked(shown), latex=False)
        where = "whole"
        if found is None or _no_number(found):
            found, where = _last(shown), "last"
    if not found and found is not None and r"\pi" in shown:
        found = (Reading(Several("irrational")),)
    if not found and found is not None and _ZERO.search(shown):
        found = (Reading(Number(Fraction(0)), "meaning"),)
    if place.instead:
        found, doubt = _with_instead(found, place)
        return Answer(where, written, found, doubt)
    if place.doubt == "part":
        found = None
    elif not latex and re.match(r"-\s+\d[\d.,]*\s*$", shown):
        # A list item, or less than nothing?
        positive = _doubtful([readings(shown.lstrip("- "), latex=False)])
        found = None if found is None else (*found, *(positive or ()))
    elif place.doubt and found:
        found = _doubtful([found])
    return Answer(where, written, found, place.doubt)


def read_truth(truth: Any) -> Answer | None:
    """The answer of a ground truth; None if it is no number, list, range or ratio.

    >>> read_truth("x + 1"), read_truth(None)
    (None, None)
    """
    found = None if truth is None else read_answer(str(truth))
    if found is None or not found.readings:
        return None
    if found.where == "last" and not re.search(r"[^\W\d_]{3}", re.sub(r"\\.*", "", found.text)):
        # No sentence: an expression such as 2x + 1.
        return None
    first = found.readings[0]
    return None if first.doubt or first.value in _NO_NUMBER else found


def compare(answer: Answer, truth: Answer, tolerance: float | None = None) -> Verdict:
    """Whether an answer is the true one; `ambiguous` if only a doubtful reading is.

    >>> [compare(read_answer(text), read_answer("1234")) for text in ("1,234", "1.234", "12.34")]
    ['right', 'ambiguous', 'wrong']
    """
    if answer.readings is None:
        return "ambiguous"
    found: Verdict = "wrong"
    known = [reading for reading in truth.readings or () if reading.doubt != "locale"]
    listed = any(isinstance(reading.value, Several) and not reading.doubt for reading in known)
    for one, other in product(answer.readings, known):
        same = _equal(one.value, other.value, tolerance)
        # The truth 3,4 is a list first, and a decimal perhaps.
        doubt = one.doubt or other.doubt or (listed and isinstance(other.value, Number))
        if same and not doubt:
            return "right"
        if same or same is None:
            found = "ambiguous"
    return found


def _spoken(text: str) -> str:
    """What is said to the reader: behind the reasoning, before another question, in the tag."""
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    channels = list(_CHANNEL.finditer(text))
    if channels:
        final = [match for match in channels if match[1].lower() == "final"]
        text = text[final[0].end() :] if final else ""
    elif text.startswith("analysis") and "assistantfinal" in text:
        # The same where the marks were left out.
        text = text.partition("assistantfinal")[2]
    if text.lstrip().startswith("<s>") and not text.partition("</s>")[2].strip():
        # The marks of begin and end, not struck-out text.
        text = text.replace("<s>", " ", 1)
    text = _UNSAID.sub(" ", text)
    at = 0
    for stop in _STOP.finditer(text):
        if re.search(r"[^\W_]", re.sub(r"^\s*(?:assistant|model)\b", "", text[at : stop.start()])):
            text = text[: stop.start()]
            break
        at = stop.end()
    given = [mark.search(text) for mark in (_BOX, _SAID, _HASHES)]
    ends = [match.end() for match in given if match is not None]
    following = _NEXT.search(text, min(ends)) if ends else None
    if following is not None:
        text = text[: following.start()]
    tags = _TAG.findall(text)
    return str(tags[-1]) if tags else text


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """The last boxes: start, end and content."""
    boxes: list[tuple[int, int, str]] = []
    for match in list(_BOX.finditer(text))[-_MOST_BOXES:]:
        end = _brace_end(text, match.end())
        if end is not None:
            boxes.append((match.start(), end, text[match.end() + 1 : end - 1]))
        elif not text.startswith("{", match.end()):
            word = re.match(r"[^\s$]*", text[match.end() :])
            assert word is not None
            boxes.append((match.start(), match.end() + word.end(), word[0]))
        else:
            # The text was cut off inside the box.
            boxes.append((match.start(), len(text), ""))
    return boxes


def _outlined(text: str, parts: Sequence[tuple[int, int, str]], where: Where) -> Place:
    """The last of the boxes or formulas, with the sign, scale or factor outside of it."""
    start, inside = _joined(text, parts)
    before, behind = text[max(0, start - 200) : start], text[parts[-1][1] :]
    outside = around(before, spaced(behind[:200]), _SCALE_NAMES)
    if outside.part:
        return Place(where, inside, "part")
    if outside.before and re.search(r"\S\s*[-+]", inside):
        inside = f"({inside})"
    inside = outside.before + inside + outside.behind
    if outside.cut:
        return Place(where, inside, "denied")
    denied = denied_before(before) or taken_back(behind)
    place = _revised(where, inside, behind, denied=denied, within=False)
    if denied and not place.instead and where == "boxed" and len(parts) > 1:
        # Perhaps an earlier one was meant.
        return Place(where, inside, "denied", parts[-2][2])
    return place


def _revised(where: Where, claim: str, behind: str, *, denied: bool, within: bool = True) -> Place:
    """The place of a claim, with what the text behind its number (or behind it) makes of it."""
    rest = behind
    if within:
        number = re.search(r"\d(?:[\d.,/]*\d)?", claim)
        rest = (claim[number.end() :] if number is not None else "") + behind
    later = revision(rest, denied=denied)
    if later is None and where != "said":
        later = _said_again(rest, where)
    if later is None:
        there = denied and re.search(r"\d", rest) is not None
        return Place(where, claim, "denied" if denied else "", rest if there else "")
    if later.clear:
        return Place(where, claim, "replaced", later.text)
    return Place(where, claim, "denied" if denied or later.withdrawn else "checked", later.text)


def _said_again(text: str, where: Where) -> Revision | None:
    """What a text says once more behind a box or behind ####: that must be the same."""
    said = None
    for said in _SAID.finditer(text):  # noqa: B007
        pass
    if said is None and where != "hashes":
        marks = [m for m in _HASHES.finditer(text) if _is_number_word(text, m)]
        said = marks[-1] if marks else None
    claim = "" if said is None else _first_sentence(text[said.end() :])[0]
    number = re.search(r"\d(?:[\d.,/]*\d)?", claim)
    if number is None or not re.match(r"\W*\d", claim):
        return None
    return Revision(claim[: number.end()], clear=False, withdrawn=False)


def _with_instead(
    claimed: tuple[Reading, ...] | None, place: Place
) -> tuple[tuple[Reading, ...] | None, Doubt]:
    """The readings of a claim and of what the text says instead: doubtful, if that is not clear."""
    tail = plain(place.instead[-_LONGEST:])
    later = _last(tail)
    if place.doubt == "checked" and claimed:
        ends = None if later else _ENDS.search(tail)
        checked = later or (readings(ends[1], latex=False) if ends is not None else None)
        if checked and _equal(claimed[0].value, checked[0].value, None):
            return claimed, ""
    doubtful = _doubtful([claimed, later])
    if place.doubt == "replaced" and later and claimed is not None:
        return (*later, *(_doubtful([claimed]) or ())), "replaced"
    return doubtful, "denied"


def _joined(text: str, parts: Sequence[tuple[int, int, str]]) -> tuple[int, str]:
    """The last part, with those before it if only `and`, `or`, commas stand between them.

    Behind the place where it starts.
    """
    start, _, last = parts[-1]
    found, size = [last], len(last)
    for begin, end, inside in reversed(parts[:-1]):
        # What is longer is no answer, and there may be a million of them.
        if size > _LONGEST or end > start or not _BETWEEN.fullmatch(text, end, start):
            break
        found.append(inside)
        size += len(inside) + 2
        start = begin
    return start, ", ".join(reversed(found))


def _brace_end(text: str, start: int) -> int | None:
    """Behind the brace that closes the one at `start`."""
    if not text.startswith("{", start):
        return None
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.end()
    return None


def _is_number_word(text: str, mark: re.Match[str]) -> bool:
    """`#### twelve` is an answer, `#### step two` is a heading."""
    line = text[mark.end() :].partition("\n")[0]
    return re.search(r"\d", line) is not None or in_digits(line)[:1].isdigit()


def _undotted(match: re.Match[str]) -> str:
    return match[1] or match[2] or ""


def _first_sentence(text: str) -> tuple[str, str]:
    """The first sentence and what comes behind it."""
    text = _ABBREVIATED.sub(_undotted, text.lstrip())
    # The letter of a multiple choice is no sentence.
    text = re.sub(r"^[A-J]\.\s+(?=[-$\\(]*\d)", "", text)
    end = _SENTENCE.search(text)
    if end is None or re.fullmatch(r"\d+!\s*", text):
        # Perhaps a factorial.
        return text, ""
    return text[: end.start()], text[end.start() :]


def _in_sentence(text: str, *, said: bool) -> tuple[Reading, ...] | None:
    """The first value; if words stand before it and it is not the only one, all are doubtful."""
    if said and _refuses(text):
        return ()
    if said:
        if _WRONG_SAID.match(text) and re.search(r"\d", text):
            return None
        text = marked(text)
    whole = readings(text, latex=False)
    if whole is not None and not _no_number(whole):
        return whole
    found = values(text)
    if not found:
        return ()
    first = 0
    while first + 1 < len(found) and found[first + 1][0] in ("=", "≈"):
        first += 1
    direct = re.match(r"\W*\d|\W*\\(?:frac|sqrt)", text) is not None
    if direct or not said or len(set(found[first:])) == 1:
        return found[first][1]
    return _doubtful([found[first][1], found[-1][1]])


def _last(text: str) -> tuple[Reading, ...] | None:
    """Of the last sentence with numbers: what stands behind its last `=`, else the last number.

    It is doubtful if another number stands right behind the last `is`, `has`, `costs`.
    """
    text = _LISTED.sub("\n", text)
    text = _ABBREVIATED.sub(_undotted, text)
    sentences, ends, at = [], [], 0
    for start, end in [*(m.span() for m in _SENTENCE.finditer(text)), (len(text), len(text))]:
        if text[at:start].strip():
            sentences.append(text[at:start])
            ends.append(start)
        at = end
    for place in reversed(range(len(sentences))):
        sentence = sentences[place]
        found = values(marked(sentence)) if re.search(r"\d", sentence) else []
        if not found:
            if _refuses(sentence):
                return ()
            continue
        if _refuses(sentence) or (
            place and _refuses(sentences[place - 1]) and not _AND_YET.search(sentence)
        ):
            return ()
        if taken_back(sentence) or taken_back(text[ends[place] :]) or _HEDGED.search(sentence):
            return _doubtful([found[-1][1]])
        equal = [value for before, value in found if before in ("=", "≈")]
        if equal:
            return equal[-1]
        named = [value for before, value in found if before in _NAMED]
        if named and named[-1] != found[-1][1]:
            return _doubtful([named[-1], found[-1][1]])
        return found[-1][1]
    return ()


def _refuses(text: str) -> bool:
    """Whether a text says that there is no answer, and nothing against that: its numbers are none.

    >>> _refuses("I cannot determine it; 5 is given"), _refuses("It can't be found, but 5 is near")
    (True, False)
    """
    refused = _REFUSED.search(text)
    return refused is not None and not _AND_YET.search(text, refused.end())


def _no_number(found: Sequence[Reading]) -> bool:
    return len(found) == 1 and found[0].value in _NO_NUMBER


def _doubtful(found: Sequence[tuple[Reading, ...] | None]) -> tuple[Reading, ...] | None:
    if None in found:
        return None
    return tuple(Reading(r.value, "meaning") for some in found for r in some or ())


def _equal(one: Value, other: Value, tolerance: float | None) -> bool | None:
    """Whether two values are equal; None if that depends on what was meant."""
    if one == Several("irrational"):
        # It is no integer and no fraction; a decimal may be its rounded value.
        rounded = isinstance(other, Number) and other.place is not None
        return None if rounded or other == one else False
    if isinstance(one, Number) and isinstance(other, Number):
        return _equal_numbers(one, other, tolerance)
    if not isinstance(one, Several) or not isinstance(other, Several):
        return False
    if {"other", "irrational"} & {one.shape, other.shape} or len(one.items) != len(other.items):
        return False
    if one.names or other.names:
        return _equal_named(one, other, tolerance)
    ordered = _pairs(one.items, other.items, tolerance)
    shapes = {one.shape, other.shape}
    if shapes <= {"list", "set"}:
        return ordered or _permuted(one.items, other.items, tolerance)
    if len(shapes) == 1 or shapes == {"range", "ratio"}:
        if shapes == {"ratio"} and not ordered:
            return None if _proportional(one.items, other.items) else False
        return ordered
    if shapes in ({"list", "()"}, {"list", "[]"}, {"set", "[]"}):
        return ordered or (None if _permuted(one.items, other.items, tolerance) else False)
    if shapes & {"set", "list", "range"}:
        return None if ordered else False
    return False


def _equal_named(one: Several, other: Several, tolerance: float | None) -> bool | None:
    """Lists of which one has names at least: x = 3, y = 2 is not x = 2, y = 3."""
    ordered = _pairs(one.items, other.items, tolerance)
    if one.names and other.names:
        if {*one.names} == {*other.names}:
            known = dict(zip(other.names, other.items, strict=True))
            items = [known[name] for name in one.names]
            return _pairs(one.items, items, tolerance)
        return None if ordered or _permuted(one.items, other.items, tolerance) else False
    named = one if one.names else other
    shapes = {one.shape, other.shape}
    # The roots x_1 = 3, x_2 = 4 have no order.
    roots = len({re.sub(r"[_\d₀-₉]+$", "", name) for name in named.names}) == 1
    if not shapes <= {"list", "set", "()", "[]"}:
        return None if ordered else False
    same = _permuted(one.items, other.items, tolerance)
    if roots and shapes <= {"list", "set"}:
        return same
    letters = all(len(name) == 1 for name in named.names)
    # Against (3, 4), y = 3 and x = 4 is doubtful.
    if ordered and not (letters and list(named.names) != sorted(named.names)):
        return True
    return None if same else False


def _pairs(one: Sequence[Value], other: Sequence[Value], tolerance: float | None) -> bool:
    return all(_equal(a, b, tolerance) for a, b in zip(one, other, strict=True))


def _permuted(one: Sequence[Value], other: Sequence[Value], tolerance: float | None) -> bool:
    left = list(other)
    for item in one:
        match = next((known for known in left if _equal(item, known, tolerance)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _proportional(one: Sequence[Value], other: Sequence[Value]) -> bool:
    pairs = [
        (a.value, b.value)
        for a, b in zip(one, other, strict=True)
        if isinstance(a, Number) and isinstance(b, Number)
    ]
    first, second = pairs[0]
    return all(a * second == b * first for a, b in pairs)


def _equal_numbers(one: Number, truth: Number, tolerance: float | None) -> bool | None:
    """With percent signs: 50% is 0.5, and it is 50 where the sign was left out."""
    same = _near(one, truth, tolerance)
    if one.percent == truth.percent:
        return same
    marked, bare = (one, truth) if one.percent else (truth, one)
    share = Number(marked.value / 100, None if marked.place is None else marked.place / 100)
    if _near(share, bare, tolerance):
        return True
    if same:
        # A share is at most 1: nobody knows whether 0.5 was meant as a share.
        return True if abs(bare.value) > 1 else None
    return False


def _near(one: Number, truth: Number, tolerance: float | None) -> bool:
    """Equal; or close, if one of them is a decimal."""
    apart = abs(one.value - truth.value)
    if not apart or (one.place is None and truth.place is None):
        return not apart
    if tolerance is not None:
        return apart <= Fraction(tolerance) * max(Fraction(1), abs(truth.value))
    if one.value.denominator == truth.value.denominator == 1:
        return False
    places = [place for place in (one.place, truth.place) if place is not None]
    return apart <= min(max(abs(one.value), abs(truth.value)) / 10**6, max(places) / 2)
