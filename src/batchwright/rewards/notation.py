# ruff: noqa: RUF001
"""One notation for all: signs, LaTeX, markdown, currencies and number words of a written answer."""

import html
import re
import unicodedata
from fractions import Fraction

__all__ = ["SCALES", "in_digits", "plain", "spaced"]

_SUPER = {**dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789", strict=True)), "⁻": "-", "⁺": "+"}
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_HAN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_HAN_SCALE = "千(?![克米瓦卡帕赫焦伏字])|百(?![分科])|[十万萬亿億兆백천만억조打]|ダース|다스"
_ENTITY = re.compile(r"&(?:[a-zA-Z]{2,10}[0-9]{0,2}|#[0-9]{1,6}|#[xX][0-9a-fA-F]{1,6});")
_COMMANDS = r"text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|emph"
# In this order; each is (pattern, replacement).
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>\n]*>>", ""),
        # What is struck out is not said; other tags only change how it looks.
        (r"~~[^~\n]{1,200}~~|<(del|s|strike)>[^<>\n]{0,200}</\1>", " "),
        (r"<sup>\s*(?=[-+\d])", "^"),
        (r"<sub>\s*(?=\d)", "_"),
        (
            r"</?(?:b|i|u|em|strong|span|p|br|code|mark|big|small|font|div|sup|sub|center)\b[^<>\n]{0,99}>",
            " ",
        ),
        (r"(?<![\w}])_(\d[^_\n]{0,40})_(?!\w)", r"\1"),
        (r"^\s*[*•]\s+(?=\S)|(?<=\d)_(?=\s|$|[.,!])", ""),
        # Chinese, Japanese and Korean have no spaces around numbers.
        (rf"(?<=[{_HAN}])(?=-?\d)", " "),
        (r"(\d+)\s*(?:分之|분의)\s*(\d+)", r"\2/\1"),
        (r"百\s*分之\s*(\d+(?:\.\d+)?)", r"\1%"),
        (rf"(?<=\d)\s?({_HAN_SCALE})", r" \1 "),
        (r"(\d{1,4}\s*[年월月년])\s*(?=\d{1,2}\s*[月日월일])", r"∎\1∎"),
        (
            r"(?i)(?<=\d)-(?=(?:halves|(?:thir|four|fif|six|seven|eigh|nin|ten|hundred|thousand)t?[dh]s)\b)",
            " ",
        ),
        (
            r"(?i)\b(?:option|choice|case|part|step|method|way|question|problem|answer|scenario|no\.)"
            r"\s(?:\d{1,3}):\s+(?=\S)",
            " ",
        ),
        # A date or a number in another base is no subtraction and no product: ∎ is never read.
        (r"(?<![\d/-])(?=\d{4}-\d\d?-\d\d?(?![\d-])|\d{1,2}/\d{1,2}/\d{4}(?!\d))", "∎"),
        (r"(?<![\w.])(?=0[xob][0-9a-fA-F]+\b|\d+\.{2,}\d)", "∎"),
        (r"(?<=\d)\.(?=[eE][-+]?\d)", ""),
        (r"\\?[$€£¥₹]\s?(\d[\d.,]*)\s?[kK]\b", r"\1 thousand"),
        (r"\\?[$€£¥₹]\s?(\d[\d.,]*)\s?[mM]\b", r"\1 million"),
        (r"\\?[$€£¥₹]\s?(\d[\d.,]*)\s?[bB]\b", r"\1 billion"),
        (r"(?i)(?:(?<![a-z\\])sqrt|√)\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
        (r"(?i)(?<![a-z\\])sqrt\s*(?=[({])|√", r"\\sqrt "),
        (r"(?<=[\d\s(/*+-])pi\b|\bpi(?=[\s/*+-])|π|\bPi\b", r"\\pi "),
        (r"(?i)(?<=\d)\s+and\s+(?:a|one)\s+half\b", " 1/2"),
        (r"(?i)(?<=\d)\s+and\s+(?:a|one)\s+quarter\b", " 1/4"),
        (r"(?i)(?<=\d)\s+and\s+(?:a|one)\s+third\b", " 1/3"),
        (r"(?i)(?<=\d)\s+and\s+(\d+)\s+quarters\b", r" \1/4"),
        (r"(?i)(?<=\d)\s+and\s+three\s+quarters\b", " 3/4"),
        (r"(?i)(?<=\d)\s+and\s+two\s+thirds\b", " 2/3"),
        (
            r"(?i)(?<=\d)\s+and\s+(?=(?:two|three|four|five|six|seven|eight|nine)\s+[a-z]{2,7}(?:th|rd)s\b)",
            " ∎",
        ),
        (r"(?<=\d)\s+point\s+(?=\d)", "."),
        (r"(?<=\d),\s*\\!\s*(?=\d{3})", ","),
        (
            r"\\?[$€£]\s?(\d+(?:,\d{3})*),?\s+(?:and\s+)?(\d{1,2})\s?(?:cents?\b|\\?¢|pence\b|p\b)",
            r"\1 dollars \2 cents",
        ),
        (r"\\\\(?=[a-zA-Z({\[$%])", r"\\"),
        (r"\\(?:tiny|small|large|Large|LARGE|huge|Huge|bf|it|rm)(?![a-z])|\\color\s*\{\w+\}", ""),
        (r"\\textcolor\s*\{\w+\}\s*(?=\{)", ""),
        (r"\\(?:underline|overbrace|underbrace|boldsymbol|bm)\s*(?=\{)", ""),
        (r"\\+\s*$", ""),
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
        (r"(?i)(?:\b(?:minus|negative)\s+|\(\s*(?:minus|negative|-)\s*\)\s*)(?=\d)", "-"),
        (
            r"(?i)(?:负|負|零下|マイナス|마이너스|\bминус|\bмінус|\beksi|\bâm|سالب|ऋण|ติดลบ)\s{0,9}(?=\d)",
            " -",
        ),
        (
            r"(?i)(^|[=:]|\b(?:es|son|est|é|è|são|sono|igual a))(\s{0,9})"
            r"(?:menos|moins|meno|negativ[oae]?|négatif)\s{1,9}(?=\d)",
            r"\1\2-",
        ),
    )
]
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}")
_ELLIPSIS = re.compile(r"(\d*)\.(\d*?)(\d)\3\3+(?:\.\.\.|…|\\ldots|\\dots)")
_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
_ONES += " fifteen sixteen seventeen eighteen nineteen"
_WORDS = {word: number for number, word in enumerate(_ONES.split())}
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS |= {word: 20 + 10 * number for number, word in enumerate(_TENS.split())}
_FACTORS = """
10 十 tens decena decenas dizaine dizaines decina decine dezena dezenas десяток десятка десятков
   десятки десятків puluh chục
12 dozen 打 ダース 다스 dutzend docena docenas douzaine douzaines dozzina dozzine dúzia dúzias
   dozijn dozijnen dussin dusin дюжина дюжины дюжин дюжини дузина дузини tuzin tuziny tuzinów tucet
   tucty tuctu tuctů tuceta tucat tusina tusinaa düzine duzină duzini lusin תריסר دزينة دزينات دوجین
   درجن दर्जन ডজন โหล
20 score
100 hundred 百 백 cientos cem cien ciento centenar centenares centena centenas centaine centaines
    cento centinaio centinaia hundert honderd hundra hundrede hundreder hundre сто сотня сотни сотен
    сотні сотень стотици sto sta set setka setki setek stovka stovky stovek száz sata sataa yüz sută
    sute trăm ratus מאה מאות مئة مائة مئات صد سو सौ শত ร้อย
1000 thousand grand 千 천 tausend tsd mille millier milliers mil millar millares mila migliaia
     migliaio milhar milhares duizend тысяча тысячи тысяч тыс тисяча тисячі тисяч тис хиляда хиляди
     tys tysiąc tysiące tysięcy tisíc tisíce tisíců tisuća tisuće hiljada hiljade ezer tuhat tuhatta
     tusen tusind tusinde bin mie mii ribu nghìn ngàn אלף אלפים ألف الف آلاف هزار ہزار हज़ार हज़ार
     हजार হাজার พัน
10000 万 萬 만 vạn myriad หมื่น
100000 lakh लाख লাখ লক্ষ لاکھ แสน
10000000 crore करोड़ करोड़ কোটি کروڑ
1000000 million mn millionen mio millón millones milhão milhões milione milioni miljoen mln milj
        миллион миллиона миллионов млн мільйон мільйона мільйони мільйонів milyon miljon miljoner
        millioner miljoona miljoonaa millió milion miliony milionu milionů milionów milión milióny
        milijun milijuna miliona milioane juta triệu מיליון מיליונים مليون ملايين میلیون ล้าน
100000000 亿 億 억
1000000000 billion bn milliard milliards milliarde milliarden milliarder mrd miliardo miliardi
           miljard miljarder miljardi miljardia милиард миллиард миллиарда миллиардов мільярд
           мільярда мільярди мільярдів млрд milyar miliard miliardy miliarda miliardów miliardu
           milijarda milijardi miliarde milliárd miliar bilhão bilhões tỷ tỉ מיליארד מיליארדים مليار
           مليارات میلیارد अरब
1000000000000 trillion tn billionen trilyon triliun trilhão trilhões триллион триллиона триллионов
              трильйон 兆 조
1000000000000000 quadrillion
1000000000000000000 quintillion
1000000000000000000000 sextillion
1000000000000000000000000 septillion
1000000000000000000000000000 octillion
"""
_BELOW_WORDS = """
2 halves halbe demis medios mezzi
3 thirds drittel tiers tercios terços terzi
4 quarters fourths viertel cuartos quarti
5 fifths fünftel cinquièmes quintos quinti
6 sixths sechstel sixièmes sextos sesti
7 sevenths siebtel septièmes séptimos sétimos settimi
8 eighths achtel huitièmes octavos oitavos ottavi
9 ninths neuntel neuvièmes novenos
10 tenths zehntel dixièmes décimos décimas decimi
11 elevenths
12 twelfths
15 fifteenths
16 sixteenths
20 twentieths
32 thirty-seconds
100 hundredths hundertstel centièmes centésimos centésimas centesimi
1000 thousandths tausendstel millièmes milésimos milésimas millesimi
1000000 millionths millionstel millionièmes
"""


def _by_word(table: str) -> dict[str, int]:
    """Lines of a number and its words."""
    found, number = {}, 0
    for word in table.split():
        if word.isdecimal():
            number = int(word)
        else:
            found[word] = number
    return found


_SCALE_WORDS = _by_word(_FACTORS)
_ENGLISH = (
    *("hundred", "thousand", "million", "billion", "trillion", "quadrillion", "quintillion"),
    *("sextillion", "septillion", "octillion"),
)
SCALES: dict[str, Fraction] = {
    **{word: Fraction(factor) for word, factor in _SCALE_WORDS.items()},
    **{f"{word}s": Fraction(_SCALE_WORDS[word]) for word in (*_ENGLISH, "dozen", "lakh", "crore")},
    **{word: Fraction(1, below) for word, below in _by_word(_BELOW_WORDS).items()},
}
"""What a number in front of such a word is multiplied by."""
_ENGLISH_NAMES = {
    factor: word
    for word, factor in reversed(_SCALE_WORDS.items())
    if word.isascii() and word in (*_ENGLISH, "dozen", "myriad", "lakh", "crore")
}
_COMBINED_WORDS = [word for word in _SCALE_WORDS if not word.isalnum() and _SCALE_WORDS[word] > 10]
_COMBINED = re.compile(
    r"(?:^|(?<=[\d}$]))\s{0,9}("
    + "|".join(sorted(_COMBINED_WORDS, key=len, reverse=True))
    + ")(?![\u0e4c\u0e18])"
)
_ORDINALS = "third fourth fifth sixth seventh eighth ninth tenth"
_BELOW = {word: number for number, word in enumerate(_ORDINALS.split(), start=3)}
_BELOW |= {"half": 2, "halves": 2, "quarter": 4, "hundredth": 100, "thousandth": 1000}
_PARTS = re.compile(
    rf"(?i)(?:(?<!\w)(\d+)\s+and\s+)?\b(?:(\d+|an?)[\s-])\s*({'|'.join(_BELOW)})s?\b"
    r"|^\s*(half)\b(?!\s+(?:of|the|as)\b)"
)
_NUMBER_WORDS = "|".join([*_WORDS, *_ENGLISH, "dozen"])
_PHRASE = re.compile(rf"(?i)\b(?:{'|'.join(_WORDS)})(?:[\s-]+(?:and\s+)?(?:{_NUMBER_WORDS}))*\b")


_HAN_DIGITS = {char: number for number, char in enumerate("零一二三四五六七八九")}
_HAN_DIGITS |= {"〇": 0, "两": 2, "兩": 2}
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_HAN_ANY = "".join((*_HAN_DIGITS, *_HAN_UNITS))
# One character alone is often no number: 一共, 十分. Some tens (几十, 十几, 十多) are none either.
_HAN_NUMERAL = re.compile(
    rf"(?<![几幾数数每第{_HAN_ANY}])(?![万萬亿億]|百分之)(?:[{_HAN_ANY}]{{2,40}}(?:[点點][{''.join(_HAN_DIGITS)}]{{1,20}})?"
    rf"|[{''.join(_HAN_DIGITS)}][点點][{''.join(_HAN_DIGITS)}]{{1,20}}"
    rf"|[{_HAN_ANY}](?=分之)|(?<=分之)[{_HAN_ANY}]|(?<=^)[{_HAN_ANY}](?=[个個元只本人岁天%。.，]|\W*$))"
    rf"(?![几幾多余餘来{_HAN_ANY}]|[个個][半])"
)
_DIGIT_WORDS = "|".join(_ONES.split()[:10])
_POINT = re.compile(
    rf"(?i)\b((?:{'|'.join(_WORDS)})(?:[\s-]+(?:{'|'.join([*_WORDS, *_ENGLISH])}))*)"
    rf"\s+point\s+((?:{_DIGIT_WORDS})(?:[\s-]+(?:{_DIGIT_WORDS}))*)\b"
)


def plain(text: str) -> str:
    """The text with one character for each sign: minus, times, fractions, spaces and brackets.

    >>> plain(r"$-\\dfrac{3}{4}\\text{ cm}^2$ − ½")
    '-\\\\frac{3}{4}  cm ^2 -  1/2'
    """
    found: list[str] = []
    for char in _ENTITY.sub(lambda match: html.unescape(match[0]), text):
        if char in _SUB and found and (found[-1][:1] == "_" or found[-1].isdecimal()):
            # A number in another base.
            found.append("_" + _SUB[char] if found[-1].isdecimal() else _SUB[char])
        elif char in _SUPER:
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
    text = _COMBINED.sub(lambda match: f" {_ENGLISH_NAMES[_SCALE_WORDS[match[1]]]} ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def spaced(text: str) -> str:
    """Scale words of scripts whose vowel signs are no letters, or without spaces, as English ones.

    >>> spaced("5 พัน"), spaced("5打")
    ('5 thousand', '5 打 ')
    """
    text = _COMBINED.sub(lambda match: f" {_ENGLISH_NAMES[_SCALE_WORDS[match[1]]]}", text)
    return re.sub(rf"(?:^|(?<=[\d}}$]))\s?({_HAN_SCALE})", r" \1 ", text)


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
    if not text.isascii():
        text = _han_digits(text)
    text = re.sub(r"(?i)\ban? (?=(?:dozen|hundred|thousand|million|billion)\b)", "1 ", text)
    text = re.sub(r"(?i)\ba (?:couple|pair)\b", "∎2", text)
    text = _POINT.sub(_pointed, text)
    text = _PHRASE.sub(lambda match: _phrase(match[0]), text)
    text = _PARTS.sub(lambda match: _part(match), text)
    return re.sub(r"(?i)\b(?:minus|negative)\s+(?=\d)", "-", text)


def _han_digits(text: str) -> str:
    """Numbers in Chinese characters as digits: 十八 is 18, 三分之二 is 2/3."""
    text = _HAN_NUMERAL.sub(lambda match: f" {_han_number(match[0])} ", text)
    text = re.sub(r"百分之 (\d+(?:\.\d+)?)", r"\1%", text)
    text = re.sub(r"(\d+) 分之 (\d+)", r"\2/\1", text)
    return re.sub(r"[负負] (?=\d)", "-", text).strip()


def _han_number(written: str) -> str:
    """Digits, if the characters are one number; else what was written."""
    whole, point, behind = written.partition("点") if "点" in written else written.partition("點")
    if point:
        first, rest = _han_number(whole), "".join(str(_HAN_DIGITS.get(c, "")) for c in behind)
        return f"{first}.{rest}" if len(rest) == len(behind) and first.isdecimal() else written
    if all(char in _HAN_DIGITS for char in whole):
        return "".join(str(_HAN_DIGITS[char]) for char in whole)
    total = part = digit = 0
    last = 0
    for char in whole:
        if char in _HAN_DIGITS:
            digit = _HAN_DIGITS[char]
            continue
        unit = _HAN_UNITS[char]
        if unit >= 10**4:
            total, part, digit = (total + part + digit) * unit, 0, 0
        else:
            part, digit = part + (digit or 1) * unit, 0
        last = unit
    if digit and last > 10 and not re.search("[零〇]", whole):
        # 一百二 is 120.
        digit *= last // 10
    return str(total + part + digit)


def _pointed(match: re.Match[str]) -> str:
    """`one point two five` is 1.25."""
    whole = _phrase(match[1])
    digits = "".join(str(_WORDS[word]) for word in re.split(r"[\s-]+", match[2].lower()))
    return f"{whole}.{digits}" if whole.isdecimal() else match[0]


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
        elif word in _SCALE_WORDS:
            total, part = total + part * _SCALE_WORDS[word], 0
        elif part % 10 or (part % 100 and _WORDS[word] >= 10) or (part and not _WORDS[word]):
            # `one two` is no number, `one and three` are two.
            first, mark, rest = (
                re.split(r"(?i)(\s+and\s+)", written, maxsplit=1)
                if (re.search(r"(?i)\sand\s", written))
                else (written, "", "")
            )
            return f"{_phrase(first)}{mark}{_phrase(rest)}" if mark else written
        else:
            part += _WORDS[word]
        last = part
    return str(total + last)
