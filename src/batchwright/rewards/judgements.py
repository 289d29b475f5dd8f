# ruff: noqa: RUF001
"""The score that a judge wrote: the labelled one, and none if several are, or if it is denied."""

import json
import re
from typing import Any

from batchwright.rewards.corrections import revision

__all__ = ["written_score"]

_NAMES = frozenset(("score", "rating", "grade"))
_NUMBER = r"(-?\d++(?:\.\d++)?+) (?:\s*(?:/|out\s+of)\s*(\d++(?:\.\d++)?+))?+"
_LABEL = re.compile(
    r"""(?ix) (?: (?:\b(?:score|rating|grade)\b|评分|得分|评级|分数) ["']?
          (?:\s*\([^()\n]{0,60}\))?+ \s* (?: \bis\b \s*:? | [:：=|→] | [-–—](?=\s) )
        | <(?:score|rating)> )
    \s* ["'\[(<$]* (?=-?\d)
    | ^[\s*#>|-]{0,9}(?:final|overall|total)(?:\s+(?:verdict|result))?\s*[:：=|]\s*["'\[(<$]*
      (?=-?\d[\d.]{0,9}(?:\s*(?:/|out\s+of)\s*\d[\d.]{0,9})?\W{0,9}$)""",
    re.MULTILINE,
)
_SCORE = re.compile(
    rf"(?ix) {_NUMBER} (?!\s*[-–]\s*\d|\s+(?:to|or)\s+\d|[A-Za-z_/]|\s*\\?%|,\d)"
    r"(?!(?![分点점])\w)"
)
_UNREAD_FINAL = re.compile(
    r"(?i)\b(?:final|overall|total)\s+(?:score|rating|grade)\s*[:=]\s*+(?![\"'\[(<$]*+-?\d)"
)
_FRACTION = re.compile(r"(?i)\d\s*(?:/|out\s+of)\s*\d")
_RATED = re.compile(
    r"(?i)\b(?:rat(?:e|ed|ing)|giv(?:e|en|ing)|gave|assign|award|deserves?|earns|verdict)\b"
    r"[^.\n]{0,60}?(?<![\d.])(\d+(?:\.\d+)?)\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?)(?![\w/]|\.\d)"
)
_BARE_SCORE = re.compile(
    r"\[*(-?\d+(?:\.\d+)?)\]*(?:\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?))?\.?", re.IGNORECASE
)
_FINAL = re.compile(r"(?i)\b(?:final|overall|total)\b|最终|总|最後|综合")
# Before `score` it is still the score; with any other word it is another one, as `max score`.
_PLAIN_WORDS = frozenset(
    """the a an my your this its their his her our final overall total aggregate combined resulting
    assigned given numeric numerical quality evaluation grading assessment judgement judgment judge
    answer response so thus therefore hence and then i we is be would give gives award awards assign
    assigns with of to has have gets get deserves earns receives say says end here now ok okay well
    wait no reconsidering actually correction but revised corrected new updated it that conclusion
    in summary verdict as for result results output""".split()  # noqa: SIM905
)
_PLAIN_HAN = re.compile(r"最终|最後|总|综合|我|你|的|该|此|这|回答|答案|给|出|为|是|评|，|：")
_ANOTHER = re.compile(
    r"(?i)\b(?:max|maximum|min|minimum|highest|lowest|best|possible|previous|prior|passing|target)\b"
)
_DOUBTED = re.compile(
    r"""(?ix)\b(?:not|no(?!\s*[,.:!;—-])|never|cannot|nor|without|almost|nearly|if|unless|whether
        |were|had|could|might|instead[ ]of|rather[ ]than|avoid|refuse
        |would(?![ ](?:give|rate|say|assign|award)))\b
    | n['’]t\b"""
)
_CONDITION = re.compile(
    r"(?i)(?:^|[.!?:;,\n]\s*)(?:note:?\s*)?(?:had|were|should|if|unless)\s+"
    r"(?:it|the|this|they|he|she|you)\b"
)
_QUESTIONED = re.compile(
    r"[ \t]*[\])}\"'>]*[ \t]*"
    r"(?:\?|\((?:the[ ])?(?:max|maximum|highest|perfect|possible|example)\b[^()\d]{0,30}\))",
    re.IGNORECASE,
)
_REVISED = re.compile(
    r"(?i)\b(?:no(?=\s*[,.:;!—-]|\s+wait)|wait|actually|reconsider\w*|correction|corrected|revised|oops"
    r"|sorry|on[ ]reflection|second[ ]thoughts?|updated?|edit)\b"
)
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~|<(del|s|strike)>[^<>\n]{0,200}</\1>")
_BOXED = re.compile(r"\$?\\boxed\s?\{\s*([^{}\s]{1,30})\s*\}\$?")
_MOST_OBJECTS = 50


class _Unclear(Exception):
    """Several scores, or one that is no number."""


def written_score(text: str) -> tuple[str | None, float | None]:
    """The final score of a reply, else its labelled one, or its only number; and the scale.

    Of several labelled scores the last counts, if the text between them takes the others back.
    A maximum, a previous score or one of a criterion is another score.

    >>> written_score("**Score:** 7"), written_score("7/10"), written_score('{"score": 7}')
    (('7', None), ('7', 10.0), ('7', None))
    >>> written_score("Max score: 10"), written_score("Score: 7\\nScore: 9")
    ((None, None), (None, None))
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        # The reasoning was never closed: nothing was judged yet.
        return None, None
    try:
        named, rest = _from_json(text)
    except _Unclear:
        return None, None
    bare = re.sub(r"[*_`]+", "", _STRUCK.sub(" ", _BOXED.sub(r" \1 ", rest)))
    bare = re.sub(r"(?i)\b(max|min|prev|avg)\.(?=\s)", r"\1", bare).strip()
    try:
        match = _labelled(bare)
    except _Unclear:
        return None, None
    if named is not None:
        found = _BARE_SCORE.fullmatch(named.strip())
        differs = match is not None and found is not None and match[1] != found[1]
        match = None if differs else found
    elif match is None and not _LABEL.search(bare) and not _UNREAD_FINAL.search(bare):
        match = _unlabelled(bare)
    if match is None:
        return None, None
    return match[1], float(match[2]) if match[2] else None


def _from_json(text: str) -> tuple[str | None, str]:
    """The score in the JSON objects of a reply, and the text without them."""
    decoder = json.JSONDecoder(object_pairs_hook=list)
    scores, rest, at = [], [], 0
    for _ in range(_MOST_OBJECTS):
        start = text.find("{", at)
        if start < 0:
            break
        try:
            found, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            rest.append(text[at : start + 1])
            at = start + 1
            continue
        inside = _scores(found)
        scores += inside
        rest.append(text[at : start if inside else end])
        at = end
    rest.append(text[at:])
    if any(isinstance(value, bool) or not isinstance(value, str | int | float) for value in scores):
        raise _Unclear
    written = {str(value) for value in scores}
    if len(written) > 1:
        raise _Unclear
    return (written.pop() if written else None), "".join(rest)


def _scores(pairs: list[Any]) -> list[Any]:
    """The scores of an object: its own, else those of the objects in it."""
    own = [value for key, value in pairs if key.lower() in _NAMES]
    if own:
        return own
    found: list[Any] = []
    for _, value in pairs:
        if isinstance(value, list) and value and all(isinstance(x, tuple) for x in value):
            found += _scores(value)
    return found


def _labelled(text: str) -> re.Match[str] | None:
    """The score behind its label; _Unclear if several differ, or if it is denied or no number."""
    if _UNREAD_FINAL.search(text):
        raise _Unclear
    plain: list[tuple[bool, int, re.Match[str] | None]] = []
    doubted = ""
    for label in _LABEL.finditer(text):
        before = text[max(0, label.start() - 200) : label.start()]
        kind = _kind(before, label[0])
        if kind == "other":
            continue
        score = _SCORE.match(text, label.end())
        end = label.end() if score is None else score.end()
        if kind == "doubted" or _QUESTIONED.match(text, end):
            doubted = score[1] if score is not None else "nan"
            continue
        doubted = ""
        plain.append((kind == "final", label.start(), score))
    finals = [one for one in plain if one[0]]
    chosen = finals or plain
    if not chosen:
        if doubted:
            raise _Unclear
        return None
    last = chosen[-1][2]
    if last is None:
        raise _Unclear
    values = [score[1] if score is not None else "" for _, _, score in chosen]
    if any(float(value or "nan") != float(last[1]) for value in values):
        # Only a later one that replaces the others counts.
        between = text[chosen[-2][1] : chosen[-1][1]]
        if finals or not _REVISED.search(between):
            raise _Unclear
    if doubted and not finals and float(doubted) != float(last[1]):
        raise _Unclear
    behind = text[last.end() : last.end() + 400]
    later = revision(behind, denied=False)
    if later is not None:
        raise _Unclear
    return last


def _kind(before: str, label: str) -> str:
    """What a label is of: `final`, `score`, `other`, or `doubted` if the text denies it."""
    if label.startswith("<"):
        return "score"
    if _ANOTHER.search(label):
        return "other"
    if re.match(r"[\s*#>|-]*(?:final|overall|total)", label, re.IGNORECASE):
        return "final"
    phrase = re.split(r"[.!?;:,|/(\[\n—–]|\s-\s|[。！？；：，、]", before)[-1]
    sentence = re.split(r"[.!?\n。]", before)[-1]
    if _CONDITION.search(sentence):
        return "doubted"
    han = re.search(r"[\u3400-\u9fff]+$", phrase)
    if han is not None and _PLAIN_HAN.sub("", han[0]):
        return "other"
    words = re.findall(r"[^\W\d_]+(?:['’]\w+)?", re.sub(r"[\u3400-\u9fff]+", "", phrase.lower()))
    if _DOUBTED.search(phrase):
        return "doubted"
    if any(word not in _PLAIN_WORDS and not re.search("['’]", word) for word in words[-3:]):
        return "other"
    return "final" if _FINAL.search(phrase) else "score"


def _unlabelled(text: str) -> re.Match[str] | None:
    """A last line that is a number, or the only fraction of a text that rates."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [match for line in lines if (match := _BARE_SCORE.fullmatch(line)) is not None]
    if lines and found and _BARE_SCORE.fullmatch(lines[-1]):
        return found[-1] if len({float(match[1]) for match in found}) == 1 else None
    if len(_FRACTION.findall(text)) != 1:
        return None
    rated = _RATED.search(text)
    if rated is None:
        return None
    phrase = re.split(r"[.!?;:,\n]", text[: rated.start()])[-1] + rated[0]
    behind = text[rated.end() : rated.end() + 400]
    conditional = re.match(r"\s*(?:if|had|unless|\?)", behind)
    if _DOUBTED.search(phrase) or conditional or revision(behind, denied=False) is not None:
        return None
    return rated
