"""The reward function called exactly as OpenRLHF calls it, and its HTTP form over a real socket.

OpenRLHF itself needs a GPU build of its dependencies; the calls below are those of its
SingleTurnAgentExecutor: lists of one, positional, each in a thread of asyncio's executor, and every
exception swallowed.
"""

import asyncio
import importlib.util
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls.simulator import RunningSimulator, Simulator
from batchwright.errors import BudgetExceeded, ConfigError, Mismatch, NoServer
from batchwright.integrations.openrlhf import RewardFunction, responses_of
from batchwright.rewards import RewardsConfig
from batchwright.rewards import compute as edges
from raw_server import RawServer, Seen

EXAMPLE = Path(__file__).parents[1] / "examples" / "rewards" / "openrlhf.py"
COMMAND = Path(sys.executable).parent / "batchwright"
TOML = """
endpoints = ["{url}/v1"]
deadline_s = 10
missing = {missing}
[[part]]
kind = "judge"
models = ["sim-judge"]
[[part]]
kind = "numeric"
weight = 2.0
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningSimulator]:
    with Simulator(knee=64, latency_s=0.01, script={"say nothing": "empty"}).running() as url:
        yield url


@pytest.fixture
def loaded(
    server: RunningSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The example, loaded by its path as OpenRLHF loads it."""
    path = tmp_path / "rewards.toml"
    path.write_text(TOML.format(url=server, missing='"raise"'))
    monkeypatch.setenv("BATCHWRIGHT_REWARDS", str(path))
    spec = importlib.util.spec_from_file_location("reward_func", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = pickle.loads(pickle.dumps(module.reward_func))
    yield function
    edges.close_scorers()


def config_of(url: str, missing: Any = "raise", **more: Any) -> RewardsConfig:
    part = [{"kind": "judge", "models": ["sim-judge"]}, {"kind": "numeric", "weight": 2.0}]
    return RewardsConfig.of({"part": part, "endpoints": [f"{url}/v1"], "missing": missing, **more})


async def as_openrlhf(function: Any, samples: list[tuple[str, str, str]]) -> list[Any]:
    """Rewards of samples by threads, a list of one each; None where the function raised."""

    async def one(query: str, prompt: str, label: str) -> Any:
        try:
            call = asyncio.to_thread(function, [query], [prompt], [label])
            (info,) = await asyncio.gather(call)
            return {
                "reward": info.get("rewards"),
                "scores": info.get("scores") or info.get("rewards"),
                "extra_logs": info.get("extra_logs") or {},
            }
        except Exception:
            return None

    return await asyncio.gather(*(one(*sample) for sample in samples))


def test_openrlhfs_threads_get_rewards_and_logs_of_one_shape(loaded: Any) -> None:
    samples = [(f"<s>{n}+1? It is {n + 1}.</s>", f"{n}+1?", str(n + 1)) for n in range(24)]

    found = asyncio.run(as_openrlhf(loaded, samples))

    assert all(isinstance(info["reward"], torch.Tensor) for info in found)
    rewards = torch.cat([info["reward"] for info in found])
    logs = [info["extra_logs"] for info in found]
    assert rewards.shape == (24,)
    assert all(log["numeric_reward"].tolist() == [2.0] for log in logs)
    judged = torch.cat([log["judge_reward"] for log in logs])
    torch.testing.assert_close(rewards, judged + 2.0)
    assert len({tuple(log) for log in logs}) == 1
    # It merges the logs of many calls by concatenation.
    merged = {key: torch.cat([log[key] for log in logs]) for key in logs[0]}
    assert merged["valid"].tolist() == [1.0] * 24


def test_calls_of_openrlhfs_threads_are_in_flight_together() -> None:
    enough = asyncio.Event()

    async def waits_for_three(seen: Seen) -> None:
        if seen.body is None:
            await seen.reply(404)
            return
        if slow.open >= 3:
            enough.set()
        await enough.wait()
        await seen.answer("Score: 10")

    samples = [(f"q {n}", "q", str(n)) for n in range(12)]
    with RawServer(waits_for_three) as slow:
        function = RewardFunction(config_of(slow.url.removesuffix("/v1")))
        found = asyncio.run(as_openrlhf(function, samples))
        function.close()
    assert [info["reward"].tolist() for info in found] == [[3.0]] * 12


def test_a_missing_reward_is_loud_once_and_no_number(
    loaded: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [("q say nothing 1", "q", "1"), ("q 2", "q", "2"), ("q say nothing 3", "q", "3")]
    found = asyncio.run(as_openrlhf(loaded, samples))
    assert found[0] is None
    assert found[2] is None
    assert found[1]["reward"].isfinite().all()
    printed = capsys.readouterr().err
    assert printed.count("batchwright: no reward: 1 of 1 rewards are missing") == 1


def test_a_number_is_taken_only_if_it_was_chosen(server: RunningSimulator) -> None:
    function = RewardFunction(config_of(server, missing=-0.5))
    try:
        found = function(["q say nothing 1", "q 2"], ["q", "q"], ["1", "2"])
    finally:
        function.close()
    assert found["rewards"][0] == -0.5
    assert found["extra_logs"]["valid"].tolist() == [0.0, 1.0]
    chosen = RewardFunction(config_of(server, missing="mask"), missing=0.0)
    assert chosen(["q say nothing 1"], ["q"], ["1"])["rewards"].tolist() == [0.0]
    chosen.close()
    with pytest.raises(ConfigError, match="NaN would enter the loss"):
        RewardFunction(config_of(server, missing="mask"))(["q"], ["q"], ["1"])


def test_an_exceeded_error_budget_keeps_failing(
    server: RunningSimulator, capsys: pytest.CaptureFixture[str]
) -> None:
    function = RewardFunction(config_of(server, missing=0.0, error_budget=0.002))
    try:
        assert function(["q 1"], ["q"], ["1"])["rewards"].isfinite().all()
        for number in range(2):
            function([f"q say nothing {number}"], ["q"], ["1"])
        for _ in range(3):
            with pytest.raises(BudgetExceeded, match="3 of the last 4 calls failed, 2 allowed"):
                function(["q say nothing 2"], ["q"], ["1"])
            with pytest.raises(BudgetExceeded, match="calls failed"):
                function(["q 1"], ["q"], ["1"])
    finally:
        function.close()
    assert capsys.readouterr().err.count("no reward") == 1


def test_a_server_that_is_down_is_said_at_once() -> None:
    function = RewardFunction(config_of("http://127.0.0.1:9"))
    for _ in range(2):
        with pytest.raises(NoServer, match="cannot connect to"):
            function(["q 1"], ["q"], ["1"])


def test_responses_are_what_stands_behind_the_prompt() -> None:
    long = "<|im_start|>user\n" + "word " * 300 + "2+2?<|im_end|>\n<|im_start|>assistant\n"
    cut = long[-1000:]
    label = '{"ground_truth": "4", "data_source": "sums", "extra_info": {"level": 2}}'
    found = responses_of(
        [f"{long}It is 4.<|im_end|>", f"{cut}4 <|im_end|>\n<|endoftext|>", "4"],
        [long, long, "never shown"],
        ["4", label, "{4"],
    )
    assert [response.text for response in found] == ["It is 4.", "4", "4"]
    assert [response.truth for response in found] == ["4", "4", "{4"]
    assert (found[1].dataset, found[1].extra) == ("sums", {"level": 2})
    (empty,) = responses_of(["It is 4.</s>"], [""], ["4"])
    assert (empty.text, empty.prompt) == ("It is 4.", "")
    padded = "It is 4." + "<|endoftext|>" * 8000 + " <pad>\n" * 8000
    marks = "<|endoftext|>" * 8000 + "."
    found = responses_of([padded, marks], ["", ""], ["4", "4"])
    assert [response.text for response in found] == ["It is 4.", marks]
    with pytest.raises(Mismatch, match="2 queries, 1 prompts and 1 labels"):
        responses_of(["a", "b"], ["a"], ["a"])


def test_the_http_form_answers_the_same_over_a_socket(
    server: RunningSimulator, tmp_path: Path
) -> None:
    (tmp_path / "rewards.toml").write_text(TOML.format(url=server, missing='"raise"'))
    process = subprocess.Popen(
        [COMMAND, "reward", "serve", "--config", "rewards.toml", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/get_reward", said)
            assert url, said
            answers = asyncio.run(_ask(url[0]))
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
    good, nothing, unequal, form, missing, named, rebound, cut = answers
    assert (named[0], rebound[0], cut[0]) == (200, 403, 403)
    assert good[0] == 200
    judged = good[1]["extra_logs"]["judge_reward"]
    assert good[1]["rewards"] == pytest.approx([judged[0] + 2.0, judged[1] + 0.0])
    assert good[1]["scores"] == good[1]["rewards"]
    assert (nothing[0], unequal[0], form[0]) == (400, 500, 415)
    assert "three lists of equal length" in unequal[1]["error"]
    assert missing[0] == 500
    assert "empty" in missing[1]["error"]
    assert process.returncode == 0
    assert "Traceback" not in errors


async def _ask(url: str) -> list[tuple[int, Any]]:
    asked: list[dict[str, Any]] = [
        {"json": {"query": ["2+2? 4", "q 5"], "prompts": ["2+2?", "q"], "labels": ["4", "4"]}},
        {"json": {"query": ["2+2? 4"]}},
        {"json": {"query": ["2+2? 4"], "prompts": [], "labels": ["4"]}},
        {"data": {"query": "x"}},
        {"json": {"query": ["q say nothing"], "prompts": ["q"], "labels": ["4"]}},
    ]
    # A page whose name was made to point to this machine sends its own name.
    for host in ("localhost:99", "evil.example:99", "127.0.0.1.evil.example"):
        asked.append({**asked[0], "headers": {"Host": host}})
    found = []
    async with aiohttp.ClientSession() as session:
        for body in asked:
            async with session.post(url, **body) as response:
                found.append((response.status, await response.json()))
    return found
