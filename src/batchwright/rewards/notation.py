# ruff: noqa: RUF001
"""One notation for all: signs, LaTeX, markdown, currencies and number words of a written answer."""

import re
import unicodedata

__all__ = ["SCALES", "in_digits", "plain"]

_SUPER = {**dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)), "⁻": "-", "⁺": "+"}
_COMMANDS = r"text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|emph"
# In this order; each is (pattern, replacement).
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>\n]*>>", ""),
        # A date or a number in another base is no subtraction and no product: ∎ is never read.
        (r"(?<![\d/-])(?=\d{4}-\d\d?-\d\d?(?![\d-])|\d{1,2}/\d{1,2}/\d{4}(?!\d))", "∎"),
        (r"(?<![\w.])(?=0[xob][0-9a-fA-F]+\b|\d+\.{2,}\d)", "∎"),
        (r"(?<=\d)\.(?=[eE][-+]?\d)", ""),
        (r"\\?[$€£¥₹]\s?(\d[\d.,]*)\s?[kK]\b", r"\1 thousand"),
        (r"\\?[$€£¥₹]\s?(\d[\d.,]*)\s?[mM]\b", r"\1 million"),
        (r"\\?[$€£¥₹]\s?(\d[\d.,]*)\s?[bB]\b", r"\1 billion"),
        (r"(?i)\bsqrt\s*(?=[({\d])|√", r"\\sqrt "),
        (r"(?<=[\d\s(/*+-])pi\b|\bpi(?=[\s/*+-])|π|\bPi\b", r"\\pi "),
        (r"(?i)(?<=\d)\s+and\s+(?:a|one)\s+half\b", " 1/2"),
        (r"(?i)(?<=\d)\s+and\s+(?:a|one)\s+quarter\b", " 1/4"),
        (r"(?i)(?<=\d)\s+and\s+(?:a|one)\s+third\b", " 1/3"),
        (r"(?<=\d),\s*\\!\s*(?=\d{3})", ","),
        (r"\\\\(?=[a-zA-Z({\[$%])", r"\\"),
        (r"\\left(?![a-z])|\\right(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle|\\!", ""),
        (rf"\\(?:{_COMMANDS})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (r"\{,\}", ","),
        (r"\\[()\[\]]", " "),
        (r"(?i)\b([ap])\.\s?m\b\.?", r"\1m"),
        (r"\\[,;: ]|\\q?quad(?![a-z])|~|[\u2000-\u200a\u202f\u3000]", "\u00a0"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\{([^{}]*)\\over\s*([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\^\s*\{?\s*\\circ\s*\}?|[°º]", " deg "),
        (r"\\\{", "⦃"),
        (r"\\\}", "⦄"),
        (r"\\%|％|(?<=[\d\s$}])(?:per\s?cent(?:age)?|pct)\b", "%"),
        (r"\\?¢", " cents "),
        (
            r"\b(?:US|CA|AU|NZ|HK|C|A|S|R)\$|\\?\$|[€£¥₹₩₽₪]|\b(?:USD|EUR|GBP|CHF|INR|Rs\.?)(?=\s*-?\d)",
            "",
        ),
        (r"(?<=\d)\s?\*\*\s?(?=\d)|(?<=\d)\*\*(?=-\d)", "^"),
        (r"\*\*|__|[`\"“”✅✔]", ""),
        (r"(?<![\w)*])\*(?=\S)([^*\n]+)(?<=\S)\*(?![\w(*])", r"\1"),
        (r"\b0·(?=\d)", "0."),
        (r"\\times|\\cdot|\\ast|[×·⋅∙∗]", "*"),
        (r"(?<=[\d)])\s*[xX]\s*(?=\d)", "*"),
        (r"\\div(?![a-z])|[÷⁄∕]", "/"),
        (r"\\pm(?![a-z])|±|\+/-", "±"),
        (r"\\neq?(?![a-z])|≠|!=", "≠"),
        (r"\\leq?(?![a-z])|\\geq?(?![a-z])|\\[lg]t(?![a-z])|[≤≥]|<=|>=|<|(?<![-=])>", "≤"),
        (r"\\equiv|\\implies|\\iff|\\Rightarrow|\\to(?![a-z])|\\in(?![a-z])", "="),
        (r"[∈→⇒＝]|:=|==|=>|->", "="),
        (r"\\approx|\\simeq|[≈≃≅]", "≈"),
        (r"[−－﹣‐‑‒]", "-"),
        (r"(?<=\d)\s*–\s*(?=\d)", "–"),
        (r"(?<![\w\s])–(?=\d)|(?<=\s)–(?=\d)|^–(?=\d)", "-"),
        (r"(?<!\d)–|–(?!\d)|—", " "),
        (r"(?i)\b(?:minus|negative)\s+(?=\d)", "-"),
    )
]
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
_ELLIPSIS = re.compile(r"(\d*)\.(\d*?)(\d)\3\3+(?:\.\.\.|…|\\ldots|\\dots)")
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
_ONES += " fifteen sixteen seventeen eighteen nineteen"
_WORDS = {word: number for number, word in enumerate(_ONES.split())}
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS |= {word: 20 + 10 * number for number, word in enumerate(_TENS.split())}
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
    "quintillion": 10**18,
    "dozen": 12,
    "lakh": 10**5,
    "crore": 10**7,
    "mn": 10**6,
    "bn": 10**9,
    "tn": 10**12,
}
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
_BELOW = {word: number for number, word in enumerate(_ORDINALS.split(), start=3)}
_BELOW |= {"half": 2, "halves": 2, "quarter": 4}
_PARTS = re.compile(
    rf"(?i)(?:(?<!\w)(\d+)\s+and\s+)?\b(?:(\d+|an?)[\s-])\s*({'|'.join(_BELOW)})s?\b"
    r"|^\s*(half)\b(?!\s+(?:of|the|as)\b)"
)
_PHRASE = re.compile(
    rf"(?i)\b(?:{'|'.join(_WORDS)})(?:[\s-]+(?:and\s+)?(?:{'|'.join([*_WORDS, *SCALES])}))*\b"
)


def plain(text: str) -> str:
    """The text with one character for each sign: minus, times, fractions, spaces and brackets.

    >>> plain(r"$-\\dfrac{3}{4}\\text{ cm}^2$ − ½")
    '-\\\\frac{3}{4}  cm ^2 -  1/2'
    """
    found: list[str] = []
    for char in text:
        if char in _SUPER:
            found.append("^" + _SUPER[char] if not found or found[-1][:1] != "^" else _SUPER[char])
        elif not char.isascii() and unicodedata.category(char) == "No":
            # A vulgar fraction such as ½; its compatibility form has a fraction slash.
            form = unicodedata.normalize("NFKC", char)
            found.append(f" {form}" if "⁄" in form else char)
        elif "！" <= char <= "～":
            # Full width.
            found.append(chr(ord(char) - 0xFEE0))
        elif not char.isascii() and char.isdecimal():
            found.append(str(unicodedata.decimal(char)))
        else:
            found.append(char)
    text = _superscripts("".join(found))
    text = _REPEATING.sub(lambda m: _repeating(m[1], m[2], m[3]), text)
    text = _ELLIPSIS.sub(lambda m: _repeating(m[1], m[2], m[3]), text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _superscripts(text: str) -> str:
    """`10^-^3`, as signs and digits were replaced one by one, is 10^-3."""
    return re.sub(r"(?<=\^)([-+]?)((?:\^?\d)+)", lambda m: m[1] + m[2].replace("^", ""), text)


def _repeating(whole: str, fixed: str, period: str) -> str:
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    above = int((whole or "0") + fixed + period) - int((whole or "0") + fixed)
    return f"({above}/{below})"


def in_digits(text: str) -> str:
    """Number words as digits, in a text that has none: `twenty-five` is 25.

    >>> in_digits("Two hundred five apples, a dozen pears")
    '205 apples, 1 dozen pears'
    """
    text = re.sub(r"(?i)\ban? (?=(?:dozen|hundred|thousand|million|billion)\b)", "1 ", text)
    text = _PHRASE.sub(lambda match: _phrase(match[0]), text)
    text = _PARTS.sub(lambda match: _part(match), text)
    return re.sub(r"(?i)\b(?:minus|negative)\s+(?=\d)", "-", text)


def _part(match: re.Match[str]) -> str:
    """`2 thirds` is 2/3, `1 half` and `half` are 1/2."""
    whole, above, below = match[1], match[2], (match[3] or match[4]).lower()
    count = "1" if above is None or above.lower() in ("a", "an") else above
    return (f"{whole} " if whole else "") + f"{count}/{_BELOW[below]}"


def _phrase(written: str) -> str:
    total, part, last = 0, 0, 0
    for word in re.split(r"[\s-]+", written.lower()):
        if word == "and":
            continue
        if word == "hundred":
            part *= 100
        elif word in SCALES:
            total, part = total + part * SCALES[word], 0
        elif part % 10 or (part % 100 and _WORDS[word] >= 10) or (part and not _WORDS[word]):
            # `one two` is no number.
            return written
        else:
            part += _WORDS[word]
        last = part
    return str(total + last)
