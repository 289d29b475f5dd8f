"""Answers: where a text has its answer, what it is worth, and that no wrong one is accepted."""

import sys
import threading
from collections import Counter
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import MissingExtra
from batchwright.rewards import Math, Numeric, Part, Response, RewardsConfig, Rule, score_all
from batchwright.rewards.answers import find_answer, read_answer, read_truth
from batchwright.rewards.numbers import Number

sys.path.insert(0, str(Path(__file__).parent))

from answer_formats import TOGETHER, Entry, entries

CORPUS = entries()
KINDS = sorted({entry.kind for entry in CORPUS} - {"expression"})
installed = pytest.mark.skipif(
    find_spec("math_verify") is None,
    reason="math-verify is not installed: pip install 'batchwright[math]'",
)


def verdict(rule: Rule, text: str, truth: object) -> bool | None:
    part = rule.part_of(Response(text, truth), ())
    assert part.valid or part.why == "ambiguous", part.error
    return bool(part.value) if part.valid else None


def mistakes(rule: Rule, kind: str) -> list[Entry]:
    chosen = [entry for entry in CORPUS if entry.kind == kind]
    assert {entry.verdict for entry in chosen} >= {True, False}
    return [one for one in chosen if verdict(rule, one.text, one.truth) is not one.verdict]


def test_the_corpus_has_hundreds_of_formats_and_holds_a_third_of_them_out() -> None:
    assert len(CORPUS) == len({(entry.truth, entry.text) for entry in CORPUS}) >= 400
    held = Counter(entry.held_out for entry in CORPUS if entry.kind not in TOGETHER)
    assert 0.25 < held[True] / held.total() < 0.42


@pytest.mark.parametrize("kind", TOGETHER)
def test_every_class_of_what_changes_a_number_has_many_formats(kind: str) -> None:
    assert sum(entry.kind == kind for entry in CORPUS) >= 8


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_is_read_as_it_was_judged_by_hand(kind: str) -> None:
    assert mistakes(Numeric(), kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_math_part_reads_numbers_as_the_numeric_part_does(kind: str) -> None:
    # Without math-verify, too: only other expressions need it.
    for entry in CORPUS:
        if entry.kind == kind and Numeric().part_of(Response("1", entry.truth), ()).valid:
            numeric = Numeric().part_of(Response(entry.text, entry.truth), ())
            if numeric.facts["number"] is not None:
                assert verdict(Math(), entry.text, entry.truth) is entry.verdict


@pytest.mark.parametrize("kind", KINDS)
def test_no_format_is_right_for_a_neighbour_of_its_truth(kind: str) -> None:
    for entry in CORPUS:
        truth = read_truth(entry.truth)
        if entry.kind != kind or not entry.verdict or truth is None or not truth.readings:
            continue
        first = truth.readings[0].value
        if isinstance(first, Number):
            value = first.value
            near = {value + 1, value - 1, -value, 10 * value, value / 10, 1000 * value} - {value}
            for other in near:
                assert verdict(Numeric(), entry.text, str(other)) is not True, (entry, other)


@installed
def test_expressions_are_compared_as_mathematics() -> None:
    assert mistakes(Math(), "expression") == []


def test_an_expression_is_no_truth_of_the_numeric_part() -> None:
    for entry in CORPUS:
        if entry.kind == "expression":
            part = Numeric().part_of(Response(entry.text, entry.truth), ())
            assert part.why == "bad_truth"
            assert "the part math" in part.error


@installed
def test_the_math_part_works_in_threads_and_stops_what_takes_too_long() -> None:
    found: list[Part] = []
    texts = [r"\boxed{9^{9^{9^{9}}}x}", r"\boxed{\frac{2}{\sqrt{2}}}", r"\boxed{\sqrt{3}}"]

    def score() -> None:
        rule = Math(timeout_s=2)
        found.extend(rule.part_of(Response(text, r"\sqrt{2}"), ()) for text in texts)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join(60)

    assert found[0].why in ("timeout", "")
    assert found[0].value != 1.0
    assert [part.value for part in found[1:]] == [1.0, 0.0]


@pytest.mark.skipif(find_spec("math_verify") is not None, reason="math-verify is installed")
def test_without_math_verify_the_math_part_says_what_to_install() -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'batchwright\[math\]'"):
        Math().part_of(Response(r"\boxed{\sqrt{2}}", r"\sqrt{2}"), ())


@given(st.fractions(max_denominator=10**6))
def test_any_fraction_is_read_exactly_in_each_notation(value: Fraction) -> None:
    above, below = value.numerator, value.denominator
    for text in (
        f"{above}/{below}",
        rf"so \boxed{{\frac{{{above}}}{{{below}}}}}.",
        f"The answer is {above}/{below}.",
        f"#### {above}/{below}",
    ):
        assert verdict(Numeric(), text, str(value)) is True
        assert verdict(Numeric(), text, str(value + Fraction(1, 10**9))) is False


@given(st.integers(-(10**30), 10**30))
def test_no_neighbour_of_an_integer_is_accepted(value: int) -> None:
    for other in {value + 1, value - 1, -value, 10 * value} - {value}:
        for text in (f"#### {other}", f"It is {other:,}.", rf"\boxed{{{other}}}", f"{other}.0"):
            assert verdict(Numeric(), text, str(value)) is not True
    for text in (f"#### {value}", f"It is {value:,}.", rf"\boxed{{{value}}}", f"{value}.0"):
        assert verdict(Numeric(), text, str(value)) is True


@given(st.decimals(-1000, 1000, places=4))
def test_decimals_agree_to_the_last_written_digit_and_no_further(value: object) -> None:
    assert verdict(Numeric(), f"It is {value}0.", str(value)) is True
    shifted = Fraction(str(value)) + Fraction(1, 10**4)
    assert verdict(Numeric(), f"It is {float(shifted):.4f}.", str(value)) is False


def test_both_parts_are_configured_by_their_kind() -> None:
    kinds = [{"kind": "numeric", "tolerance": 0.01}, {"kind": "math", "ambiguous": "wrong"}]
    config = RewardsConfig.of({"part": kinds})
    rewards = score_all([Response("9.85", "9.81"), Response("1.200", "1200")], config.part)
    values = [[part.value for part in reward.parts.values()] for reward in rewards]
    assert values[0] == [1.0, 0.0]
    assert rewards[1].why == "ambiguous"
    assert values[1][1] == 0.0


def test_a_tolerance_is_for_decimals_only() -> None:
    assert verdict(Numeric(tolerance=0.01), "9.85", "9.81") is True
    assert verdict(Numeric(tolerance=0.01), "1000", "1001") is False
    assert verdict(Numeric(tolerance=0.01), "9.95", "9.81") is False


def test_an_ambiguous_answer_is_invalid_or_wrong_by_name() -> None:
    response = Response("It costs 1.200 euros.", "1200")
    part = Numeric().part_of(response, ())
    assert (part.valid, part.why) == (False, "ambiguous")
    assert "1.200" in part.error
    assert Numeric(ambiguous="wrong").part_of(response, ()).value == 0.0


@pytest.mark.parametrize(
    ("text", "where", "place"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}} of 8", "boxed", r"\frac{1}{2}"),
        ("#### 5 apples\nThe answer is 6", "hashes", "5 apples"),
        ("#### Step 2\nThe answer is 6.", "said", "6"),
        ("It follows that $x = 7$.", "formula", "x = 7"),
        ("<think>9</think>so 7", "last", "so 7"),
        ("<think>9", "last", ""),
        ("#### 5\n\nQ: And 7 apples?\nA: #### 7", "hashes", "5"),
        ("#### 5\n#### 7", "hashes", "7"),
        (r"so $x = -\boxed{5}$ million", "boxed", "-5 million"),
    ],
)
def test_the_place_of_the_answer_follows_the_documented_order(
    text: str, where: str, place: str
) -> None:
    found = find_answer(text)
    assert (found.where, found.text.strip()) == (where, place)


HOSTILE = (
    *("1 ", "(", r"\boxed{", "the answer to ", "$", "-", "1/", r"\frac", "9", "1,", "<answer>"),
    *("~~", "<b>", "&minus;", "5万", "don't think ", "than ", "f(", "a_{", "5₂", "one point "),
    *(
        "that is ",
        "? No",
        "if ",
        "5 tenths ",
        "1 in 6 ",
        "March 5 ",
        "$1 and 2 ",
        r"-\boxed{5}",
        "it ",
    ),
    *("18. No, ", "oops 2. ", "sorry, ", "let me check ", "but ", ", or rather ", "is 1? ", "\n\n"),
    *(
        "<!--",
        r"\cancel{",
        r"\iffalse ",
        "\n%",
        "[INST]",
        "<|channel|>",
        "### User: ",
        "\n### User",
    ),
    *(
        "十",
        "一二分之",
        "พัน",
        "x=1, ",
        "3+4=7, 7+1=8, ",
        "5 or 5 ",
        "20% off ",
        "to the ",
        "maybe ",
    ),
    *("^2", "not 1 ", "1. ", "#### ", "one ", "twenty-", r"\text{", "***", "<<", "1 = ", "1 ("),
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_what_a_policy_repeats_thousands_of_times_is_still_read_in_time(piece: str) -> None:
    (reward,) = score_all([Response(piece * 10_000 + "1", "1")], [Numeric(ambiguous="wrong")])
    assert reward.valid


@given(st.text(alphabet="0123456789.,-+*/^(){}[]$%!=: abx\\frac\n#½²−–", max_size=60))  # noqa: RUF001
@settings(max_examples=500)
def test_no_text_of_digits_and_signs_breaks_the_reader(text: str) -> None:
    (reward,) = score_all([Response(text, "7")], [Numeric()])
    assert reward.why in ("", "ambiguous")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("I cannot determine the answer; 5 is given", None),
        ("I cannot determine the answer. 5 is given.", None),
        ("There are 5 apples, so I can't say.", None),
        ("It cannot be determined from the 5 numbers.", None),
        ("The answer is: cannot be determined with 5 equations", None),
        ("There is not enough information. 5 is given.", None),
        ("I am unable to answer 5", None),
        # Others may be unable to do things, and what follows may say more.
        ("Tom can't give away 3 apples, he has 5.", 5),
        ("They could not find 3 of the 8 toys. 5 toys are left.", 5),
        ("It cannot be found exactly, but it is about 5", 5),
        ("We cannot compute x directly. So x + 3 = 8, x = 5", 5),
    ],
)
def test_a_refusal_is_no_answer(text: str, value: int | None) -> None:
    found = [reading.value for reading in read_answer(text).readings or ()]
    assert found == ([] if value is None else [Number(Fraction(value))])
