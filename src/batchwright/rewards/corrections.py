# ruff: noqa: RUF001
"""What a text says instead of an answer that it gave before: corrections, checks, restatements."""

import re
from typing import NamedTuple

from batchwright.rewards.claims import taken_back
from batchwright.rewards.notation import in_digits

__all__ = ["Revision", "revision"]

# Words that begin a correction, at the start of a clause or right behind a number.
_CLAUSE = (
    r"(?:[.,;:!?…()\[\]\n—–→>-]|(?:^|(?<=[\d.…]))[ ]|\b(?:or|and|but|so|oh|ah|well|then|no|hmm+)\b)"
    r"[\s\"'*_`(]{0,8}"
)
_WITHDRAWS = re.compile(
    rf"""(?ix)
    \b(?:w?oops+|sorry|apolog(?:y|ies|i[sz]e)|I[ ]meant?
        |scratch[ ]that|strike[ ]that|correction
        |my[ ](?:bad|mistake|error)|on[ ]second[ ]thoughts?|I[ ](?:forgot|misread|miscounted
        |miscalculated|overlooked|missed|mistyped)|typo|off[ ]by
        |never[ ]?mind|kidding|disregard|retract\w*
        |correct(?:ing)?[ ](?:my|that|this|it)(?:self)?
        |should[ ](?:have[ ](?:been|said|written)|read)
        |(?:it|that|this|which|answer|result|total)[ ](?:should|ought[ ]to)[ ]
         (?:actually[ ]|really[ ])?be(?![ ](?:noted|mentioned|clear|obvious|easy)\b)|or[ ]rather
        |make[ ](?:that|it)(?=[ ][-$]{{0,2}}\d[\d.,]{{0,30}}(?:\W|$)(?![*/+=]))
        |perdón|perdona|désolée?|pardon|entschuldigung|verzeihung|scusa|desculpe?|извините|простите)\b
    | {_CLAUSE} (?:(?:edit(?:ed)?|updated?|corrected|revised|amended|fixed|errata|erratum)\b\s*
        (?=[:：,—–-]|\s(?:to|it|answer)\b)|rather(?!\s+than)\b|korrektur|更正|抱歉|订正|訂正|정정)
    | 应该是|應該是|应为|應為"""
)
_CHECKS = re.compile(
    rf"""(?ix)
    {_CLAUSE} (?: (?:actually|wait|hold[ ]on|hang[ ]on|hmm+|nope|nah|one[ ]moment|but[ ]wait
            |in[ ]fact|maybe|perhaps|possibly|alternatively|on[ ]reflection
            |to[ ]be[ ](?:precise|exact|correct)|moment|warte|halt|espera|attends|aspetta|wacht
            |стоп|подожд\w+|eigentlich|en[ ]fait|en[ ]realidad|in[ ]realtà|na[ ]verdade|doch)\b
        | (?<!,[ ])no(?=\s+-?\$?\d) | (?<=[.!?][ ])or\b
        | (?:no|nein|non|não|nee|nej|nie|ne|нет|ні|hayır|nem)\b
            (?=\s*[,.!:;…—–-]|\s+(?:it|that|the|wait|but|actually|es|c['’]est)\b)
        | 等等|等一下|不对|不對|不，|不,|其实|實際上|いや|待って|違う|아니|잠깐)
    | \blet(?:['’]s|[ ](?:me|us))[ ](?:just[ ]|quickly[ ]|now[ ])?
        (?:double|re-?\w|check|verify|think|see)
    | \b(?:look(?:ing|ed)?|try|trying)[ ](?:(?:it|this|that)[ ])?(?:again|back|closer)\b
    | \b(?:re-?check|re-?calculat|re-?consider|double[- ]check|re-?examin|re-?comput|re-?think)\w*
    | \n\s{{0,9}}(?=[-$]{{0,2}}\d[\d.,]{{0,30}}\W{{0,9}}\Z)"""
)
_STATES = re.compile(
    r"""(?ix)
    (?: \b(?:(?:it|that|this|(?:the|my)[ ](?:\w+[ ])?(?:answer|value|result|total|number
            |sum|amount)|mine|the[ ](?:right|correct|real|true)[ ]one)
          (?:['’]s|[ ](?:is|was|equals|(?:should|must|could|might|may)[ ](?:also[ ])?be))
          (?:[ ]\w+ly)?
        |so|or|now|(?:I|we)[ ](?:now[ ])?(?:see|get|got|find|found)|instead
        |(?:could|might)[ ](?:also[ ])?be|is[ ]it|really|rather)[\s:,]
      | [.!?…—–]\s | (?<=[^\W\d]),\s )
    [\s*_`$(]{0,9} [-−]?\$?\d[\d.,]{0,30}+ %?
    (?:[ ](?:really|actually|instead|then|now)\b)? [*_`"')\]$]{0,5}
    (?: (?<=[.!?…])(?=\s|$) | [.!?…]+(?=\s|$) | \s*$ | \n )"""
)
_OPPOSES = re.compile(r"(?i)\b(?:but|however|instead|yet|in\s+fact|in\s+reality|really)\b")
_FILLER = (
    r"(?:actually|oops|sorry|wait|no|nope|hmm+|oh|ah|well|so|then|but|or[ ]rather|and|rather"
    r"|instead|in|fact|edit|update|correction|corrected|revised|hold|hang|on|my|bad|mistake|typo"
    r"|really|reality|however|i|mean|meant|to|say|make|it|that|this|the|a|correct|right|real|final|true|new|answer|result"
    r"|total|value|number|s|is|was|are|be|been|being|have|has|had|should|would|must|equals|got|get"
    r"|gives|not|quite|exactly|equal|second|thoughts?)"
)
_CLEAR = re.compile(
    rf"(?i)(?:[^\w$+−.-]|[.-](?!\d)|{_FILLER}(?![^\W_]))*+"
    r"([-−]?\$?[-−]?\d(?:[\d.,/]*\d)?\s?%?)"
    r"(?=[*_`\"')\]$]*(?:[.!;)]+(?:\s|$)|\s*$|\n))"
)


class Revision(NamedTuple):
    """What a text says instead of the claim that it stands behind."""

    text: str
    """What stands behind the word that begins the correction; if `clear`, its value only."""
    clear: bool
    """It says nothing but one other value."""
    withdrawn: bool
    """It is no mere check or restatement, which may confirm the claim."""


def revision(text: str, *, denied: bool) -> Revision | None:
    """The correction in a text that stands behind the number of a claim; `denied` is the claim.

    >>> revision(". Oops, 20.", denied=False), revision(" eggs. She has 3 left.", denied=False)
    (Revision(text='20', clear=True, withdrawn=True), None)
    """
    found = [_WITHDRAWS.search(text), _CHECKS.search(text)]
    if denied:
        found.append(_OPPOSES.search(text))
    starts = [match.start() for match in found if match is not None]
    stated = _STATES.search(text)
    if not starts:
        return None if stated is None else Revision(text[stated.start() :], False, False)
    if stated is not None:
        starts.append(stated.start())
    tail = text[min(starts) :]
    spelled = not re.search(r"\d", tail)
    if spelled:
        tail = in_digits(tail[:400])
    clear = _CLEAR.match(tail[:400])
    if clear is not None and not re.search(r"\d", tail[clear.end() :]):
        negated = re.search(r"(?i)\bnot\b|n['’]t\b", clear[0]) or taken_back(tail[clear.end() :])
        if not negated:
            return Revision(clear[1], True, True)
    return None if spelled else Revision(tail, False, found[0] is not None)
