# ruff: noqa: RUF001
"""What a written answer is worth: exact numbers, and lists, ranges and ratios of them."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import factorial, isqrt
from typing import Literal, NamedTuple

from batchwright.rewards.notation import SCALES

__all__ = ["Number", "Reading", "Several", "Value", "readings", "values"]

_MODES = ("plain", "split", "other")
"""How separators inside digits are taken: as usual; a comma that groups no thousands separates
two numbers; `1.234` and `1,234` the other way round."""


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number as it was written."""

    value: Fraction
    place: Fraction | None = None
    """What one unit of the last written digit of a decimal is worth; None: the number is exact."""
    percent: bool = False


@dataclass(frozen=True, slots=True)
class Several:
    """Numbers that are one answer together, or an expression that is no rational number."""

    shape: str
    """`list`, `set`, `range`, `ratio`, the brackets (`()`, `[)`, ...), `irrational` or `other`."""
    items: "tuple[Value, ...]" = ()
    names: tuple[str, ...] = ()
    """What each item is called, as in `x = 3, y = 2` or `3 apples, 2 pears`; empty: not all are."""


Value = Number | Several


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read an answer; one with a doubt is possible, but not what is usually meant."""

    value: Value
    doubt: Literal["", "meaning", "locale"] = ""


class _Token(NamedTuple):
    kind: str
    """number, word, command or mark."""
    text: str
    start: int
    glued: bool
    """No space before it."""


class _Unread(Exception):
    """An expression that this grammar does not have."""


class _Other(Exception):
    """Certainly no rational number: a variable, an inequality."""


class _Irrational(_Other):
    """A root or a multiple of π: no integer and no fraction, but perhaps near a decimal."""


_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?: \d{3})+(?:,\d{1,2}|\.\d+)?(?![\d,/])|\d+(?:[.,'’_\u00a0]\d+)*|\.\d+)"
    r"(?:[eE][-+]?\d+(?!\w))?)"
    r"|(?P<word>[^\W\d_]\w*)|(?P<command>\\[a-zA-Z]+)|(?P<mark>\S)"
)
# Units that are written next to each other as one quantity: how many of the smallest.
_COMPOUND = {
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), ("time", 3600)),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), ("time", 60)),
    **dict.fromkeys(("second", "seconds", "sec", "s"), ("time", 1)),
    **dict.fromkeys(("day", "days"), ("time", 86_400)),
    **dict.fromkeys(("week", "weeks"), ("time", 604_800)),
    **dict.fromkeys(("year", "years"), ("age", 12)),
    **dict.fromkeys(("month", "months"), ("age", 1)),
    **dict.fromkeys(("pound", "pounds", "lb", "lbs"), ("weight", 16)),
    **dict.fromkeys(("ounce", "ounces", "oz"), ("weight", 1)),
    **dict.fromkeys(("kg", "kilogram", "kilograms"), ("mass", 1000)),
    **dict.fromkeys(("g", "gram", "grams"), ("mass", 1)),
    **dict.fromkeys(("km", "kilometer", "kilometers"), ("metric", 100_000)),
    **dict.fromkeys(("m", "meter", "meters", "metre", "metres"), ("metric", 100)),
    **dict.fromkeys(("cm", "centimeter", "centimeters"), ("metric", 1)),
    **dict.fromkeys(("yard", "yards", "yd"), ("length", 36)),
    **dict.fromkeys(("foot", "feet", "ft"), ("length", 12)),
    **dict.fromkeys(("inch", "inches", "in"), ("length", 1)),
    **dict.fromkeys(("dollar", "dollars"), ("money", 100)),
    **dict.fromkeys(("cent", "cents"), ("money", 1)),
}
_VARIABLES = frozenset("xyzabcefijknpqrtuvwXYZ")
_UNIT_MARKS = frozenset("/*-.")
_OPEN, _CLOSE = "([{⦃", ")]}⦄"
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?")
_JOINS = frozenset((",", ";", "and", "or", "&"))
_OPERATORS = frozenset("+-*/^")
_COMPARES = frozenset("≤≠")
_HEDGES_TEXT = "about approximately approx roughly around exactly only at most least up to a total"
_HEDGES = frozenset(f"{_HEDGES_TEXT} of the is just nearly almost from answer".split())
_CLAUSES = frozenset("but because since so which after not when if where then while".split())  # noqa: SIM905
_NO_UNIT = _CLAUSES | frozenset("and or to for is are was".split())  # noqa: SIM905
# Words that calculate, deny or doubt: a number beside one of them is not yet the answer.
_CALCULATE = frozenset(
    """plus minus times divided multiplied mod modulo choose squared cubed factorial remainder
    raised root sqrt cbrt sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp
    gcd lcm floor ceil ceiling twice thrice double triple pi theta alpha beta power except maybe
    perhaps vs versus unknown cannot without wrong incorrect""".split()  # noqa: SIM905
)
_SHARES = frozenset("half third quarter tenth".split())  # noqa: SIM905
_HARMLESS = frozenset("()[]{}⦃⦄,;:=≈.-+*/^_±≤≠'\"#%!?–&~|<>@$\\•’‘′″…。、，：！？（）「」*")
_DECORATION = frozenset(("So", "Mn", "Cf", "Sk"))  # Emoji and what modifies them.
_POWERED_UNIT = re.compile(r"(?i)(?:[kcmdµμn]?m|ft|in|yd|mi|co|h|o)[23]o?")
_DEEPEST = 30
"""Brackets in brackets; deeper ones are not read."""
_MOST_BITS = 20_000
"""A power or a factorial may have this many bits; larger ones are not evaluated."""


def readings(text: str, *, latex: bool) -> tuple[Reading, ...] | None:
    """All ways to read a whole plain text as one answer; None if it is not read.

    `latex` means that `5!` is a factorial, not an exclamation.

    >>> [reading.value.value for reading in readings("3 1/2 cups", latex=False)]
    [Fraction(7, 2)]
    """
    # An exact value and its rounded one are both the answer.
    parts = [part for part in text.split("≈") if re.search(r"\d", part)] or [text]
    return _merged(
        (mode, _Parser(_tokens(part, mode), latex).whole) for mode in _MODES for part in parts
    )


def values(text: str) -> list[tuple[str, tuple[Reading, ...] | None]]:
    """The values of a plain sentence in order, each behind the word or mark before it.

    >>> [before for before, _ in values("3 + 4 = 7 apples cost 2 dollars")]
    ['', '=', 'cost']
    """
    lines = {mode: _tokens(text, mode) for mode in _MODES}
    line, found, at = lines["plain"], [], 0
    while at < len(line):
        if not _starts(line, at):
            at += 1
            continue
        here: list[tuple[str, Callable[[], list[Reading]]]] = []
        for mode, other in lines.items():
            first = next(n for n, token in enumerate(other) if token.start == line[at].start)
            here.append((mode, _Parser(other, latex=False, at=first).partial))
        found.append((line[at - 1].text.lower() if at else "", _merged(here)))
        parser = _Parser(line, latex=False, at=at)
        with suppress(_Unread, _Other):
            parser.partial()
        at = _after_remark(line, max(parser.at, at + 1))
    return found


def _merged(
    ways: Iterable[tuple[str, Callable[[], "list[Reading]"]]],
) -> tuple[Reading, ...] | None:
    """The different readings of the modes; those of the unusual mode are doubtful."""
    found: list[Reading] = []
    for mode, parse in ways:
        try:
            here = parse()
        except _Unread:
            continue
        except _Irrational:
            here = [Reading(Several("irrational"))]
        except _Other:
            here = [Reading(Several("other"))]
        for reading in here:
            if mode == "other" and reading.doubt:
                continue
            if all(reading.value != known.value for known in found):
                found.append(replace(reading, doubt="locale") if mode == "other" else reading)
    return tuple(found) or None


def _tokens(text: str, mode: str) -> list[_Token]:
    """Numbers, words, commands and marks; commas inside digits are decided here."""
    found: list[_Token] = []
    end = depth = 0
    for match in _TOKEN.finditer(text):
        kind, written, start = str(match.lastgroup), match[0], match.start()
        glued, end = start == end and end > 0, match.end()
        depth += (written in _OPEN) - (written in _CLOSE)
        pieces = [written]
        if kind == "number" and "," in written:
            grouped = _GROUPED.fullmatch(written) is not None
            inside = depth > 0 or written.count(",") > 1
            split = mode == "split" and (depth > 0 or not written.startswith("0,"))
            if " " in written:
                # 1 234,5: spaces group, so the comma is a decimal one.
                inside = split = False
            if (not grouped and (inside or split)) or (split and depth > 0):
                pieces = written.split(",")
        if kind == "number" and mode == "other":
            pieces = [_swapped(piece) for piece in pieces]
        for number, piece in enumerate(pieces):
            if number:
                found.append(_Token("mark", ",", start, True))
            found.append(_Token(kind, piece, start, glued and not number))
    return found


def _swapped(written: str) -> str:
    """`1.234` as one thousand, `1,234` as a little more than one; others as they are."""
    if re.fullmatch(r"[1-9]\d{0,2}\.\d{3}", written):
        return written.replace(".", "")
    if re.fullmatch(r"[1-9]\d{0,2},\d{3}", written):
        return written.replace(",", ".")
    return written


def _starts(line: Sequence[_Token], at: int) -> bool:
    """Whether a value may start here: at a number, or at what stands before one."""
    for token in line[at : at + _DEEPEST]:
        if token.kind == "number" or token.text in (r"\frac", r"\sqrt"):
            return True
        if token.text not in ("-", "+", "±") and token.text not in _OPEN:
            return False
    return False


def _after_remark(line: Sequence[_Token], at: int) -> int:
    """Behind a remark in parentheses, as in `2 m (200 cm)`."""
    if at < len(line) and line[at].text == "(" and not line[at].glued:
        end = _closing(line, at)
        return at if end is None else end + 1
    return at


def _closing(line: Sequence[_Token], at: int) -> int | None:
    depth = 0
    for end in range(at, len(line)):
        depth += (line[end].text in _OPEN) - (line[end].text in _CLOSE)
        if depth == 0:
            return end
    return None


def _split(line: Sequence[_Token], marks: frozenset[str]) -> list[list[_Token]]:
    """The pieces between marks that stand in no bracket."""
    found: list[list[_Token]] = [[]]
    depth = 0
    for token in line:
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        if depth == 0 and token.text.lower() in marks:
            found.append([])
        else:
            found[-1].append(token)
    return found


def _has_number(line: Iterable[_Token]) -> bool:
    return any(token.kind == "number" or token.text in (r"\frac", r"\sqrt") for token in line)


def _phrase(line: Sequence[_Token]) -> list[_Token]:
    """The tokens before the next mark or conjunction."""
    found: list[_Token] = []
    for token in line:
        if (token.kind == "mark" and token.text in _HARMLESS) or token.text.lower() in _JOINS:
            break
        if token.kind == "number" or token.text.lower() in _CLAUSES:
            break
        found.append(token)
    return found


def _before(line: Sequence[_Token], at: int) -> list[_Token]:
    """The words and symbols of the same phrase right before a value."""
    found: list[_Token] = []
    for token in reversed(line[max(0, at - 4) : at]):
        if token.text == "|" and found:
            break
        if token.kind == "number" or token.text.lower() in (*_JOINS, "is", "are", "was"):
            break
        if token.kind == "mark" and token.text in _HARMLESS - {"("}:
            break
        found.insert(0, token)
    return found


def _strange(line: Sequence[_Token]) -> bool:
    """Whether something here is no unit, no article, no punctuation: the value is not read."""
    words = [token.text.lower() for token in line]
    for at, token in enumerate(line):
        if token.kind == "mark":
            if token.text not in _HARMLESS and unicodedata.category(token.text) not in _DECORATION:
                return True
            if token.text == "|" and at + 1 < len(line) and line[at + 1].glued:
                return True
        elif token.kind == "word":
            behind = at > 0 and line[at - 1].kind == "number"
            if behind and token.glued and re.search(r"\d", token.text):
                return _POWERED_UNIT.fullmatch(token.text) is None
            if behind and "GREEK" in _name(token.text[0]):
                return True
            if words[at] in _CALCULATE or words[at : at + 2] in _PAIRS:
                return True
            if words[at : at + 2] == ["out", "of"]:
                between = behind and [t.kind for t in line[at + 2 : at + 3]] == ["number"]
                if not between:
                    return True
            if behind and _turned_behind(line, at):
                return True
            if words[at] in _BASES and (
                (at and words[at - 1] in ("in", "as")) or at + 1 == len(line)
            ):
                return True
            if words[at] in _SHARES and words[at + 1 : at + 2] == ["of"]:
                return True
    return False


_UNITS = "one two three four five six seven eight nine ten half".split()  # noqa: SIM905
_PAIRS = [
    *([word, "than"] for word in ("less", "more", "fewer")),
    ["is", "wrong"],
    ["gross", "of"],
    ["below", "zero"],
    *(["less", word] for word in _UNITS),
]
_POWERS = frozenset(
    """power powers nth second third fourth fifth sixth seventh eighth ninth tenth minus
    negative -""".split()  # noqa: SIM905
)
_ON_TOP = frozenset(
    """the a an price top cost bill total original regular list its their her
    his""".split()  # noqa: SIM905
)
_TOTALS = frozenset("sum product difference quotient average mean median gcd lcm ratio max".split())  # noqa: SIM905
_ON = frozenset("of off on above below over under".split())  # noqa: SIM905
_BASES = frozenset("binary ternary octal hex hexadecimal dezimal".split())  # noqa: SIM905
_MONTHS = frozenset(
    """january february march april may june july august september october november december
    jan feb mar apr jun jul aug sep sept oct nov dec januar februar märz mai juni juli oktober
    dezember janvier février mars avril juin juillet août septembre octobre novembre décembre enero
    febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre gennaio
    febbraio aprile maggio giugno luglio settembre ottobre dicembre janeiro fevereiro março maio
    junho julho setembro outubro novembro dezembro января февраля марта апреля мая июня июля
    августа сентября октября ноября декабря""".split()  # noqa: SIM905
)
# Right before a number: what is said is not that number.
_COMPARING = frozenset(
    """than over above below under beneath beyond past exceeding exceeds exceed except excluding
    besides unlike versus vs binary octal hex hexadecimal больше меньше более менее кроме über
    unter elfu laki mia dazeni""".split()  # noqa: SIM905
)
_COMPARING_PAIRS = frozenset(
    f"{first} {second}"
    for firsts, seconds in (
        ("anything everything all", "but"),
        ("square squares cube cubes reciprocal inverse negative opposite negation", "of"),
        ("multiple multiples power powers logarithm complement", "of"),
        ("different differs differ apart aside far away distinct", "from"),
        ("instead excess north south short shy upwards", "of"),
        ("unequal inferior superior", "to"),
        ("mehr weniger größer kleiner höher niedriger anders", "als"),
        ("más menos plus moins mais meno più", "de di que"),
        ("mayor menor grand petit grande pequeño maior", "que"),
        ("supérieur inférieur superior inferior", "à a"),
        ("meer minder groter kleiner", "dan"),
    )
    for first in firsts.split()
    for second in seconds.split()
)
_HAN_COMPARES = (
    *(
        "大于",
        "小于",
        "大於",
        "小於",
        "超过",
        "超過",
        "不到",
        "不足",
        "少于",
        "多于",
        "高于",
        "低于",
    ),
    *("不是", "不等于", "未满", "并非", "除了"),
)
_HAN_BOUNDS = (
    "个半",
    "個半",
    "半",
    "以上",
    "以下",
    "以内",
    "未満",
    "未满",
    "多",
    "余",
    "이상",
    "이하",
    "미만",
    "초과",
)
_SOFTENERS = frozenset(f"{_HEDGES_TEXT} the number value just nearly almost".split())
_DOUBTFUL_SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}


def _turned_before(line: Sequence[_Token], at: int) -> bool:
    """Whether what stands right before a number compares with it, or makes it a date or a name."""
    if at and line[at].text == "{" and line[at].glued and line[at - 1].kind == "command":
        # A bar over it, or what else is not evaluated.
        return True
    if at and line[at].glued and line[at - 1].kind == "word":
        # f(5), a_{5}
        named = line[at].text == "(" or (line[at].text == "{" and line[at - 1].text[-1] == "_")
        if named:
            return True
    words = [token.text.lower() for token in line[max(0, at - 4) : at]]
    if words and (_month(line[at - 1]) or words[-1].endswith(_HAN_COMPARES)):
        return True
    if (
        len(words) > 1
        and line[at - 2].kind == "number"
        and words[-1] in ("over", "by", "base", "r")
    ):
        return True
    if len(words) > 1 and words[-1] == "of" and line[at].kind == "number":
        # 5% of 200, 3/4 of 20, 2 thirds of 9.
        share = words[-2] == "%" or SCALES.get(words[-2], 1) < 1
        if share or (line[at - 2].kind == "number" and words[-3:-2] == ["/"]):
            return True
    if _shared(line, at):
        return True
    while words and words[-1] in _SOFTENERS and " ".join(words[-2:]) not in _COMPARING_PAIRS:
        words.pop()
    if not words:
        return False
    return words[-1] in _COMPARING or " ".join(words[-2:]) in _COMPARING_PAIRS


def _shared(line: Sequence[_Token], at: int) -> bool:
    """Whether a share of the number here is meant: 20% off the price of 18."""
    here = at - 1
    while here >= 0 and line[here].kind == "word" and at - here < 8:
        here -= 1
    if here < 0 or line[here].text != "%":
        return False
    words = [token.text.lower() for token in line[here + 1 : at]]
    while words and words[-1] in _ON_TOP:
        words.pop()
    return words[-1:] != [] and words[-1] in ("of", "off", "on", "above", "below")


def _turned_behind(line: Sequence[_Token], at: int) -> bool:
    """Whether the word right behind a number makes it a part of something else."""
    word, rest = line[at].text.lower(), line[at + 1 :]
    number = bool(rest) and rest[0].kind == "number"
    if word in ("over", "by", "base", "r") and number:
        return True
    if word == "base" and rest and rest[0].text.lower() in ("two", "eight", "ten", "sixteen"):
        return True
    if word in ("greater", "larger", "bigger", "smaller", "higher", "lower"):
        return bool(rest) and rest[0].text.lower() == "than"
    if re.fullmatch(r"r\d+", word) or word.startswith(_HAN_BOUNDS):
        return True
    if word in ("in", "st", "nd", "rd", "th", "of", "de") and rest and word != "in":
        rest = rest[1:] if rest[0].text.lower() in ("of", "de") else rest
        return bool(rest) and _month(rest[0])
    if word == "in" and rest and rest[0].text.lower() in ("base", "hundreds", *_LARGE):
        return True
    return _month(line[at])


def _rebases(remark: Sequence[_Token]) -> bool:
    words = {token.text.lower() for token in remark}
    factor = len(remark) > 1 and re.match(r"[x*/^]\d*$", remark[1].text) is not None
    return factor or bool(words & {*_BASES, *_REMARKS})


_LARGE = frozenset("thousands millions billions dozens".split())  # noqa: SIM905
_REMARKS = frozenset(
    """base hundreds thousands millions billions dozens wrong incorrect negative sorry oops actually
    rather meant correction edit corrected wait typo""".split()  # noqa: SIM905
)


def _month(token: _Token) -> bool:
    """A month's name: `may` and `march` only as names."""
    word = token.text.lower()
    if word in ("may", "march", "mar", "dec", "sep", "oct", "jan", "mars", "mai"):
        return token.text[:1].isupper() or word in ("mars", "mai")
    return word in _MONTHS


def _name(char: str) -> str:
    return "" if char.isascii() or char in "µμ" else unicodedata.name(char, "")


class _Item(NamedTuple):
    """One member of a list, with its unit; `others` are doubtful readings."""

    value: Value
    unit: str = ""
    others: tuple[Value, ...] = ()
    name: str = ""


class _Parser:
    """Recursive descent over tokens; `at` is the next one."""

    def __init__(self, line: Sequence[_Token], latex: bool, at: int = 0, depth: int = 0) -> None:
        self.line, self.latex, self.at, self.depth = list(line), latex, at, depth

    def whole(self) -> list[Reading]:
        """Everything: items with labels such as `x =`, and nothing else."""
        line = self._trimmed()
        if any(token.text.lower() in _CLAUSES for token in line) or _strange(line):
            raise _Unread
        if line[1:2] and line[1].text == "and" and [t.text for t in line[3:4]] == ["/"]:
            # Three and 1/2 is one number.
            del line[1]
        pieces = [piece for piece in _split(line, _JOINS) if piece]
        while pieces and not _has_number(pieces[0]):
            # `x, y = 3, 4`, but not `none of 42`.
            if any(token.kind == "word" and len(token.text) > 1 for token in pieces[0]):
                raise _Other
            pieces.pop(0)
        items = []
        for piece in pieces:
            parser = _Parser(_unlabelled(piece), self.latex)
            items.append(parser.item()._replace(name=_label(piece)))
            while parser.at < len(parser.line):
                if not (items[-1].unit in _COMPOUND and _starts(parser.line, parser.at)):
                    raise parser.stuck()
                items.append(parser.item())
        if not items:
            constant = [token.text for token in line] in (["e"], [r"\pi"])
            raise _Irrational if constant and self.latex else _Other
        if len(items) == len(pieces) > 1 and _chained(pieces, items):
            # 16 - 7 = 9, 9 * 2 = 18 are steps.
            steps = _combined(items, [])
            return [Reading(items[-1].value), *(Reading(r.value, "meaning") for r in steps)]
        return _combined(items, [token.text.lower() for token in line])

    def partial(self) -> list[Reading]:
        """A value that starts here; what comes behind it is left, unless it goes on."""
        before = self.line[self.at - 1].text if self.at else ""
        if before in _COMPARES or before in ("^", "_"):
            self._skip()
            raise _Other
        if before in ("*", "/", "+") or self._subtracted():
            self.at += 1
            raise _Unread
        first = self.at
        turned = _turned_before(self.line, first) or (before == "|" and self.line[first].glued)
        if turned or _strange(_before(self.line, first)):
            self._skip()
            raise _Unread
        items = [self.item()]
        while self._joined(items[-1].unit):
            mark = self.at
            while self.peek().lower() in _JOINS:
                self.at += 1
            following = self.item()
            alike = following.unit == items[-1].unit or not items[-1].unit
            compound = items[-1].unit in _COMPOUND and following.unit in _COMPOUND
            if self.peek() == "=" or not (alike or compound):
                self.at = mark
                break
            items.append(following)
        if len(items) > 1 and _totals(self.line, first):
            raise _Unread
        behind = self.line[self.at : self.at + 4]
        words = [token.text.lower() for token in behind]
        if words[:2] == ["to", "the"] and (
            words[2:3] and (behind[2].kind == "number" or words[2] in _POWERS)
        ):
            # 10 to the 3rd.
            self._skip()
            raise _Unread
        goes_on = self.peek() in ("+", "-") and self._kind(1) == "command"
        goes_on = goes_on or (self.peek() == "+" and self.line[self.at].glued)
        # 18 + tax.
        goes_on = goes_on or (self.peek() == "+" and self._kind(1) == "word")
        if self._rebased():
            self._skip()
            raise _Unread
        read = self.line[first : self.at + (self._kind() == "number")]
        if goes_on or _strange(read) or _strange(_phrase(behind)):
            self.at += 1
            raise _Unread
        if self.peek() in ("^", "*", "/", "_", "±", *_COMPARES) or self._kind() == "command":
            stuck = self.stuck()
            self.at += 1
            if self.peek() and self.peek() in _OPEN:
                self._skip()
            raise stuck
        words = [token.text.lower() for token in self.line[max(first - 1, 0) : self.at]]
        return _combined(items, words)

    def _skip(self) -> None:
        """Behind this token, or the brackets that it opens."""
        end = _closing(self.line, self.at) if self.peek() in _OPEN else None
        self.at = (self.at if end is None else end) + 1

    def _rebased(self) -> bool:
        """Whether a remark says that the number is not what it looks like: `101 (base 2)`."""
        end = _closing(self.line, self.at) if self.peek() == "(" else None
        return end is not None and _rebases(self.line[self.at : end])

    def _joined(self, unit: str) -> bool:
        at = self.at
        while at < len(self.line) and self.line[at].text.lower() in _JOINS:
            at += 1
        return (at > self.at or unit in _COMPOUND) and _starts(self.line, at)

    def _subtracted(self) -> bool:
        """Whether the sign here stands behind something: x - 5 is not -5."""
        if self.at == 0 or self.peek() not in ("+", "-"):
            return False
        before = self.line[self.at - 1]
        if before.kind == "word":
            return len(before.text) == 1 or self.line[self.at].glued
        return before.text in _CLOSE

    def _trimmed(self) -> list[_Token]:
        """Without the letter of a multiple choice, a closing remark and closing punctuation."""
        line = self.line[self.at :]
        texts = [token.text for token in line[:3]]
        if len(texts) == 3 and texts[0] == "(" and texts[1] in tuple("ABCDE") and texts[2] == ")":
            line = line[3:]
        elif len(line) > 2 and line[0].text in tuple("123456789") and texts[1] == ")":
            if line[2].kind == "number":
                line = line[2:]
        elif len(texts) > 2 and texts[0] in tuple("ABCDE") and texts[1] in (")", ".", ":"):
            line = line[2:]
        marks = ".,;:?" if self.latex else ".,;:!?"
        while line and line[-1].text in marks:
            if line[-1].text == "!" and len(line) == 2 and line[0].kind == "number":
                break
            line = line[:-1]
        for at, token in enumerate(line):
            goes_on = at and line[at - 1].text.lower() in (*_JOINS, "=", "≈", ":")
            if at and not goes_on and token.text == "(" and _closing(line, at) == len(line) - 1:
                word = any(t.kind == "word" and len(t.text) > 1 for t in line[:at])
                if not token.glued and (word or any(t.kind == "word" for t in line[at:])):
                    if _rebases(line[at:]):
                        raise _Unread
                    return line[:at]
        return line

    def peek(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.line[at].text if at < len(self.line) else ""

    def _kind(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.line[at].kind if at < len(self.line) else ""

    def _take(self, *texts: str) -> bool:
        if self.peek() in texts:
            self.at += 1
            return True
        return False

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise self.stuck()

    def stuck(self) -> Exception:
        """The right way to give up here: a variable and π are no rational numbers."""
        text = self.peek()
        variable = self._kind() == "word" and len(text) == 1 and text in _VARIABLES
        if text == r"\pi" or (self.latex and text == "e" and self.at + 1 == len(self.line)):
            return _Irrational()
        return _Other() if variable or text in _COMPARES else _Unread()

    def item(self) -> _Item:
        """A group in brackets, a range, a ratio or a quantity."""
        while self._kind() == "word" and self.peek().lower() in _HEDGES:
            if self._kind(1) not in ("number", "word", "command"):
                break
            self.at += 1
        if self._kind() == "word":
            # f(5) and C(5, 2) are not evaluated.
            raise _Unread if self.peek(1) == "(" and self.line[self.at + 1].glued else _Other
        if self.peek() and self.peek() in _OPEN:
            group = self._group()
            if group is not None:
                return group
        if self._take("±"):
            size = self._expression()
            return _Item(Several("list", (size, replace(size, value=-size.value))))
        if self._kind() == "number" and self._kind(2) == "number" and self.peek(1) == ":":
            return self._ratio()
        return self._chance() or self._range() or self._quantity()

    def _group(self) -> _Item | None:
        """`(3, 4)`, `[0, 1)`, `{1, 2}`; None for parentheses of an expression."""
        end = _closing(self.line, self.at)
        if end is None:
            raise _Unread
        inside = self.line[self.at + 1 : end]
        pieces = _split(inside, _JOINS)
        shape = self.peek() + self.line[end].text
        braces = self.peek() in "{⦃"
        if len(pieces) < 2 and not (braces and end + 1 == len(self.line)) and shape != "[]":
            return None
        if self.depth >= _DEEPEST:
            raise _Unread
        items = []
        for piece in pieces:
            parser = _Parser(_unlabelled(piece), self.latex, depth=self.depth + 1)
            items.append(parser.item().value)
            if parser.at < len(parser.line):
                raise parser.stuck()
        self.at = end + 1
        if len(items) == 1:
            return _Item(items[0])
        return _Item(Several("set" if braces else shape, tuple(items)))

    def _ratio(self) -> _Item:
        parts = [self._numeral()]
        while self.peek() == ":" and self._kind(1) == "number":
            self.at += 1
            parts.append(self._numeral())
        self._unit()
        others: tuple[Value, ...] = ()
        if len(parts) == 2 and parts[1].value:
            others = (Number(parts[0].value / parts[1].value),)
        return _Item(Several("ratio", tuple(parts)), others=others)

    def _chance(self) -> _Item | None:
        """`1 in 6` and `1 out of 6` are a sixth, or one of them."""
        words = [token.text.lower() for token in self.line[self.at + 1 : self.at + 3]]
        ahead = 3 if words == ["out", "of"] else 2 if words[:1] == ["in"] else 0
        if not ahead or self._kind() != "number" or self._kind(ahead) != "number":
            return None
        start = self.at
        part = self._numeral()
        self.at += ahead - 1
        whole = self._numeral()
        fits = 0 < part.value < whole.value and part.place is None and whole.place is None
        if not fits or (ahead == 2 and (self._kind() == "word" or whole.value > 1900)):
            self.at = start
            return None
        self._unit()
        return _Item(Number(part.value / whole.value), others=(part,))

    def _range(self) -> _Item | None:
        """`3-5`, `3 cm to 5 cm`; a hyphen may also be a minus."""
        start = self.at
        if self._kind() != "number":
            return None
        low = self._numeral()
        with suppress(_Other):
            self._unit()
        dash = self.peek().lower()
        if dash not in ("-", "–", "to") or self._kind(1) != "number":
            self.at = start
            return None
        self.at += 1
        high = self._numeral()
        if self.peek() in _OPERATORS or (dash == "-" and low.value >= high.value):
            self.at = start
            return None
        self._unit()
        difference = Number(low.value - high.value, _coarser(low, high))
        others: tuple[Value, ...] = (difference,) if dash == "-" else ()
        return _Item(Several("range", (low, high)), others=others)

    def _quantity(self) -> _Item:
        """A number with its percent sign, scale and unit."""
        others: list[Value] = []
        signed = (
            self.peek() == "-" and self._kind(1) == "number" and not self.line[self.at + 1].glued
        )
        five = self.line[self.at : self.at + 5]
        shape = [token.text if token.kind == "mark" else token.kind for token in five]
        if shape == ["number", "-", "number", "/", "number"] and five[1].glued:
            # 3-1/2 is three and a half in a recipe.
            others.append(_Parser([five[0], *five[2:]], latex=False)._expression())
        number = self._expression()
        ahead = int(self.peek() == "%")
        share = ahead or number.value.denominator != 1
        if share and self.peek(ahead) == "of" and self._kind(ahead + 1) == "number":
            # 5% of 200 is calculated further.
            raise _Unread
        if ahead and self.peek(ahead).lower() in _ON:
            following = self.line[self.at + ahead : self.at + ahead + 5]
            if self.peek(ahead).lower() != "of" and _has_number(following):
                # 20% off the 18 dollars.
                raise _Unread
        if self._take("%"):
            if self._kind() == "number":
                raise _Unread
            return _Item(replace(number, percent=True), "%")
        if self.peek() == "!" and not self.latex and self.at + 1 == len(self.line):
            self.at += 1
            if number.value.denominator == 1 and 0 <= number.value < 1000:
                product = Number(Fraction(factorial(int(number.value))))
                if number.value > 2 and self.at == 2:
                    return _Item(Several("other"), "", (number, product))
                others.append(product)
        while self._scale() is not None:
            others.append(number)
            number = _scaled(number, self._scale() or 1)
            self.at += 1
            if self._kind() == "number":
                # Two million 300 thousand.
                while self._kind() == "number" or self._scale() is not None:
                    self.at += 1
                raise _Unread
        if self.peek() in _DOUBTFUL_SCALES and self.peek(1) not in ("/", "*", "^"):
            # 5k is five thousand; 5 K may be kelvin, 5 M may be molar.
            scaled = _scaled(number, _DOUBTFUL_SCALES[self.peek()])
            clear = self.peek() == "k" and self.line[self.at].glued
            self.at += 1
            if not clear:
                return _Item(Several("other"), "", (number, scaled, *others))
            others.append(number)
            number = scaled
        unit = self._unit()
        if unit in ("cent", "cents"):
            others.append(_scaled(number, Fraction(1, 100)))
        if signed and unit and self.at - 2 >= 0:
            # A list item `- 5 apples`, or five less than none?
            others.append(replace(number, value=-number.value))
            return _Item(Several("other"), unit, (number, *others))
        return _Item(number, unit, tuple(others))

    def _scale(self) -> Fraction | None:
        """The factor of the word here: 5 million, 5 sixths, 1 sixth."""
        word = self.peek().lower()
        if self._kind() == "word" and self.at and self.line[self.at - 1].text == "1":
            word = word if word in SCALES or word in ("second", "quarter") else f"{word}s"
        return SCALES.get(word)

    def _unit(self) -> str:
        """Words behind a number, with exponents: `m/s^2`, `square feet`, `hours per week`."""
        words: list[str] = []
        while len(words) < 5:
            text, kind = self.peek(), self._kind()
            if kind == "word" and text.lower() not in _NO_UNIT:
                alone = self.peek(1) in (*_OPERATORS, "", "=", ".", ",")
                if len(text) == 1 and text in _VARIABLES and (self.line[self.at].glued or alone):
                    raise _Other
                words.append(text.lower())
                self.at += 1
                self._skip_exponent()
            elif text in _UNIT_MARKS and self._kind(1) == "word" and (words or self._hyphened()):
                self.at += 1
            else:
                break
        return words[0] if words else ""

    def _hyphened(self) -> bool:
        """`16-inch`, `16/day`."""
        return self.peek() == "/" or (self.peek() == "-" and self.line[self.at].glued)

    def _skip_exponent(self) -> None:
        if self.peek() == "^":
            braced = self.peek(1) == "{"
            at = self.at + 1 + braced
            at += at < len(self.line) and self.line[at].text in ("-", "+")
            if at < len(self.line) and self.line[at].kind == "number":
                self.at = at + 1 + braced

    def _expression(self) -> Number:
        total = self._term()
        while self.peek() in ("+", "-") and (_starts(self.line, self.at + 1) or self._variable(1)):
            sign = 1 if self.peek() == "+" else -1
            self.at += 1
            other = self._term()
            total = Number(total.value + sign * other.value, _coarser(total, other))
        return total

    def _variable(self, ahead: int) -> bool:
        text = self.peek(ahead)
        return self._kind(ahead) == "word" and len(text) == 1 and text in _VARIABLES

    def _term(self) -> Number:
        found = self._factor()
        while True:
            sign = self.peek()
            if sign in ("*", "/") and (_starts(self.line, self.at + 1) or self._variable(1)):
                self.at += 1
                other = self._factor()
            elif sign == r"\sqrt" or (sign == "(" and self.line[self.at].glued):
                other = self._factor()
            else:
                return found
            if sign == "/" and not other.value:
                raise _Unread
            found = _product(found, other, divide=sign == "/")

    def _factor(self) -> Number:
        sign = 1
        while self.peek() in ("-", "+"):
            sign = -sign if self.peek() == "-" else sign
            self.at += 1
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _Unread
        found = self._power()
        self.depth -= 1
        return replace(found, value=sign * found.value)

    def _power(self) -> Number:
        base = self._atom()
        if self.latex and self.peek() == "!" and base.value.denominator == 1:
            self.at += 1
            if not 0 <= base.value <= 1000:
                raise _Unread
            base = Number(Fraction(factorial(int(base.value))))
        if not self._take("^"):
            return base
        exponent = self._factor()
        size = max(base.value.numerator.bit_length(), base.value.denominator.bit_length())
        if exponent.value.denominator != 1:
            base, exponent = (
                _root(base, exponent.value.denominator),
                _scaled(exponent, exponent.value.denominator),
            )
        if size * abs(exponent.value) > _MOST_BITS or (not base.value and exponent.value < 0):
            raise _Unread
        raised = base.value ** int(exponent.value)
        return Number(raised, None if base.place is None else base.place)

    def _atom(self) -> Number:
        if self._kind() == "number":
            return self._mixed(self._numeral())
        if self._take("("):
            found = self._expression()
            self._need(")")
            return found
        if self._take("{"):
            found = self._expression()
            self._need("}")
            return found
        if self._take(r"\frac"):
            return self._fraction()
        if self._take(r"\sqrt"):
            inside = self._argument()
            above, below = isqrt(abs(inside.value.numerator)), isqrt(inside.value.denominator)
            if inside.value >= 0 and Fraction(above, below) ** 2 != inside.value:
                raise _Irrational
            if inside.value < 0:
                raise _Other
            return Number(Fraction(above, below))
        raise self.stuck()

    def _mixed(self, whole: Number) -> Number:
        """`3 1/2` and `3\\frac{1}{2}` are sums."""
        if whole.place is not None or whole.value.denominator != 1:
            return whole
        start = self.at
        self._take("and")
        if self._take(r"\frac"):
            part = self._fraction()
        elif self._kind() == "number" and self.peek(1) == "/" and self._kind(2) == "number":
            above = self._numeral()
            self.at += 1
            below = self._numeral()
            if not below.value or above.place is not None or below.place is not None:
                raise _Unread
            part = Number(above.value / below.value)
        else:
            self.at = start
            return whole
        if not 0 < part.value < 1:
            if self.line[start].text == "and":
                self.at = start
                return whole
            raise _Unread
        return Number(whole.value + part.value)

    def _fraction(self) -> Number:
        above = self._argument()
        below = self._argument()
        if not below.value:
            raise _Unread
        return _product(above, below, divide=True)

    def _argument(self) -> Number:
        """`{12}`, or one digit: `\\frac12` is a half."""
        if self._take("("):
            found = self._expression()
            self._need(")")
            return found
        if self._take("{"):
            found = self._expression()
            self._need("}")
            return found
        if self._kind() == "number" and self.peek().isdigit():
            token = self.line[self.at]
            if len(token.text) > 1:
                rest = token._replace(text=token.text[1:])
                self.line[self.at : self.at + 1] = [token._replace(text=token.text[0]), rest]
            return self._numeral()
        raise self.stuck()

    def _numeral(self) -> Number:
        written = self.peek()
        self.at += 1
        return _decoded(written)


def _root(number: Number, degree: int) -> Number:
    """The exact root of a rational number."""
    if number.value < 0:
        raise _Other
    parts = []
    for part in (number.value.numerator, number.value.denominator):
        if part.bit_length() > 1000 or degree > 100:
            raise _Unread
        low, high = 0, 1 << (part.bit_length() // degree + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**degree <= part else (low, middle - 1)
        if low**degree != part:
            raise _Irrational
        parts.append(low)
    return Number(Fraction(*parts))


def _unlabelled(line: list[_Token]) -> list[_Token]:
    """What stands behind the last `=` of an item, or before it, as in 7 = x."""
    if any(token.text in _COMPARES for token in line):
        raise _Other
    marks = ["=", "≈", "is"]
    if not any(
        [t.kind for t in line[at - 1 : at + 2]] == ["number", "mark", "number"]
        for at, token in enumerate(line)
        if at and token.text == ":"
    ):
        marks.append(":")
    pieces = [piece for piece in _split(line, frozenset(marks)) if _has_number(piece)]
    if any(_has_unknown(piece) for piece in pieces[:-1]):
        raise _Other
    return pieces[-1] if pieces else line


def _label(piece: Sequence[_Token]) -> str:
    """What an item is called: `x` of x = 3 and of 3 = x, `ann` of Ann: 3."""
    marks = frozenset(("=", "≈", "is", ":"))
    for side in _split(piece, marks):
        written = "".join(token.text for token in side if token.text not in ("{", "}", "$"))
        if side is not piece and re.fullmatch(r"[^\W\d]\w*", written):
            return written.lower() if len(written) > 1 else written
        if side and not _has_number(side) and side[-1].kind == "word":
            return side[-1].text.lower()
        if len(side) == len(piece):
            break
    return ""


def _totals(line: Sequence[_Token], at: int) -> bool:
    """Whether a total of the list that starts here is meant: the sum of 3 and 4."""
    words = [token.text.lower() for token in line[max(0, at - 4) : at]]
    while words and words[-1] in _SOFTENERS:
        words.pop()
    return words[-1:] == ["of"] and words[-2:-1] != [] and words[-2] in _TOTALS


def _chained(pieces: Sequence[Sequence[_Token]], items: Sequence[_Item]) -> bool:
    """Whether all are equations between numbers, and each calculates with the value before it."""
    known = None
    for piece, item in zip(pieces, items, strict=True):
        left = _split(piece, frozenset("="))[0]
        if len(left) == len(piece) or not _has_number(left):
            return False
        if known is not None and not any(
            token.kind == "number" and _same_numeral(token.text, known) for token in left
        ):
            return False
        known = item.value
    return True


def _same_numeral(written: str, value: Value) -> bool:
    with suppress(_Unread):
        return isinstance(value, Number) and _decoded(written).value == value.value
    return False


def _agreeing(items: Sequence[_Item], words: Sequence[str]) -> Number | None:
    """The value of `5/2 or 2.5`, the exact one if the other is rounded."""
    numbers = [item.value for item in items if isinstance(item.value, Number)]
    if "or" not in words or {"and", ",", ";", "&"} & {*words} or len(numbers) < len(items):
        return None
    first = min(numbers, key=lambda number: number.place or 0)
    for other in numbers:
        if other.percent != first.percent:
            return None
        if abs(other.value - first.value) > (other.place or 0) / 2:
            return None
    return first


def _has_unknown(line: Sequence[_Token]) -> bool:
    """Whether a side of an equation calculates with a variable: 2x + z, but not f(2) or x_1."""
    depth, letter, number = 0, False, False
    for at, token in enumerate(line):
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        if depth == 0 and token.kind == "number":
            number = number or at == 0 or line[at - 1].text != "_"
        letter = letter or (token.kind == "word" and len(token.text) == 1)
    return letter and number


def _decoded(written: str) -> Number:
    """A numeral with its separators.

    >>> _decoded("1.234,50").value, _decoded("12,34,567").value, _decoded("1.2e3").value
    (Fraction(2469, 2), Fraction(1234567, 1), Fraction(1200, 1))
    """
    mantissa, _, power = written.lower().partition("e")
    if len(mantissa) > 5000 or len(power) > 5 or abs(int(power or 0)) > 4000:
        raise _Unread
    digits = re.sub(r"(?<=\d)[\u00a0 '’_](?=\d{3}(?!\d))", "", mantissa)
    if _GROUPED.fullmatch(digits):
        digits = digits.replace(",", "")
    elif re.fullmatch(r"[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}", digits):
        digits = digits.replace(".", "").replace(",", ".")
    elif digits.count(",") == 1 and "." not in digits:
        digits = digits.replace(",", ".")
    if not re.fullmatch(r"\d*\.?\d+", digits):
        raise _Unread
    scale = Fraction(10) ** int(power or 0)
    _, dot, behind = digits.partition(".")
    place = Fraction(1, 10 ** len(behind)) * scale if dot else None
    return Number(Fraction(digits) * scale, place)


def _coarser(one: Number, other: Number) -> Fraction | None:
    places = [number.place for number in (one, other) if number.place is not None]
    return max(places, default=None)


def _scaled(number: Number, factor: Fraction | int) -> Number:
    place = None if number.place is None else number.place * factor
    return replace(number, value=number.value * factor, place=place)


def _product(one: Number, other: Number, *, divide: bool) -> Number:
    factor = 1 / other.value if divide else other.value
    place = None
    if one.place is not None or other.place is not None:
        near = one.place or Fraction(0)
        place = max(near * abs(factor), (other.place or Fraction(0)) * abs(one.value))
    return Number(one.value * factor, place or None)


def _combined(items: Sequence[_Item], words: Sequence[str]) -> list[Reading]:
    """The readings of items that stand side by side."""
    if len(items) == 1:
        (item,) = items
        return [Reading(item.value), *(Reading(other, "meaning") for other in item.others)]
    families = [_COMPOUND.get(item.unit) for item in items]
    kinds = {family[0] for family in families if family is not None}
    numbers = [item.value for item in items if isinstance(item.value, Number)]
    if None not in families and len(kinds) == 1 and len(numbers) == len(items):
        sizes = [family[1] for family in families if family is not None]
        total = sum((n.value * size for n, size in zip(numbers, sizes, strict=True)), Fraction(0))
        if kinds == {"money"}:
            return [Reading(Number(total / 100))]
        parts = Several("other", tuple(numbers))
        return [Reading(parts), *(Reading(Number(total / size), "meaning") for size in sizes)]
    together = tuple(item.value for item in items)
    same = _agreeing(items, words)
    if same is not None:
        return [Reading(same), Reading(Several("list", together), "meaning")]
    if "between" in words and len(together) == 2:
        return [Reading(Several("range", together))]
    flat: list[Value] = []
    for value in together:
        flat += value.items if isinstance(value, Several) and value.shape == "list" else (value,)
    names = tuple(item.name for item in items)
    if not any(names):
        names = tuple(item.unit for item in items)
    if len({*names}) < len(flat) or not all(names) or len(flat) > len(together):
        names = ()
    return [Reading(Several("list", tuple(flat), names))]
