"""The query-mutation environment: pipelines, failures, guard, reproducibility, learning signal."""

import asyncio
import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batchwright.calls import Done, Failed, Kind, Outcome
from batchwright.calls.queries import NO_ANSWER, mutated_text
from batchwright.calls.simulator.ngrams import hashed_ngrams
from batchwright.calls.simulator.questions import Target, mutate
from batchwright.envs import BatchedQueryMutationEnv, QueryMutationEnv, check_env
from batchwright.envs.query_mutation.env import MutationPipelines, Score, Turn
from batchwright.envs.query_mutation.operators import (
    NOOP,
    OPERATORS,
    STOP,
    load_operators,
)
from batchwright.envs.questions import Question, load_questions
from batchwright.errors import BadFile, BadLoss, BadRow, ConfigError, Mismatch, NoServer
from batchwright.rl import Runner, policy_for
from batchwright.train.query_mutator.compare import compare_strategies
from batchwright.train.query_mutator.rollout import OverlappingRunner

QUESTIONS = [
    Question("What is the capital of France?", "Paris", "geography"),
    Question("How many metres are in 2 kilometres?", "2000", "units"),
    Question("Which planet is closest to the Sun?", "Mercury", "science"),
]
NAMES = [operator.name for operator in OPERATORS]


class World:
    """A mutator, a target and a rating of known behaviour, which count what is asked."""

    def __init__(self, fails: dict[str, Kind] | None = None) -> None:
        self.fails = fails or {}
        self.asked: Counter[str] = Counter()
        self.seeds: list[int] = []
        self.target_model = Target(QUESTIONS)

    async def mutator(self, prompt: str, seed: int) -> Outcome:
        self.asked["mutator"] += 1
        self.seeds.append(seed)
        await asyncio.sleep(0)
        if "mutator" in self.fails:
            return Failed(self.fails["mutator"], "down")
        name = next(
            o.name for o in OPERATORS if o.asks and prompt.startswith(o.template.partition("\n")[0])
        )
        question = re.split(r"Question(?: A)?: ", prompt)[-1]
        return Done(mutate(name, question, QUESTIONS[0].question), {})

    async def target(self, prompt: str, seed: int) -> Outcome:
        self.asked["target"] += 1
        await asyncio.sleep(0)
        if "target" in self.fails:
            return Failed(self.fails["target"], "down")
        return Done(self.target_model.reply(prompt), {})

    async def rate(self, question: Question, wording: str, answer: str) -> Score:
        if "rate" in self.fails:
            return Score(float("nan"), "reward_parse")
        return Score(float(question.answer in answer))


async def hashed(texts: Sequence[str]) -> NDArray[np.float32]:
    return hashed_ngrams(texts, 32)


def build(world: World, num_envs: int = 3, **more: Any) -> MutationPipelines:
    given: dict[str, Any] = {"order": "each", "max_steps": 2, **more}
    return MutationPipelines(
        QUESTIONS,
        world.mutator,
        world.target,
        world.rate,
        num_envs,
        run=asyncio.run,
        embed=hashed,
        dim=32,
        **given,
    )


def actions(*names: str) -> NDArray[np.int64]:
    return np.array([NAMES.index(name) for name in names])


def test_the_right_operator_gains_a_point_and_stopping_costs_nothing() -> None:
    env = build(World(), cost=0.125)
    env.reset()
    step = env.step(actions("politeness", "politeness", "stop"))

    assert step.reward.tolist() == [0.875, -0.125, 0.0]
    assert step.info["score"].tolist() == [1.0, 0.0, 0.0]
    assert step.terminated.tolist() == [False, False, True]
    assert step.valid.all()
    assert not step.truncated.any()


def test_rewards_of_an_episode_sum_to_what_its_wording_gained() -> None:
    world = World()
    turns: list[Turn] = []
    env = build(world, num_envs=2, order="drawn", on_turn=turns.append, seed=5)
    env.reset()
    random = np.random.default_rng(3)
    for _ in range(40):
        env.step(random.integers(0, env.num_actions, 2))
    episodes: dict[tuple[int, int], list[Turn]] = {}
    for turn in turns:
        episodes.setdefault((turn.env, turn.episode), []).append(turn)
    assert len(episodes) > 20
    for played in list(episodes.values())[:-2]:
        first = 0.0  # no question of the set is understood as it stands
        assert sum(turn.gain for turn in played) == played[-1].score - first


def test_features_show_the_wording_the_step_and_the_last_operator_and_no_score() -> None:
    env = build(World())
    first = env.reset()["features"]
    np.testing.assert_array_equal(first[:, :32], hashed_ngrams([q.question for q in QUESTIONS], 32))
    assert not first[:, 32:].any()
    after = env.step(actions("politeness", "noop", "shorten")).obs["features"]
    assert after[:, 32].tolist() == [0.5, 0.5, 0.5]
    assert after[:, 33:].argmax(1).tolist() == actions("politeness", "noop", "shorten").tolist()
    np.testing.assert_array_equal(
        after[0, :32], hashed_ngrams(["Please answer: What is the capital of France?"], 32)[0]
    )
    np.testing.assert_array_equal(after[1, :32], first[1, :32])


def test_noop_and_stop_ask_no_mutator() -> None:
    world = World()
    env = build(world)
    env.reset()
    env.step(actions("noop", "stop", "noop"))
    assert world.asked == {"target": 3 + 2}


@pytest.mark.parametrize(
    ("fails", "why", "wording", "answer"),
    [
        ({"mutator": Kind.TIMEOUT}, "mutator_timeout", QUESTIONS[0].question, "Unclear."),
        (
            {"target": Kind.UNREACHABLE},
            "target_unreachable",
            "Please answer: What is the capital of France?",
            NO_ANSWER,
        ),
    ],
)
def test_a_failure_keeps_the_question_or_a_message_and_is_marked(
    fails: dict[str, Kind], why: str, wording: str, answer: str
) -> None:
    world = World()
    env = build(world)
    env.reset()
    world.fails = fails
    step = env.step(actions("politeness", "noop", "stop"))

    assert step.info["why"][0] == why
    assert step.info["wording"][0] == wording
    assert step.info["answer"][0] == answer
    assert not step.valid[0]
    assert step.reward[0] == 0.0
    assert step.valid[2]
    assert env.reasons[why] >= 1
    world.fails = {}
    # The score before is not known, so what this step gained is not known either.
    again = env.step(actions("politeness", "stop", "stop"))
    assert again.valid[0] == ("mutator" in fails)
    assert again.info["why"][0] == ("" if "mutator" in fails else f"before_{why}")


def test_every_invalid_step_has_a_reason_and_the_counts_are_those_of_the_turns() -> None:
    class Flaky(World):
        async def target(self, prompt: str, seed: int) -> Outcome:
            failing = self.asked["target"] % 4 == 1
            outcome = await super().target(prompt, seed)
            return Failed(Kind.TIMEOUT, "") if failing else outcome

        async def mutator(self, prompt: str, seed: int) -> Outcome:
            if seed % 5 == 0:
                return Done("Tell me about cedar trees and otters", {})
            return Failed(Kind.HTTP_5XX, "") if seed % 5 == 1 else Done(prompt[-40:], {})

    turns: list[Turn] = []
    env = build(Flaky(), order="drawn", on_turn=turns.append, max_steps=3, seed=3)
    env.reset()
    random = np.random.default_rng(5)
    for _ in range(40):
        env.step(random.integers(0, env.num_actions, 3))
    invalid = [turn for turn in turns if not turn.valid]

    assert env.counts["steps"] == len(turns) == 120
    assert env.counts["invalid"] == len(invalid)
    assert env.reasons == Counter(turn.why for turn in invalid)
    assert env.reasons.keys() >= {
        *("target_timeout", "mutator_http_5xx", "before_target_timeout"),
    }
    assert not env.reasons.keys() & {"", "guard"}
    assert {turn.why for turn in turns if turn.valid} == {"", "guard"}
    assert env.counts["failed_starts"] > 0


def test_a_rating_that_fails_spoils_the_step() -> None:
    world = World()
    env = build(world)
    env.reset()
    world.fails = {"rate": Kind.BAD_BODY}
    step = env.step(actions("politeness", "noop", "stop"))
    assert step.valid.tolist() == [False, False, True]
    assert step.info["why"].tolist() == ["reward_parse", "reward_parse", ""]


def test_rewritings_that_leave_the_question_or_give_the_answer_are_turned_down() -> None:
    world = World()
    env = build(world, least_similarity=0.3, cost=0.25)

    async def strays(prompt: str, seed: int) -> Outcome:
        if "France" in prompt:
            return Done("Tell me about cedar trees and otters", {})
        if "metres" in prompt:
            return Done("How many metres are in 2 kilometres, is it 2000?", {})
        return Done("Please: which planet is closest to the Sun?", {})

    env._ask_mutator = strays
    env.reset()
    step = env.step(actions("paraphrase", "paraphrase", "paraphrase"))
    assert step.info["why"].tolist() == ["guard", "guard", ""]
    assert step.info["wording"].tolist()[:2] == [q.question for q in QUESTIONS[:2]]
    assert step.valid.all()
    assert step.reward.tolist()[:2] == [-0.25, -0.25]
    assert env.counts["guard"] == 2


def test_a_mutator_that_talks_nonsense_is_counted() -> None:
    world = World()
    env = build(world)

    async def mutters(prompt: str, seed: int) -> Outcome:
        return Done(" ... ", {})

    env._ask_mutator = mutters
    env.reset()
    step = env.step(actions("paraphrase", "stop", "stop"))
    assert step.info["why"][0] == "mutator_parse"
    assert not step.valid[0]


def test_equal_seeds_make_equal_runs_and_a_state_goes_on_to_the_bit() -> None:
    def run(env: MutationPipelines, steps: int) -> list[list[Any]]:
        random = np.random.default_rng(7)
        rows = []
        for _ in range(steps):
            step = env.step(random.integers(0, env.num_actions, env.num_envs))
            rows.append([step.obs["features"].tobytes(), step.reward.tolist(), step.done.tolist()])
        return rows

    worlds = [World(), World(), World()]
    one, other, third = (build(w, num_envs=2, order="drawn", seed=9) for w in worlds)
    one.reset()
    other.reset()
    assert run(one, 20) == run(other, 20)
    assert worlds[0].seeds == worlds[1].seeds
    assert len(set(worlds[0].seeds)) == len(worlds[0].seeds)
    third.load_state_dict(one.state_dict())
    assert run(third, 10) == run(one, 10)
    with pytest.raises(Mismatch):
        build(World(), num_envs=3).load_state_dict(one.state_dict())


def test_one_environment_lives_the_same_life_beside_others() -> None:
    few, many = (build(World(), num_envs=n, order="drawn", seed=3) for n in (1, 3))
    few.reset()
    many.reset()
    for name in ("politeness", "shorten", "stop", "expand", "noop", "stop"):
        one, other = few.step(actions(name)), many.step(actions(name, "stop", "noop"))
        assert one.obs["features"][0].tobytes() == other.obs["features"][0].tobytes()
        assert one.reward[0] == other.reward[0]


def test_the_documents_forms_work() -> None:
    env = build(World())
    assert env.batch_reset().shape == (3, 33 + len(OPERATORS))
    features, rewards, dones, infos = env.batch_step([NAMES.index("politeness"), 9, 10])
    assert features.shape == (3, 33 + len(OPERATORS))
    assert rewards.tolist() == [1.0, 0.0, 0.0]
    assert dones.tolist() == [False, False, True]
    assert infos[0]["wording"] == "Please answer: What is the capital of France?"
    assert [info["valid"] for info in infos] == [True, True, True]


def test_environments_are_made_by_the_names_of_their_models() -> None:
    one = QueryMutationEnv(target_model="sim", mutator_model="sim", seed=5)
    many = BatchedQueryMutationEnv([one] * 3, batch_size=8)
    try:
        np.testing.assert_array_equal(one.reset(), many.batch_reset()[0])
        for action in (6, 2, 8, 9, 0, 10, 3):
            features, reward, done, info = one.step(action)
            batch = many.batch_step([action, 1, 10])
            np.testing.assert_array_equal(features, batch[0][0])
            assert (reward, done) == (batch[1][0], batch[2][0])
            assert info["wording"] == batch[3][0]["wording"]
            assert info["valid"]
        check_env(many, steps=20)
        with pytest.raises(Mismatch, match="made alike, got 2 values of seed"):
            BatchedQueryMutationEnv([one, dataclasses.replace(one, seed=6)])
        with pytest.raises(ConfigError, match="got no environments"):
            BatchedQueryMutationEnv([])
        with pytest.raises(ConfigError, match="call reset"):
            QueryMutationEnv().step(0)
    finally:
        one.close()
        many.close()


def test_an_environment_of_a_server_that_is_not_there_says_so_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")
    with pytest.raises(NoServer, match=r"cannot connect to ollama://127.* ollama serve"):
        QueryMutationEnv(target_model="sim", mutator_model="qwen2.5:3b").reset()


def test_actions_that_are_none_do_not_crash() -> None:
    env = build(World())
    env.reset()
    step = env.step(np.array([99, -1, 3]))
    assert step.info["operator"].tolist()[:2] == ["noop", "noop"]
    assert env.counts["invalid_action"] == 2
    with pytest.raises(Mismatch):
        env.step(np.array([0]))


class Cassette:
    """Failures by place, as a run would have noted them."""

    def __init__(self, known: dict[str, str] | None = None) -> None:
        self.noted: dict[str, str] = {}
        self._known = known or {}

    def known(self, place: str) -> str | None:
        return self._known.get(place)

    def note(self, place: str, why: str) -> None:
        if why:
            self.noted[place] = why


def test_a_replayed_run_fails_in_the_same_places() -> None:
    class Flaky(World):
        async def mutator(self, prompt: str, seed: int) -> Outcome:
            return (
                Failed(Kind.TIMEOUT, "") if seed % 3 == 0 else await super().mutator(prompt, seed)
            )

        async def target(self, prompt: str, seed: int) -> Outcome:
            failing = self.asked["target"] % 5 == 4
            outcome = await super().target(prompt, seed)
            return Failed(Kind.HTTP_5XX, "") if failing else outcome

    def run(world: World, failures: Cassette) -> list[tuple[bytes, list[float], list[str]]]:
        env = build(world, num_envs=3, order="drawn", failures=failures, seed=1)
        env.reset()
        random = np.random.default_rng(2)
        rows = []
        for _ in range(12):
            step = env.step(random.integers(0, 9, 3))
            rows.append((step.valid.tobytes(), step.reward.tolist(), step.info["why"].tolist()))
        return rows

    first = Cassette()
    live = run(Flaky(), first)
    assert {why for *_, whys in live for why in whys} >= {"mutator_timeout", "target_http_5xx"}
    assert run(World(), Cassette(first.noted)) == live


def test_baselines_may_rewrite_as_often_as_the_policy_and_it_is_compared_with_the_best() -> None:
    world = World()
    world.target_model = Target(QUESTIONS, {q.category: ("polite", "passive") for q in QUESTIONS})
    models = SimpleNamespace(used=world.asked)

    def make_env(
        on: Sequence[Question], num_envs: int = 3, order: str = "each"
    ) -> MutationPipelines:
        return build(world, num_envs, order=order, seed=8)

    def policy(features: NDArray[np.float32], step: int) -> NDArray[np.int64]:
        return np.full(len(features), NAMES.index(("politeness", "passive")[step]))

    splits = dict.fromkeys(("train", "valid", "test"), QUESTIONS)
    found = compare_strategies(
        cast(Any, models), make_env, splits, policy, seed=1, bandit_episodes=64
    )
    by_name = {one.name: one for one in found.strategies}
    assert by_name["ppo"].accuracy == 1.0
    assert by_name["random"].plan in ("any operator", "any operator then any operator")
    assert by_name["best single"].accuracy == 0.0
    assert all(one.rewritings <= 2 for one in found.strategies)
    assert by_name["bandit"].rewritings == 2.0
    assert found.versus is not None
    best = max(one.accuracy for one in found.strategies if one.name != "ppo")
    assert found.versus.gain == pytest.approx(1.0 - best)
    assert by_name[found.versus.baseline].accuracy == best
    assert (found.versus.high, found.versus.questions) == (1.0, 3)


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("What is it?", "What is it?"),
        ('"What is it?"', "What is it?"),
        ("Rewritten question: What is it?\n\nI kept the meaning.", "What is it?"),
        ("**Question:** What is it?", "What is it?"),
        ('{"mutated_query": "What is it?"}', "What is it?"),
        (
            'Sure:\n```json\n{"why": "shorter", "mutated_query": "What\\nis it?"}\n```',
            "What\nis it?",
        ),
        ('{"question": "What is it?"}', "What is it?"),
        ('{"mutated_query": 3}', None),
        ('{"mutated_query": "What', None),
        ("{broken", "{broken"),
        ('What does {x} mean in {"a": "b"}?', 'What does {x} mean in {"a": "b"}?'),
        ("", None),
        ("\n \n", None),
        ("?!", None),
    ],
)
def test_the_question_is_found_in_the_reply_of_a_mutator(text: str, question: str | None) -> None:
    assert mutated_text(text) == question


def test_users_add_operators_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "operators.toml"
    path.write_text(
        '[[operator]]\nname = "rhyme"\ntemplate = "Make it rhyme: {question} {x}"\n'
        '[[operator]]\nname = "shorten"\ntemplate = "Shorter than {other}: {question}"\n'
    )
    found = load_operators(path)
    names = [operator.name for operator in found]
    assert names == [*NAMES[:-1], "rhyme", "stop"]
    assert found[-1] is STOP
    assert found[names.index("noop")] is NOOP
    rhyme, shorten = (found[names.index(name)] for name in ("rhyme", "shorten"))
    assert rhyme.prompt("{other}?", "o") == "Make it rhyme: {other}? {x}"
    assert shorten.prompt("q", "o") == "Shorter than o: q"


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "[[operator]]\nname = 'a'",
        "[[operator]]\nname = 'a'\ntemplate = 'no field'",
        "[[operator]]\nname = 'stop'\ntemplate = '{question}'",
        "[[operator]]\nname = 'a'\ntemplate = '{question}'\ncolour = 1",
        "[[operator",
    ],
)
def test_a_wrong_operator_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "operators.toml"
    path.write_text(text)
    with pytest.raises(BadFile, match=r"operators\.toml"):
        load_operators(path)


def test_the_shipped_questions_are_many_distinct_and_disjoint() -> None:
    parts = {part: load_questions("shipped", part) for part in ("train", "valid", "test")}
    everything = load_questions("shipped", "all")
    assert len(everything) >= 300
    assert sum(map(len, parts.values())) == len(everything)
    assert len({q.question for q in everything}) == len({q.id for q in everything})
    assert len({q.question for q in everything}) == len(everything)
    assert {q.category for q in everything} == {
        *("arithmetic", "geography", "units", "dates", "science"),
    }
    for part in parts.values():
        assert {q.category for q in part} == {q.category for q in everything}


def test_the_shipped_arithmetic_is_right() -> None:
    for q in load_questions("shipped", "all"):
        numbers = [int(n) for n in re.findall(r"\d+", q.question)]
        if "gets" in q.question and "more. How many" in q.question:
            assert int(q.answer) == sum(numbers)
        elif "takes out" in q.question:
            assert int(q.answer) == numbers[0] - numbers[1]
        elif "packs" in q.question:
            assert int(q.answer) == numbers[0] * numbers[1]
        elif "shared equally" in q.question:
            assert int(q.answer) * numbers[1] == numbers[0]
        elif "percent of" in q.question:
            assert int(q.answer) * 100 == numbers[0] * numbers[1]


def test_files_of_other_shapes_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    gsm = tmp_path / "gsm.jsonl"
    gsm.write_text('{"question": "2+2?", "answer": "it is 2+2 #### 4"}\n' * 1)
    (one,) = load_questions(str(gsm), "all")
    assert one.answer == "4"
    gsm.write_text('{"question": "2+2?"}\n')
    with pytest.raises(BadRow, match="no answer"):
        load_questions(str(gsm), "all")
    gsm.write_text('{"question": "2+2?", "answer": "4", "split": "train"}\n')
    with pytest.raises(ConfigError, match="no question in its test split"):
        load_questions(str(gsm), "test")
    with pytest.raises(ConfigError, match="no question"):
        build_empty()


def build_empty() -> MutationPipelines:
    world = World()
    return MutationPipelines(
        *([], world.mutator, world.target, world.rate, 1), run=asyncio.run, embed=hashed, dim=32
    )


def test_overlapping_rollouts_take_the_same_steps_and_wait_for_nobody() -> None:
    class Uneven(World):
        """Environment-independent answers, at very different speeds."""

        running = most = 0

        async def target(self, prompt: str, seed: int) -> Outcome:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.002 if "France" in prompt else 0.0)
            self.running -= 1
            return await super().target(prompt, seed)

    plain, ahead = (build(w, order="drawn", seed=4) for w in (World(), Uneven()))
    policy = policy_for(plain, seed=1)
    one, other = Runner(plain, 6, seed=2), OverlappingRunner(ahead, 6, seed=2)
    for _ in range(3):
        expected, found = one.collect(policy), other.collect(policy)
        for name in ("actions", "rewards", "terminated", "valid", "values", "last_value"):
            np.testing.assert_array_equal(getattr(expected, name), getattr(found, name))
        np.testing.assert_array_equal(expected.obs["features"], found.obs["features"])
        assert sorted(expected.episode_returns) == sorted(found.episode_returns)
    assert one.step == other.step


def test_a_policy_that_is_no_number_stops_an_overlapping_rollout_instead_of_hanging() -> None:
    env = build(World(), order="drawn")
    policy = policy_for(env)
    with torch.no_grad():
        policy.actor.actions.fill_(torch.nan)
    with pytest.raises(BadLoss, match="not finite"):
        OverlappingRunner(env, 4).collect(policy)
