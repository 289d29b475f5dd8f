"""reasoning-gym as a stream: its answers, its verifiers, its levels, and exact state."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import Endpoint, Pool
from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import BadRow, ConfigError, Mismatch, NoServer
from batchwright.streaming import ReasoningGymStream, StreamSample, model_answers

if find_spec("reasoning_gym") is None:
    pytest.skip("reasoning-gym is missing: pip install 'batchwright[gym]'", allow_module_level=True)

# Of the package: it leaves files open, and runs programs that warn.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::SyntaxWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

BYTES = load_tokenizer("bytes")
TWO = ("leg_counting", "chain_sum")
HASHED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
NO_ANSWER = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
"""Tasks that only a verifier comes with."""
UNMADE = ("knight_swap",)
"""Tasks whose levels contradict their own settings: no question can be made."""
SLOW = ("sokoban",)
"""A question of the easiest level takes the package longer than a test may."""


def texts(samples: Sequence[StreamSample]) -> list[tuple[str, list[int], float | None]]:
    return [(s.sample_id, s.input_ids.tolist(), s.reward) for s in samples]


def first(tasks: Sequence[str], count: int, **more: Any) -> list[StreamSample]:
    return list(islice(ReasoningGymStream(tasks, **more), count))


def test_a_sample_is_a_masked_question_and_its_answer_scored_by_the_verifier() -> None:
    stream = ReasoningGymStream(["leg_counting"], num_samples=3)
    samples = list(stream)
    ids, mask = samples[0].input_ids.tolist(), samples[0].loss_mask.tolist()
    begin = mask.index(1)

    assert bytes(ids[:begin]).decode().startswith("Your task is to count how many legs")
    assert bytes(ids[begin:-1]).decode().isdigit()
    assert not any(mask[:begin])
    assert all(mask[begin:])
    assert [(s.reward, s.success, s.source) for s in samples] == [(1.0, True, "gym")] * 3
    assert samples[0].dataset_id == "reasoning_gym/leg_counting"
    assert (stream.metrics.episodes_completed, stream.metrics.success_rate) == (3, 1.0)


def test_tasks_take_turns_and_no_question_comes_twice() -> None:
    samples = first(TWO, 40)

    assert [s.dataset_id.rpartition("/")[2] for s in samples] == [*TWO] * 20
    assert len({tuple(s.input_ids.tolist()) for s in samples}) == 40


def test_a_data_set_of_the_package_is_followed_by_another() -> None:
    stream = ReasoningGymStream(["chain_sum"], difficulty_range=(0.0, 0.0))
    state = stream.state_dict()
    found = []
    for position in (0, 499, 500, 1000):
        stream.load_state_dict({**state, "position": position})
        found.append(next(iter(stream)))

    assert len({tuple(s.input_ids.tolist()) for s in found}) == 4


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, 19), seed=st.integers(0, 3))
def test_a_resumed_stream_gives_what_an_uninterrupted_one_does(cut: int, seed: int) -> None:
    straight = first(TWO, 20, seed=seed)
    broken = ReasoningGymStream(TWO, seed=seed)
    taken = list(islice(broken, cut))
    resumed = ReasoningGymStream(TWO, seed=seed)
    resumed.load_state_dict(broken.state_dict())
    taken += islice(resumed, 20 - cut)

    assert texts(taken) == texts(straight)
    assert resumed.metrics.samples_produced == 20


def test_async_for_gives_the_same() -> None:
    async def collected() -> list[StreamSample]:
        return [sample async for sample in ReasoningGymStream(TWO, num_samples=8)]

    assert texts(asyncio.run(collected())) == texts(first(TWO, 8))


def test_the_state_of_other_settings_is_refused() -> None:
    state = ReasoningGymStream(TWO).state_dict()
    with pytest.raises(Mismatch, match="make it with the settings it was saved with"):
        ReasoningGymStream(TWO, seed=7).load_state_dict(state)


def test_difficulty_is_the_level_of_the_tasks_own_curriculum() -> None:
    ranges = [(0.0, 0.0), (0.6, 0.7), (1.0, 1.0), (0.0, 1.0)]
    found = [first(["gcd"], 40, difficulty_range=asked) for asked in ranges]
    seen = [sorted({round(s.difficulty or 0.0, 2) for s in samples}) for samples in found]
    lengths = [sum(s.length for s in samples) for samples in found]

    assert seen == [[0.0], [0.67], [1.0], [0.0, 0.33, 0.67, 1.0]]
    assert lengths[0] < lengths[1] < lengths[2], "harder questions have longer numbers"


def test_the_nearest_level_is_taken_where_a_range_has_none_and_it_says_so() -> None:
    (sample,) = first(["caesar_cipher"], 1, difficulty_range=(0.05, 0.15))
    assert sample.difficulty == 0.0
    (sample,) = first(["caesar_cipher"], 1, difficulty_range=(0.9, 1.0))
    assert sample.difficulty == pytest.approx(1 / 3), "the package refuses its own harder levels"


def test_a_task_without_levels_has_no_difficulty() -> None:
    assert {s.difficulty for s in first(["gsm_symbolic"], 3)} == {None}


def test_an_unknown_task_is_answered_with_close_matches() -> None:
    with pytest.raises(ConfigError, match=r"no task 'leg_count'.*did you mean leg_counting"):
        ReasoningGymStream(["leg_count"])
    with pytest.raises(ConfigError, match="tasks must be names"):
        ReasoningGymStream([])


def test_wrong_answers_are_failures_with_the_verifiers_score() -> None:
    samples = first(["chain_sum"], 40, policy=lambda questions: ["no idea"] * len(questions))

    assert {s.success for s in samples} == {False}
    assert {s.episode_status for s in samples} == {"failure"}
    assert all(s.reward is not None and s.reward < 1.0 for s in samples)


def test_a_question_without_an_answer_is_no_sample() -> None:
    def every_other(questions: Sequence[str]) -> list[str | None]:
        return [None if number % 2 else "7" for number in range(len(questions))]

    stream = ReasoningGymStream(
        ["chain_sum"], policy=every_other, num_samples=20, on_bad_row="skip"
    )
    assert len(list(stream)) == stream.metrics.samples_errored == 10
    with pytest.raises(BadRow, match="question 1 of chain_sum got no answer"):
        first(["chain_sum"], 20, policy=every_other)
    silent = ReasoningGymStream(
        ["chain_sum"], policy=lambda questions: [None] * len(questions), on_bad_row="skip"
    )
    with pytest.raises(BadRow, match="100 questions in a row"):
        next(iter(silent))


def test_a_model_answers_through_a_pool() -> None:
    def solve(requests: Sequence[Any]) -> list[str]:
        asked = [request.body["messages"][0]["content"] for request in requests]
        sums = [text.split(":")[-1].replace("=", "").replace("?", "") for text in asked]
        return [str(eval(text)) for text in sums]

    with Pool(Endpoint(solve)) as pool:
        samples = first(["chain_sum"], 8, policy=model_answers(pool, "m", temperature=0))

    assert [s.reward for s in samples] == [1.0] * 8


def test_a_model_that_answers_nothing_is_an_error() -> None:
    def fail(requests: Sequence[Any]) -> list[str]:
        raise RuntimeError("out of memory")

    with Pool(Endpoint(fail), tries=1, deadline_s=5) as pool, pytest.raises(NoServer, match="all"):
        first(["chain_sum"], 1, policy=model_answers(pool, "m"))


@pytest.mark.parametrize("task", NO_ANSWER)
def test_a_task_that_has_only_a_verifier_needs_a_model(task: str) -> None:
    with pytest.raises(ConfigError, match=f"verifier for {task}, but no answer of its own"):
        first([task], 1, difficulty_range=(0.0, 0.0))


def test_what_the_package_cannot_make_is_an_error_or_skipped_and_counted() -> None:
    hardest = (1.0, 1.0)
    with pytest.raises(BadRow, match="spell_backward at level 4 could not be made: IndexError"):
        first(["spell_backward"], 1, difficulty_range=hardest)
    stream = ReasoningGymStream(
        ["spell_backward", "chain_sum"], difficulty_range=hardest, on_bad_row="skip", num_samples=6
    )
    assert {s.dataset_id for s in stream} == {"reasoning_gym/chain_sum"}
    assert stream.metrics.samples_errored == 3


DIGEST = """
import hashlib
from itertools import islice
from batchwright.streaming import ReasoningGymStream
found = [(s.sample_id, s.input_ids.tobytes()) for s in islice(ReasoningGymStream(TASKS), 12)]
print(hashlib.sha256(repr(found).encode()).hexdigest())
"""


@pytest.mark.slow
def test_questions_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"word_ladder in every process unless.*PYTHONHASHSEED"):
        ReasoningGymStream(["word_ladder"])
    plain = DIGEST.replace("TASKS", repr(TWO))
    hashed = DIGEST.replace("TASKS", repr(HASHED))
    digests = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for script, env in ((plain, {}), (plain, {}), *[(hashed, {"PYTHONHASHSEED": "0"})] * 2)
    ]

    assert digests[0] == digests[1]
    assert digests[2] == digests[3] != digests[0]


@pytest.mark.slow
def test_every_task_gives_samples_but_for_those_that_are_named_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reasoning_gym.factory import DATASETS

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    failed = {}
    for task in sorted(DATASETS.keys() - {"composite", *NO_ANSWER, *SLOW}):
        try:
            samples = first([task], 2, difficulty_range=(0.0, 0.0))
            assert [s.reward for s in samples] == [1.0, 1.0]
        except (BadRow, AssertionError) as error:
            failed[task] = str(error)

    assert failed.keys() == set(UNMADE)
