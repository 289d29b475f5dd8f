"""Rewards: what rules, judges and the monitor say, and that a failure is never a number."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import Done, Failed, Kind, Request
from batchwright.errors import BadRow, ConfigError, Mismatch
from batchwright.rewards import (
    Contains,
    Correctness,
    Exact,
    Format,
    JsonSchema,
    Judge,
    Monitor,
    Numeric,
    Part,
    Pattern,
    Response,
    Reward,
    RewardsConfig,
    Rule,
    Similarity,
    Verbosity,
    agreement,
    group_advantages,
    score_all,
)
from batchwright.rewards.model_rules import fill

TAGGED = "Because of that <measurements>[true, false, true]</measurements>"
DOWN = Failed(Kind.UNREACHABLE, "nobody answers")


def said(text: str) -> Done:
    return Done(text, {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (TAGGED, 1.0),
        ("<measurements>[perhaps]</measurements>", 0.5),
        ("<measurements>none</measurements>", 0.5),
        ("[true, false]", 0.0),
        ("</measurements>", 0.0),
    ],
)
def test_format_is_half_for_tags_and_half_for_content(text: str, value: float) -> None:
    assert Format().part_of(Response(text), ()).value == value


@pytest.mark.parametrize(
    ("truth", "strict", "partial"),
    [
        ("[true, false, true]", 3.0, 3.0),
        ("[true, true, true]", 2.0, 2.0),
        ([True, False, True], 3.0, 3.0),
        ("[true, false]", 0.0, 3.0),
        ("[true, false, true, true]", 0.0, 2.25),
    ],
)
def test_correctness_is_the_share_of_places_that_agree(
    truth: object, strict: float, partial: float
) -> None:
    response = Response(TAGGED, truth)
    assert Correctness().part_of(response, ()).value == strict
    assert Correctness(wrong_count="partial").part_of(response, ()).value == partial


@pytest.mark.parametrize("truth", [None, "", "true", "[", 7, "[]", "[perhaps]", {}])
def test_a_truth_that_cannot_be_read_spoils_its_own_sample_only(truth: object) -> None:
    good, bad = Response(TAGGED, "[true, false, true]"), Response(TAGGED, truth)
    one, other = score_all([good, bad], [Format(), Correctness()])

    assert (one.value, one.valid) == (4.0, True)
    assert (other.valid, other.why) == (False, "bad_truth")
    assert math.isnan(other.value)
    assert other.parts["format"].value == 1.0


@given(st.text(max_size=200), st.text(max_size=50))
@settings(max_examples=200)
def test_no_text_of_any_plane_breaks_a_rule(text: str, truth: str) -> None:
    rules = [
        *(Format(), Correctness(), Verbosity(), Numeric(), Exact(), Contains()),
        *(Pattern(pattern="x+"), JsonSchema(schema={"type": "object"})),
    ]
    (reward,) = score_all([Response(text, truth)], rules)
    assert reward.valid == all(part.valid for part in reward.parts.values())
    assert math.isfinite(reward.value) == reward.valid


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_finite_number_is_an_invalid_reward(value: float) -> None:
    class Odd(Numeric):
        def part_of(self, response: Response, outcomes: object) -> Part:
            return Part(value)

    (reward,) = score_all([Response("4", truth="4")], [Odd()])

    assert not reward.valid
    assert math.isnan(reward.value)
    assert reward.why == "not_finite"


def test_words_are_found_whole() -> None:
    for text, value in (("It is New  Delhi.", 1.0), ("new delhi", 1.0), ("Newdelhi", 0.0)):
        assert Contains().part_of(Response(text, "New Delhi"), ()).value == value


def test_json_is_checked_by_its_schema() -> None:
    rule = JsonSchema(schema={"type": "object", "required": ["a"]})
    for text, value in (('{"a": 1}', 1.0), ('```json\n{"a": 1}\n```', 1.0), ("[]", 0.5), ("{", 0)):
        assert rule.part_of(Response(text), ()).value == value
    with pytest.raises(ConfigError, match="schema is invalid"):
        JsonSchema(schema={"type": "nothing"}).part_of(Response("{}"), ())


def test_a_judge_scales_its_score_and_takes_the_last_one() -> None:
    judge = Judge(models=("m",))
    (request,) = judge.requests_of(Response("It is 4.", "4", prompt="2+2?"))
    asked = request.body["messages"][0]["content"]

    assert request.exact
    assert all(words in asked for words in ("2+2?", "It is 4.", "Score: N"))
    assert judge.part_of(Response(""), [said("Score: 3, no, Score: 7")]).value == 0.7


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (said("I would rather not say"), "parse"),
        (said("Score: 11"), "parse"),
        (said(""), "parse"),
        (Failed(Kind.TIMEOUT, "too late"), "timeout"),
        (Failed(Kind.HTTP_5XX, "500"), "http_5xx"),
    ],
)
def test_a_judge_that_fails_or_talks_nonsense_gives_no_number(
    outcome: Done | Failed, why: str
) -> None:
    part = Judge(models=("m",)).part_of(Response(""), [outcome])
    assert (part.valid, part.why) == (False, why)
    assert math.isnan(part.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 7", 0.7),
        ("score: 7", 0.7),
        ("**Score:** 7", 0.7),
        ("**Score: 7**", 0.7),
        ("Final score = 7.", 0.7),
        ("The score is 7", 0.7),
        ("Score: 7/10", 0.7),
        ("Score: 7 out of 10", 0.7),
        ("Score (0-10): 7", 0.7),
        ("7/10", 0.7),
        ("7", 0.7),
        ("Good, but short.\n\n**7**", 0.7),
        ("[[7]]", 0.7),
        ('{"score": 7, "reason": "a score: 9 would need more"}', 0.7),
        ('```json\n{"reason": "fine", "Score": "7"}\n```', 0.7),
        ("Score: 7. For a score of 9 it lacks a proof.", 0.7),
        ("Score: 7.5", 0.75),
        ("Score: 0", 0.0),
        ("<score>7</score>", 0.7),
        ("Score: <score>7</score>", 0.7),
        ("My rating: [[7]]", 0.7),
        ("Score is: 7", 0.7),
        ("Score - 7", 0.7),
        ("| Score | 7 |", 0.7),
        ("Score： 7", 0.7),  # noqa: RUF001
        ("评分：7", 0.7),  # noqa: RUF001
        ("I would rate this response 7 out of 10.", 0.7),
        ("Two errors. I'd give it a 7/10 overall.", 0.7),
        ("Style score: 3\nScore: 7", 0.7),
        ("Final Score: 7\nClarity score: 3", 0.7),
        ("Final Score: 7 / Clarity score: 3", 0.7),
        ("Clarity score: 3\n**Overall score:** 7/10\nStyle score: 4", 0.7),
        # What else may be out of ten is not the score.
        ("Score: 7\n\n(Max score: 10)", 0.7),
        ("Max score: 10\nScore: 7", 0.7),
        ("The maximum score is 10. Score: 7", 0.7),
        ("Your score: 7. Highest possible score: 10.", 0.7),
        ("Score: 7 (max. score: 10)", 0.7),
        ("Score: 7. Passing score: 6.", 0.7),
        ("Score: 7\nPrevious score: 8", 0.7),
        ("Score: 7\n\nA perfect score: 10 would need sources.", 0.7),
        ("Score: 7/10\nTarget score: 9/10", 0.7),
        ("Score: 7\nConfidence score: 9", 0.7),
        ("Human score: 9\nScore: 7", 0.7),
        ("| Max score | 10 |\n| Score | 7 |", 0.7),
        ("得分：7\n最高得分：10", 0.7),  # noqa: RUF001
        ('{"max_score": 10, "Score": 7, "previous_score": 9}', 0.7),
        ('```json\n{"score": 7}\n```\nThe max score: 10', 0.7),
        ('{"evaluation": {"score": 7}}', 0.7),
        ('{"score": 7}\nScore: 7', 0.7),
        ('{"scores": {"clarity": 3, "depth": 4}, "score": 7}', 0.7),
        ("{'score': 7}", 0.7),
        # What judges write.
        (r"\boxed{7}", 0.7),
        (r"Score: $\boxed{7/10}$", 0.7),
        ("Score: <7>", 0.7),
        ("Score: ~~9~~ 7", 0.7),
        ("Score：7分", 0.7),  # noqa: RUF001
        ("Criterion 1: 3/10\nCriterion 2: 4/10\nFinal: 7/10", 0.7),
        ("| criterion | score |\n|---|---|\n| total | 7 |", 0.7),
        ("Score: 8\n\nWait, reconsidering: Score: 7", 0.7),
        ("I almost gave Score: 9, but Score: 7", 0.7),
        ("Instead of Score: 9 it gets Score: 7", 0.7),
        ("Score: 7\n\nScore: 7.0", 0.7),
        ('{"score": 0.7}', 0.07),
    ],
)
def test_a_score_is_read_as_judges_write_it(text: str, value: float) -> None:
    assert Judge(models=("m",)).part_of(Response(""), [said(text)]).value == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        *("<think>I lean to Score: 7", "Not a score: 7", "Final score: 7\nFinal score: 3"),
        "Final score: high\nClarity score: 3",
        *("Score: 11", "Score: -1", "Score: 7-8", "Score: 17-18", "Score: 7/20", "Score: high"),
        *(
            "12/10",
            "I give it a 7, or perhaps 8",
            "Score: N",
            "",
            '{"score": null}',
            "Score: 7 or 8",
        ),
        # A part's score is not the score, nor a percentage one out of ten.
        *("Style score: 3\nScore: 7-8", "Score: 7%", "Score: 7,5", "2 out of 10 facts are right"),
        *("I rate it 3/10 for style and 7/10 for content", "Score: 1e1", "Score: 2024-01-01"),
        # Another score, several, a denied one, or one that is taken back.
        *("Maximum score: 10\nI can't judge it.", "Confidence score: 9", "Accuracy score: 4"),
        *("Score: 10 (max)", "Score (max): 10", "Expected score: 9", "最高得分：10"),  # noqa: RUF001
        *("Score: 5\nScore: 8", '[{"score": 3}, {"score": 9}]', '{"score": 3}\n{"score": 9}'),
        *(
            '{"score": [3]}',
            '{"score": true}',
            '{"score": 3, "score": 9}',
            '{"score": 3}\nScore: 8',
        ),
        *('{"clarity": {"score": 3}, "depth": {"score": 9}}', '{"score": {"value": 7}}'),
        *('{"score": 7, "rating": 3}', "\\boxed{7}\n\\boxed{9}", "7\n8"),
        *("Do not give Score: 9.", "Can't give Score: 9", "Score: 9? No, 3.", "No score: 9"),
        *("Score: 3\n\nNote: had it cited sources, Score: 9", "Is the score: 7?"),
        *("Score: 9... no, 3.", "Score: 9. Actually, 3.", "Score: 9, or rather 3"),
        *(
            "Score: 9 (sorry, 3)",
            "I wouldn't give it 9/10.",
            "I would give it 9/10 if it had sources.",
        ),
        *("It does not deserve 9/10", "Score: 4/5", "Total: 17/30", "The score isn't 7."),
        *("Score: 5 for style, but Score: 8 for content", "Score: 5. No sources. Score: 8"),
    ],
)
def test_a_score_that_is_none_or_out_of_range_names_the_text(text: str) -> None:
    part = Judge(models=("m",)).part_of(Response(""), [said(text)])
    assert (part.valid, part.why) == (False, "parse")
    assert repr(text) in part.error


def test_a_judgement_that_was_cut_off_is_no_judgement() -> None:
    cut = Done("Score: 1", {}, finish="length")
    part = Judge(models=("m",), max_tokens=9).part_of(Response(""), [cut])
    assert (part.valid, part.why) == (False, "truncated")
    assert "max_tokens = 9" in part.error
    monitor = Monitor(model="m").part_of(Response("", extra={"is_correct": True}), [cut])
    assert (monitor.valid, monitor.why) == (False, "truncated")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("true", True),
        ("True.", True),
        ("true, not false", True),
        ("It is not true but false", False),
        ("It is not true.", False),
        ("True or false? True.", True),
        ("There is no doubt: true", True),
        ("It could be false.\n\n**True**", True),
        ("Answer: false", False),
        ('{"label": false}', False),
        ("No.", False),
        ("true and false", None),
        ("perhaps", None),
    ],
)
def test_a_verdict_is_read_with_its_negations(text: str, verdict: bool | None) -> None:
    part = Monitor(model="m").part_of(Response("", extra={"is_correct": True}), [said(text)])
    assert (part.facts["answer"] if part.valid else None) is verdict
    assert part.why == ("parse" if verdict is None else "")


def test_a_rule_that_raises_or_returns_nothing_is_an_invalid_part() -> None:
    class Raises(Rule):
        def part_of(self, response: Response, outcomes: object) -> Part:
            raise KeyError("level")

    class Forgets(Rule):
        def part_of(self, response: Response, outcomes: object) -> Part:
            return None  # type: ignore[return-value]

    class Asks(Rule):
        def requests_of(self, response: Response) -> list[Request]:
            raise ZeroDivisionError("no levels")

    for rule, words in (
        (Raises(), "the rule Raises raised KeyError: 'level'"),
        (Forgets(), "Forgets.part_of returned NoneType; it must return a Part"),
        (Asks(), "the rule Asks raised ZeroDivisionError: no levels"),
    ):
        good = Numeric(weight=0)
        (reward,) = score_all([Response("4", "4")], [rule, good])
        assert (reward.valid, reward.why) == (False, "rule_error")
        assert reward.parts[rule.column].error == words
        assert reward.parts["numeric"].value == 1.0


def test_several_judges_show_their_agreement_and_need_a_quorum() -> None:
    judge = Judge(models=("a", "b", "c"))
    part = judge.part_of(Response(""), [said("Score: 10"), said("Score: 5"), DOWN])
    assert part.value == 0.75
    assert part.facts == {"a": 1.0, "b": 0.5, "c": None, "agreement": 0.5}
    one_left = judge.part_of(Response(""), [said("Score: 10"), DOWN, said("well")])
    assert one_left.why == "unreachable"
    assert Judge(models=("a", "b", "c"), combine="median").part_of(
        Response(""), [said("Score: 9"), said("Score: 0"), said("Score: 8")]
    ).value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("label", "answer", "value"),
    [(True, "True.", -1.0), (True, "false", 1.0), (False, "It is not true but false", -1.0)],
)
def test_the_monitor_pays_by_whether_it_is_right(label: bool, answer: str, value: float) -> None:
    response = Response(TAGGED, extra={"is_correct": label})
    monitor = Monitor(model="m")
    (request,) = monitor.requests_of(response)

    assert "Because of that" in request.body["messages"][0]["content"]
    assert "[true, false, true]" not in request.body["messages"][0]["content"]
    assert monitor.part_of(response, [said(answer)]).value == value
    balanced = Monitor(model="m", true_share=0.25)
    share = 0.25 if label else 0.75
    assert balanced.part_of(response, [said(answer)]).value == pytest.approx(value / share)


def test_a_monitor_without_a_label_pays_for_no_call() -> None:
    monitor = Monitor(model="m")
    for extra in ({}, {"is_correct": None}, {"is_correct": "true"}):
        assert monitor.requests_of(Response("x", extra=extra)) == ()
        assert monitor.part_of(Response("x", extra=extra), ()).why == "missing_field"


def test_an_outage_does_not_pay() -> None:
    """Zero for a failed monitor would be worth more than the penalty of one that works."""
    response = Response(TAGGED, "[true, false, true]", extra={"is_correct": True})
    parts = [Format(), Correctness(), Monitor(model="m")]
    weights = {part.column: part.weight for part in parts}
    worked = [part.part_of(response, [said("true")]) for part in parts]
    failed = [part.part_of(response, [DOWN]) for part in parts]

    def total(found: list[Part]) -> Reward:
        named = zip(weights.items(), found, strict=True)
        return Reward.of({name: (weight, part) for (name, weight), part in named})

    assert total(worked).value == 3.0
    assert not total(failed).valid
    assert total(failed).why == "unreachable"


def test_a_part_that_does_not_count_is_not_the_reason() -> None:
    reward = Reward.of(
        {
            "watched": (0.0, Part.missing("timeout", "late")),
            "counted": (1.0, Part.missing("parse", "no score")),
        }
    )
    assert (reward.valid, reward.why) == (False, "parse")
    fine = Reward.of({"watched": (0.0, Part.missing("timeout", "late")), "counted": (1.0, Part(2))})
    assert (fine.value, fine.valid, fine.why) == (2.0, True, "")


def test_similarity_is_the_cosine_of_the_two_embeddings() -> None:
    def vector(*values: float) -> Done:
        return Done("", {"data": [{"index": 0, "embedding": list(values)}]})

    rule, response = Similarity(model="e"), Response("a", "b")
    assert len(rule.requests_of(response)) == 2
    part = rule.part_of(response, [vector(3, 4), vector(4, 3)])
    assert part.value == pytest.approx(24 / 25)
    assert not rule.part_of(response, [vector(0, 0), vector(4, 3)]).valid
    assert rule.part_of(response, [vector(3, 4), DOWN]).why == "unreachable"


def test_templates_take_what_the_sample_has_and_name_what_it_has_not() -> None:
    response = Response("{truth}", "4", extra={"level": 2})
    assert fill("{response} {level} {{level}} {}", response) == "{truth} 2 {level} {}"
    with pytest.raises(BadRow, match=r"uses \{colour\}, the sample has dataset, level"):
        fill("{colour}", response)


def test_mixed_data_sets_are_each_scored_by_their_own_parts() -> None:
    parts = [Numeric(datasets=("gsm8k",)), Exact(datasets=("capitals*",))]
    responses = [Response("so 4", "4", "gsm8k"), Response("Rome", "Rome", "capitals-1")]
    assert [list(reward.parts) for reward in score_all(responses, parts)] == [
        ["numeric"],
        ["exact"],
    ]
    with pytest.raises(ConfigError, match="'poems', and no part applies to it"):
        score_all([Response("x", "x", "poems")], parts)


def test_what_cannot_be_scored_is_named() -> None:
    with pytest.raises(BadRow, match="response 1 is int, not text"):
        score_all([Response("4", "4"), Response(4, "4")], [Numeric()])
    with pytest.raises(ConfigError, match="share a name"):
        score_all([Response("4", "4")], [Numeric(), Numeric()])
    with pytest.raises(ConfigError, match="no endpoint"):
        score_all([Response("4", "4")], [Judge(models=("m",))])


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({}, "part"),
        ({"part": []}, "part"),
        ({"part": [{"kind": "magic"}]}, "magic"),
        ({"part": [{"kind": "regex", "pattern": "("}]}, "not a regular expression"),
        ({"part": [{"kind": "judge", "models": ["m"], "pattern": "x"}]}, "one, around the score"),
        ({"part": [{"kind": "judge", "models": []}]}, "models"),
        (
            {"part": [{"kind": "judge", "models": ["m"], "low": 5, "high": 5}]},
            "below high",
        ),
        ({"part": [{"kind": "judge", "models": ["m"], "quorum": 2}]}, "quorum"),
        ({"part": [{"kind": "numeric", "wieght": 2}]}, "wieght"),
        ({"part": [{"kind": "numeric"}], "missing": "zero"}, "missing"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(settings_: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        RewardsConfig.of(settings_, "rewards.toml")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_documents_environment_makes_the_documents_reward() -> None:
    plain = RewardsConfig.from_environment({})
    assert [part.kind for part in plain.part] == [
        *("format", "correctness", "correctness", "verbosity"),
    ]
    watched = RewardsConfig.from_environment(
        {
            "TRAIN_WITH_MONITOR": "true",
            "OPENAI_API_KEY": "k",
            "MONITOR_MODEL_NAME": "m",
            "MONITOR_CORRECT_REWARD": "-2",
            "MONITOR_WRONG_REWARD": "0.5",
            "MONITOR_CACHE": "false",
            "K": "-0.5",
        }
    )
    monitor = watched.part[-1]
    assert isinstance(monitor, Monitor)
    assert (monitor.model, monitor.correct, monitor.wrong) == ("m", -2.0, 0.5)
    assert watched.part[3].weight == -0.5
    assert watched.cache is None
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        RewardsConfig.from_environment({"TRAIN_WITH_MONITOR": "true"})
    with pytest.raises(ConfigError, match="K='many'"):
        RewardsConfig.from_environment({"K": "many"})
    with pytest.raises(ConfigError, match="TRAIN_WITH_MONITOR='perhaps'"):
        RewardsConfig.from_environment({"TRAIN_WITH_MONITOR": "perhaps"})


def reference_advantages(
    rewards: list[float], groups: list[int], valid: list[bool]
) -> tuple[list[float], list[bool]]:
    """Group by group, in plain Python."""
    values, usable = [], []
    for reward, group, good in zip(rewards, groups, valid, strict=True):
        peers = [
            other
            for other, name, fine in zip(rewards, groups, valid, strict=True)
            if name == group and fine
        ]
        if not good or len(peers) < 2:
            values.append(0.0)
            usable.append(False)
            continue
        mean = sum(peers) / len(peers)
        spread = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
        values.append((reward - mean) / (spread + 1e-6))
        usable.append(True)
    return values, usable


@given(
    st.lists(
        st.tuples(st.integers(-8, 8), st.integers(0, 4), st.booleans()), min_size=1, max_size=30
    )
)
def test_advantages_equal_the_reference(rows: list[tuple[int, int, bool]]) -> None:
    rewards, groups, valid = ([*column] for column in zip(*rows, strict=True))
    found, usable = group_advantages(rewards, groups, valid)
    expected, expected_usable = reference_advantages(rewards, groups, valid)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert usable.tolist() == expected_usable


def test_a_reward_that_is_not_a_number_is_invalid_by_itself() -> None:
    found, usable = group_advantages([1.0, 0.0, math.nan, math.inf], [0, 0, 0, 0])
    assert usable.tolist() == [True, True, False, False]
    assert np.isfinite(found).all()
    with pytest.raises(Mismatch):
        group_advantages([1.0, 2.0], [0, 0], [True])
    with pytest.raises(Mismatch):
        group_advantages([1.0, 2.0], [0])


@pytest.mark.parametrize("failures", [0.01, 0.05, 0.20])
def test_zeros_for_failures_turn_signs_and_leaving_them_out_does_not(failures: float) -> None:
    """Groups of 8, rewards 0 or 1: does a sample learn in the direction it would have?"""
    random = np.random.default_rng(5)
    groups = np.repeat(np.arange(4000), 8)
    rewards = random.integers(0, 2, groups.size).astype(float)
    failed = random.random(groups.size) < failures
    truth, _ = group_advantages(rewards, groups)
    zeroed, _ = group_advantages(np.where(failed, 0.0, rewards), groups)
    left_out, usable = group_advantages(rewards, groups, ~failed)

    wrong = np.sign(zeroed) * np.sign(truth) < 0
    assert wrong.mean() > 0.3 * failures
    assert not (np.sign(left_out) * np.sign(truth) < 0)[usable].any()
    assert not usable[failed].any()
    assert not left_out[~usable].any()


def test_agreement_counts_what_a_table_would() -> None:
    scores = [0.95, 0.85, 0.65, 0.35, 0.25, math.nan]
    labels = [True, True, False, False, True, True]
    found = agreement(scores, labels)

    assert (found.count, found.missing) == (5, 1)
    assert (found.true_positive, found.false_positive) == (2, 1)
    assert (found.true_negative, found.false_negative) == (1, 1)
    assert found.accuracy == 0.6
    # Chance: 3/5 said true, 3/5 are true: 9/25 + 4/25.
    assert found.kappa == pytest.approx((0.6 - 13 / 25) / (1 - 13 / 25))
    squares = [0.05**2, 0.15**2, 0.65**2, 0.35**2, 0.75**2]
    assert found.brier == pytest.approx(sum(squares) / 5)
    assert sum(bin.count for bin in found.bins) == 5
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        agreement([3.0], [True])
    assert agreement([0.9, 0.8], [True, True]).kappa is None
