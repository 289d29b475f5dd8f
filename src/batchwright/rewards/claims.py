# ruff: noqa: RUF001
"""What stands around a number and changes what is claimed: denials, signs, factors."""

import re
from typing import NamedTuple

__all__ = ["Around", "around", "denied_before", "marked", "taken_back"]

_DENY = (
    r"(?:not|never|nor|neither|hardly|scarcely|no[ ]longer|nowhere[ ]near|nicht|niemals|kein\w{0,2}"
    r"|pas|jamais|não|nunca|non|niet|nooit|ikke|inte|nie|не|ни|no[ ](?:es|son|era|sea|puede[ ]ser))"
)
_WRONG = (
    r"(?:wrong|incorrect|false|untrue|mistaken|falsch|incorrecta?|erróne[ao]|faux|fausse|errad[ao]"
    r"|sbagliat[ao]|неверно|неправильно|an?[ ](?:\w+[ ])?(?:mistake|error|miscalculation)"
    r"|not[ ](?:\w+[ ])?(?:right|correct|true|possible|valid|it|the[ ](?:\w+[ ])?answer))"
)
_RULED_OUT = rf"(?:{_WRONG}|impossible|absurd|invalid|too[ ]\w+|ruled[ ]out|excluded|rejected)"
_ADVERB = (
    r"(?:(?:also|clearly|actually|definitely|obviously|still|probably|certainly|just|simply|plainly"
    r"|completely|totally|quite|likely)[ ])?"
)
_IS = r"(?:is|was|are|were|seems|looks|must[ ]be|would[ ]be|ist|war|est|était|es|era|é)"
_BREAK = r"(?:so|but|then|therefore|hence|thus|because|since|while|instead|leaving|which)"
_NUMERAL = r"(?:\d|\.\d|\\frac|\\sqrt)"
# A contracted `not` as a word.
_CONTRACTED = re.compile(
    r"(?i)\b(is|are|was|were|do|does|did|ca|could|would|should|wo|must|has|have|had)n['’]?t\b"
)
_CANNOT = re.compile(r"(?i)\bcannot\b")
_NOT = re.compile(
    rf"(?i)\bnot\s+(?:[-+(]|\\?\$)*{_NUMERAL}\S*(?:\s*,)?(?:\s+but(?:\s+rather)?)?"
    rf"|,\s*(?:no|pas|nicht|não|non|niet|ikke|inte|не)\s+-?{_NUMERAL}\S*"
    r"|,\s*而?不是\s*-?\d[^\s,。]*"
)
_OPINION = r"(?:think|say|guess|expect|believe|assume|claim|suspect)"
_DENIED = re.compile(
    rf"(?i)\b(?:{_DENY}|refuse[sd]?|unlikely|(?:used|thought|believed|supposed)[ ]to[ ]be)\b"
    rf"(?!\s+(?:only|hard|difficult|surpris\w*)\b)"
    rf"((?:\s+(?!{_BREAK}\b|and\b)[^\W\d][\w'’]*){{0,6}}?[\s(+=-]*)(?={_NUMERAL})"
)
_LISTED = re.compile(rf"(∎\d[\d.,/]*\s+n?or\s+[-(]*)(?={_NUMERAL})")
_DENIED_HAN = re.compile(r"((?:不是|不等于|不等於|并非|並非|不会是|不可能是|不為|不为)\s*-?)(?=\d)")
_WRONG_BEHIND = re.compile(
    rf"(?i)(?<![\w.,])(?=\d[\d.,/]*(?:\s+(?!{_BREAK}\b|it\b|and\b|if\b)[^\W\d]+){{0,2}}?"
    rf"\W{{0,3}}\s+{_IS}\s+{_ADVERB}{_RULED_OUT}\b"
    r"|\d+\s*(?:ではな|ではあり|じゃな|が?\s*아니|가\s*아니|이\s*아니|가\s*아닙|이\s*아닙))"
)
_BEFORE = re.compile(
    rf"""(?ix)
    (?: \b(?:{_DENY}(?!\s+(?:only|hard|difficult|surpris\w*)\b)|doubt|doubts|deny|denies|disagree
             |nobody|none|if|unless|whether|suppose|imagine|pretend|no[ ]way|no[ ]reason|refuse
             |mistakenly|wrongly|incorrectly|falsely|unlikely|myth|misconception|fallacy|mistake
             |thought|tempt\w*|(?:might|may|could|would|people|many|some|others)[ ]{_OPINION}
             |maybe|perhaps|possibly|vielleicht|peut-être|quizás?|tal[ ]vez|forse|talvez
             |(?:previously|formerly|originally|initially|at[ ]first)[ ]I[ ]\w+
             |I[ ](?:previously|formerly|originally|initially|first)[ ]\w+)\b
      | \b{_WRONG} (?=\s+(?:that|to)\b) )
    (?: \s+ (?!{_BREAK}\b) [^\W\d][\w'’]* ){{0,7}} [\s"'*_`$({{\[]* $
    | \b(?:wrong|incorrect|false|mistaken|erroneous|previous|earlier|initial|naive|tempting)\s*$"""
)
_COMPARED = re.compile(
    r"""(?ix)
    (?: \b(?:than|over|above|below|under|beyond|exceeding|exceeds|except|excluding|besides
           |instead[ ]of|(?:anything|everything|all)[ ]but|(?:different|apart|differs|far)[ ]from
           |unequal[ ]to
           |größer[ ]als|kleiner[ ]als|mehr[ ]als|weniger[ ]als|más[ ]de|menos[ ]de|plus[ ]de
           |moins[ ]de)
        (?:\s+(?:about|exactly|the|number|value|just|only)){0,2}
      | 大于|小于|大於|小於|超过|超過|不到|不足|少于|多于|高于|低于|不是|不等于
      | [≤≥≠] | (?<![-=\w"/])[<>] | \\(?:le|ge|leq|geq|lt|gt|neq?)(?![a-z]) )
    [\s"'*_`$({\[]* $"""
)
_TAKEN_BACK = re.compile(
    rf"""(?ix)
    (?<!if[ ])\b(?:that|this|it|which|the[ ]above|my[ ](?:\w+[ ])?(?:answer|result|guess))
        (?:['’]s|\s+{_IS}
          |\s+(?:can[ ]?not|can['’]t|does(?:[ ]not|n['’]t))(?:[ ](?:be|look|seem))?) \s+
        {_ADVERB} (?:{_WRONG}|impossible|absurd|(?<=be[ ])(?:right|correct|true)
                   |(?<=look[ ])right|(?<=seem[ ])right)
        (?=\s*(?:[.,;:!…)*—]|$|\n)|\s+(?:because|since|as|again|too)\b)
    | \b(?:scratch|strike|ignore|disregard)[ ](?:that|this|the[ ]above)\b
    | \bI[ ](?:made|see)[ ](?:a|an|my)[ ](?:\w+[ ])?(?:mistake|error)\b
    | \b(?:no,?[ ]wait|wait,?[ ]no|I[ ]meant?|correction:?)\b
    | \b(?:my[ ]mistake|my[ ]bad|I[ ]was[ ]wrong|I[ ]take[ ](?:that|it)[ ]back|w?oops+)\b
    | \(not!?\) | (?<=[\s.(…])not!
    | \bbut[ ](?:it|that|this|[a-z])[ ](?:is|was|does|can)(?:[ ]not|n['’]t)\s*(?:[.,;!]|$)
    | (?:这|那|這)?(?:是错的|不对|不對|是錯的|不正确|不正確)
    | \b(?:c['’]est|das[ ]ist|eso[ ]es|isso[ ]é)[ ](?:faux|falsch|incorrecto|errado|erróneo)\b"""
)
_REFUTED = re.compile(
    rf"""(?ix) [\s"'*_`$)}}\]]* (?:
    \s {_IS} \s+ {_ADVERB} {_RULED_OUT} \b |
    \? [\s"'*_`$)]* (?:no|nope|wrong|not|incorrect|false|nein|non)\b
    | [.!…]+ \s* (?:(?:wait|hmm+|oh|oops|ah|well|actually|sorry)[\s,.!…—-]+){{0,3}}
        (?:no (?=\s*[,.!…—]|\s+wait) | nope\b | (?:wrong|incorrect|false) (?=\s*[,.!…—]|\s*$)
         | not[ ](?:quite|really|right|correct)\b )
    | \s*[,—–-]\s* (?:no[ ]wait|wait,?[ ]no|which[ ]is[ ](?:wrong|incorrect|impossible))\b )"""
)


def marked(text: str) -> str:
    """A plain sentence in which every number that it denies stands behind ∎: it is not read.

    >>> marked("It can't be 5, not 6 but 7"), marked("My first guess, 5, was wrong.")
    ('It ca not be ∎5,   7', 'My first guess, ∎5, was wrong.')
    """
    text = _CANNOT.sub("can not", _CONTRACTED.sub(r"\1 not", text))
    text = _NOT.sub(" ", text)
    text = _DENIED.sub(lambda match: f"{match[0]}∎", text)
    text = _DENIED_HAN.sub(r"\1∎", text)
    text = _WRONG_BEHIND.sub("∎", text)
    return _LISTED.sub(r"\1∎", text)


def denied_before(text: str) -> bool:
    """Whether a text denies, supposes or compares what comes right behind it.

    >>> [denied_before(text) for text in ("I don't think the ", "3 is not it, so the ", "over ")]
    [True, False, True]
    """
    text = re.split(r"[.!?;:,\n]\s", text[-200:])[-1]
    text = _CANNOT.sub("can not", _CONTRACTED.sub(r"\1 not", text))
    return _BEFORE.search(text) is not None or _COMPARED.search(text) is not None


def taken_back(text: str) -> bool:
    """Whether a text takes back the claim that it stands right behind.

    >>> taken_back("? No."), taken_back(". Wait, that's wrong."), taken_back(". 6 is wrong.")
    (True, True, False)
    """
    return _REFUTED.match(text) is not None or _TAKEN_BACK.search(text) is not None


class Around(NamedTuple):
    """What stands around a box or formula and belongs to its value."""

    before: str = ""
    behind: str = ""
    part: bool = False
    """It is an operand of something larger, which is not evaluated."""
    cut: bool = False
    """Digits or a list go on behind it."""


_SKIP = r"(?:[\s$~]|\\[,;:! )\]]|\*\*)*+"
_SIGN = re.compile(
    r"(?i)(-|−|\\pm|±|\b(?:minus|negative)(?=[\s$({\[]))(\s*)(?:\\?[$({\[]|\\left|\*\*)*$"
)
_SIGN_WORDS_AFTER = re.compile(
    r"(?i)(?:^|[=:.,;!?)$]|\b(?:is|are|was|be|equals|get|gets|gives|a|the|so|or|and|answer|therefore"
    r"|thus|hence|then|to))[\s*$({\[]*$"
)
_WORKED_BEFORE = re.compile(
    r"""(?ix)
    (?: \b(?:square|cube|root|half|third|quarter|tenth|double|triple|multiple|multiples|reciprocal
           |inverse|negative|opposite|negation|absolute[ ]value|logarithm|log|sine|cosine|tangent
           |power|powers|percent|per[ ]cent|complement)[ ]of | %[ ]of
      | \b(?:twice|thrice|double|triple|plus|times|divided[ ]by
           |multiplied[ ]by|added[ ]to|mod
           |modulo|raised[ ]to|to[ ]the(?:[ ]power(?:[ ]of)?)?|choose|menos|moins|минус|мінус|meno
           |eksi|âm|سالب|ऋण|negativ[oa]|négatif)
      | 负|負|零下|减|減|加上|乘以|除以|マイナス|마이너스 )
    (?:\s+(?:the|exactly|about|number|value)\b){0,2} [\s$({\[*]* $ | (?<!\\)%\s*$"""
)
_OPERATOR = re.compile(
    r"(?:[+×·]|(?<![<\w])/|[\^_]\{?"
    r"|\\(?:times|cdot|div|log|ln|sin|cos|tan|sqrt)\s*\{?"
    r"|\\frac\s*(?:\{[^{}]*\}\s*)?\{|(?<![A-Za-z\\])[A-Za-z]\(|\\l(?:vert|floor|ceil)|[⌊⌈])\s*$|\|$"
    r"|(?<![\w.,])\d+$|\\(?:frac|sqrt)[^\\\s]*\}$"
)
# What a text or a brace only wraps: \text{negative }\boxed{5}.
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s?\{([^{}]{0,40})\}|\{([-−])\}")
_LOOKS = (
    r"(?:text\w*|math\w*|bm|boldsymbol|boxed|fbox|framebox|colorbox|color|underline|underbrace|overbrace"
    r"|mbox|hbox|emph|displaystyle|ensuremath|large|Large|huge|tag|begin|end|centering|left|bold)"
)
_INSIDE = re.compile(
    rf"\\(?!{_LOOKS}(?![a-zA-Z]))[a-zA-Z]+\s?(?:\[[^\[\]]{{0,20}}\]\s?)?\{{\s?$"
    r"|\\(?:neg|lnot|not)\s?$|\d!$"
)
_LISTED_BEHIND = re.compile(
    r"\s?(?:[,;]|\s(?:and|or))\s?[-−]?\\?\$?\d[\d.]{0,20}+\s?(?:[)\]};$]|\\[)\]}]|\.?\s{0,9}$|\.\s)"
    r"|\d|\s(?:and|or)\s(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\b"
)
_SHARE = re.compile(r"[\s}$]*(?:\w+\s+)?(?:of|off|on)\b\D{0,40}\d")
_GOES_ON = re.compile(
    r"\s?(?:\$|\\\))?(?:[.,]\d|[eE][-+]?\d|:\d\d|\s?[¼-¾⅐-⅞]|\s\d+/\d)|\s?–\s?\d"
    r"|[’'‘]\d{3}|\{,\}\d|\\[,!;: ]\d{3}(?!\d)"
)
_PERCENT = re.compile(rf"{_SKIP}(?:\\text\s*\{{\s*)?(?:\\?%|％|per\s?cent\b|pct\b)")
_FACTOR = re.compile(
    rf"{_SKIP}(\\sqrt\s*(?:\{{[^{{}}]*\}}|\d)|√\d+|\\pi(?![a-z])|π|[A-Za-z](?![A-Za-z'’]))"
)
_WORD = re.compile(rf"{_SKIP}(?:\\(?:text|mathrm|mbox)\s*\{{\s*)?([^\W\d_]+)")
_NAMES = (
    r"(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|log|ln|sin|cos|tan|cot|sec|csc|exp|sqrt|frac"
    r"|dfrac|binom|int|sum)"
)
_OPERAND = re.compile(
    rf"{_SKIP}(?:(?:factorial|squared|cubed|times\s+as|off|(?:degrees?\s+)?below\s+zero)(?!\w)"
    r"|out\s+of\s+[$\\(]*\d|to\s+the\s+(?:[-$]*\d|power|nth"
    r"|(?:second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|minus|negative)\b)"
    r"|(?:plus|minus|times|divided\s+by|multiplied\s+by|mod(?:ulo)?|choose|over"
    r"|(?:less|more|fewer|greater)\s+than)\s+[-$\\(]*\d|i\s?(?:\$|\\[\])]|$)"
    r"|\\(?:[bp]?mod|choose|[lc]?dots)(?![a-z])|\^\s?\{?\s?\\circ\s?\}?\s?[-+]\s?\d"
    r"|(?:и|y|et|und|e|and)\s+(?:a|one|half|media|demi|halb|meio|mezzo|полов)\w*(?!\w)|[个個]?半"
    rf"|\\{_NAMES}(?![a-z])|(?:\\right)?\s*[)\]|]\s*\^|[xyz](?![\w'’])"
    r"|\^(?!\s*\{?\s*\\circ|\s*°)|_(?=[{\d])|[₀-₉²³]|[/×·]\s*[\d\\(]|\+\s*[\d\\(a-z]"
    r"|[-−]\s?[\d\\]|\\(?:times|cdot|div|pm|le|ge|leq|geq|lt|gt|neq?)(?![a-z])|[<>≤≥≠±]\s*[\dA-Za-z]"
    r"|(?:\(?(?:in\s+)?base\s+\w|\(?in\s+(?:binary|octal|hex)|remainder\b|R\s?\d)"
    r"|(?:or|to)\s+[-$]*\d)"
)


def around(before: str, behind: str, scales: frozenset[str]) -> Around:
    r"""The sign, percent sign, scale word or factor outside a box; `scales` are words as `million`.

    >>> tuple(around("x = -", "", frozenset())), around("", ".5", frozenset()).part
    (('-', '', False, False), True)
    """
    line = _WRAPPED.sub(r"\1\2", before[-80:].rpartition("\n")[2])
    behind = _WRAPPED.sub(r"\1\2", behind)
    sign, part = _sign(line)
    part = part or (not sign and _OPERATOR.search(line) is not None)
    part = part or _WORKED_BEFORE.search(line) is not None or _GOES_ON.match(behind) is not None
    part = part or _INSIDE.search(line) is not None
    if _LISTED_BEHIND.match(behind):
        return Around(sign, "", part, cut=True)
    percent = _PERCENT.match(behind)
    if percent is not None:
        part = part or _SHARE.match(behind, percent.end()) is not None
        return Around(sign, r"\%", part)
    word = _WORD.match(behind)
    if word is not None and word[1].lower() in scales:
        return Around(sign, f" {word[1]}", part)
    factor = _FACTOR.match(behind)
    if factor is not None and not re.match(r"\s|\$\s", behind):
        return Around(sign, factor[1], part)
    return Around(sign, "", part or _OPERAND.match(behind) is not None)


def _sign(line: str) -> tuple[str, bool]:
    """The sign at the end of a line; or that it subtracts from something."""
    found = _SIGN.search(line)
    if found is None:
        return "", False
    rest = line[: found.start()].rstrip()
    if found[1].isalpha():
        # Ten minus 5 is calculated further.
        return ("-", False) if _SIGN_WORDS_AFTER.search(rest) else ("", True)
    if re.search(r"(?:^|[^\w\\])(?:[A-Za-z]|[\d.,]+)$|[)}]$", rest) and not rest.endswith(r"\("):
        return "", True
    if found[2] and found[1] in "-−" and not rest.endswith(("=", "≈", "$", "(", "[")):
        # A dash or a list item.
        return "", False
    return found[1], False
