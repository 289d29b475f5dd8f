"""`compute_score` as the trainers call it, with the monitor behind a real server."""

import asyncio
import http.server
import math
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls.simulator import RunningSimulator, Simulator
from batchwright.errors import BadReward, BadRow, ConfigError, Mismatch, NoServer
from batchwright.rewards import acompute_score, compute_score
from batchwright.rewards import compute as edges
from raw_server import RawServer, Seen

RIGHT = "It is correct, yes. <measurements>[true, false, true]</measurements>"
WRONG = "That is incorrect. <measurements>[false, false, true]</measurements>"
TRUTH = "[true, false, true]"
DOWN = "Nobody hears this. <measurements>[true, false, true]</measurements>"
VARIABLES = (
    *("TRAIN_WITH_MONITOR", "MONITOR_CACHE", "MONITOR_CACHE_FILE", "MONITOR_MODEL_NAME", "K"),
    *("MONITOR_CORRECT_REWARD", "MONITOR_WRONG_REWARD", "OPENAI_API_KEY", "OPENAI_BASE_URL"),
    "BATCHWRIGHT_REWARDS",
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has scored nothing yet, in a folder of its own."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    edges.close_scorers()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningSimulator]:
    faults = {"Nobody hears this": "empty"}
    with Simulator(knee=64, latency_s=0.002, script=faults).running() as url:
        yield url


@pytest.fixture
def monitor(server: RunningSimulator, monkeypatch: pytest.MonkeyPatch) -> RunningSimulator:
    """The document's environment, with the simulator for OpenAI."""
    server.reset()
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server}/v1")
    monkeypatch.setenv("MONITOR_MODEL_NAME", "sim-judge")
    return server


def test_a_single_sample_is_scored_by_position() -> None:
    row = compute_score(RIGHT, TRUTH, "diamonds-seed0", {"is_correct": True})

    assert isinstance(row, dict)
    assert (row["score"], row["valid"], row["why"]) == (4.0, True, "")
    assert (row["format_reward"], row["correctness_reward"]) == (1.0, 3.0)
    assert (row["proportion_correct"], row["all_correct"]) == (1.0, 1.0)
    assert row["wrong_number_of_measurements"] == 0.0
    assert row["word_count_before_measurements"] == 4.0


def test_a_batch_is_scored_by_lists_and_equals_the_samples_one_by_one() -> None:
    texts = [RIGHT, WRONG, "no tags at all", RIGHT]
    sources = ["diamonds-seed0", "diamonds-seed7", "diamonds-seed0", "function_correctness"]
    truths = [TRUTH, TRUTH, TRUTH, "[true, false]"]

    rows = compute_score(
        data_sources=np.array(sources, dtype=object),
        solution_strs=texts,
        ground_truths=truths,
        extra_infos=np.array([{}, None, {"index": 3}, {}], dtype=object),
    )

    assert isinstance(rows, list)
    assert [row["score"] for row in rows] == [4.0, 3.0, 0.0, 4.0]
    # A wrong number of values costs everything in one data set and nothing in the other.
    assert rows[3]["wrong_number_of_measurements"] == 1.0
    singles = zip(texts, truths, sources, strict=True)
    assert rows == [compute_score(text, truth, source, {}) for text, truth, source in singles]
    assert len({tuple(row) for row in rows}) == 1


def test_verls_keywords_are_taken_sync_and_async() -> None:
    sample = {"data_source": "diamonds-seed0", "solution_str": RIGHT, "ground_truth": TRUTH}
    more = {"num_turns": 1, "rollout_reward_scores": {}}

    one = compute_score(**sample, extra_info=more, reward_router_address=None)
    other = asyncio.run(acompute_score(**sample, extra_info=more, reward_model_tokenizer=None))

    assert one == other
    assert one["score"] == 4.0


@pytest.mark.parametrize("truth", [None, "", "[perhaps]", 7])
def test_one_bad_ground_truth_spoils_one_sample(truth: object) -> None:
    batch = {
        "data_sources": ["diamonds-seed0"] * 3,
        "solution_strs": [RIGHT] * 3,
        "ground_truths": [TRUTH, truth, [True, False, True]],
    }

    with pytest.raises(BadReward, match="1 of 3 rewards are missing, the first is sample 1"):
        compute_score(**batch)
    masked = compute_score(**batch, missing="mask")
    assert [row["valid"] for row in masked] == [True, False, True]
    assert [row["why"] for row in masked] == ["", "bad_truth", ""]
    assert math.isnan(masked[1]["score"])
    assert masked[1]["format_reward"] == 1.0
    chosen = compute_score(**batch, missing=-1.0)
    assert [row["score"] for row in chosen] == [4.0, -1.0, 4.0]
    assert not chosen[1]["valid"]
    assert len({tuple(row) for row in (*masked, *chosen)}) == 1


def test_lists_of_truth_come_as_parquet_gives_them() -> None:
    row = compute_score(RIGHT, np.array([True, False, True]), "diamonds-seed0")
    assert row["score"] == 4.0


def test_k_is_what_a_word_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "-0.5")
    row = compute_score(RIGHT, TRUTH, "diamonds-seed0")
    assert row["score"] == 4.0 - 0.5 * 4
    assert row["verbosity_reward"] == -2.0


def test_the_monitor_reads_the_reasoning_through_the_pool(monitor: RunningSimulator) -> None:
    """The simulator says true of text that calls itself correct."""
    rows = compute_score(
        data_sources=["diamonds-seed0"] * 3,
        solution_strs=[RIGHT, RIGHT, WRONG],
        ground_truths=[TRUTH] * 3,
        extra_infos=[{"is_correct": True}, {"is_correct": False}, {"is_correct": False}],
    )

    assert [row["monitor_answer"] for row in rows] == [1.0, 1.0, 0.0]
    assert [row["monitor_correctness"] for row in rows] == [1.0, 0.0, 1.0]
    assert [row["monitor_correctness_reward"] for row in rows] == [-1.0, 1.0, -1.0]
    assert [row["score"] for row in rows] == [3.0, 5.0, 2.0]
    # Two of the three have the same reasoning: one question for both.
    assert monitor.stats()["received"] == 2


def test_rewards_of_the_monitor_are_set_by_the_environment(
    monitor: RunningSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONITOR_CORRECT_REWARD", "-3")
    monkeypatch.setenv("MONITOR_WRONG_REWARD", "0.25")
    scores = [
        compute_score(RIGHT, TRUTH, "diamonds-seed0", {"is_correct": label})["score"]
        for label in (True, False)
    ]
    assert scores == [1.0, 4.25]


def test_the_cache_serves_another_process_and_no_server(
    monitor: RunningSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = (RIGHT, TRUTH, "diamonds-seed0", {"is_correct": True})
    first = compute_score(*sample)
    edges.close_scorers()
    assert compute_score(*sample) == first
    assert monitor.stats()["received"] == 1
    assert Path("monitor_cache.db").exists()

    # The address is not part of what was asked, so a server that is gone is not missed.
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert compute_score(*sample) == first
    with pytest.raises(NoServer, match=r"cannot connect to http://127\.0\.0\.1:9/v1"):
        compute_score(WRONG, *sample[1:])


def test_a_monitor_behind_a_proxy_is_found(
    monitor: RunningSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            url = str(monitor) + urllib.parse.urlsplit(self.path).path
            kind = {"Content-Type": "application/json"}
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(urllib.request.Request(url, body, kind)) as response:
                found = response.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

    # The name has no address here: only the proxy can be reached.
    monkeypatch.setenv("OPENAI_BASE_URL", "http://monitor.invalid/v1")
    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_port}")
        row = compute_score(RIGHT, TRUTH, "diamonds-seed0", {"is_correct": True})
        proxy.shutdown()
    assert isinstance(row, dict)
    assert row["valid"]
    assert monitor.stats()["received"] == 1


def test_a_server_of_ones_own_needs_no_key(
    monitor: RunningSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    row = compute_score(RIGHT, TRUTH, "diamonds-seed0", {"is_correct": True})
    assert row["score"] == 3.0


def test_without_the_cache_no_file_is_written_and_the_pool_remembers(
    monitor: RunningSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONITOR_CACHE", "false")
    for _ in range(2):
        compute_score(RIGHT, TRUTH, "diamonds-seed0", {"is_correct": True})
    # The same exact request is not paid for twice while the pool has its response.
    assert monitor.stats()["received"] == 1
    assert not Path("monitor_cache.db").exists()


def test_a_monitor_that_fails_pays_nothing(monitor: RunningSimulator) -> None:
    batch = {
        "data_sources": ["diamonds-seed0"] * 2,
        "solution_strs": [RIGHT, DOWN],
        "ground_truths": [TRUTH] * 2,
        "extra_infos": [{"is_correct": True}] * 2,
    }
    with pytest.raises(BadReward, match="sample 1: empty"):
        compute_score(**batch)
    good, spoilt = compute_score(**batch, missing="mask")
    assert (good["score"], good["valid"]) == (3.0, True)
    assert (spoilt["valid"], spoilt["why"]) == (False, "empty")
    assert math.isnan(spoilt["score"])
    assert math.isnan(spoilt["monitor_correctness"])


def test_a_running_loop_may_call_it(monitor: RunningSimulator) -> None:
    async def blocking() -> object:
        return compute_score(RIGHT, TRUTH, "diamonds-seed0", {"is_correct": True})

    assert asyncio.run(blocking())["score"] == 3.0


def test_samples_of_one_loop_are_in_flight_together(
    monitor: RunningSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = asyncio.Event()

    async def waits_for_three(seen: Seen) -> None:
        if seen.body is None:
            await seen.reply(404)
            return
        if server.open >= 3:
            enough.set()
        await enough.wait()
        await seen.answer("true")

    async def many() -> list[float]:
        texts = [f"{number} {RIGHT}" for number in range(40)]
        calls = [
            acompute_score("diamonds-seed0", text, TRUTH, {"is_correct": True}) for text in texts
        ]
        return [float(row["score"]) for row in await asyncio.gather(*calls)]

    with RawServer(waits_for_three) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        assert asyncio.run(many()) == [3.0] * 40


def test_a_file_is_named_by_an_argument_or_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("sums.toml").write_text('[[part]]\nkind = "numeric"\nweight = 2.0\n')
    Path("words.toml").write_text('missing = 0.0\n[[part]]\nkind = "exact"\n')

    assert compute_score("so 4", "4", "sums", config="sums.toml")["score"] == 2.0
    monkeypatch.setenv("BATCHWRIGHT_REWARDS", "words.toml")
    row = compute_score("Rome", None, "words")
    assert (row["score"], row["valid"], row["why"]) == (0.0, False, "bad_truth")


def test_what_cannot_be_scored_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"data_sources": ["diamonds-seed0"], "ground_truths": [TRUTH]}
    with pytest.raises(Mismatch, match="'solution_strs': 2, 'data_sources': 1"):
        compute_score(**one, solution_strs=[RIGHT, RIGHT])
    with pytest.raises(Mismatch, match="'solution_strs': 0"):
        compute_score(**one)
    with pytest.raises(ConfigError, match=r"data set 'poems', .* parts for diamonds\*"):
        compute_score("a rose", "a rose", "poems")
    with pytest.raises(BadRow, match="response 0 is list, not text"):
        compute_score(data_source="diamonds-seed0", solution_str=[1, 2], ground_truth=TRUTH)
    with pytest.raises(BadRow, match="extra_info must be a dict or None, got str"):
        compute_score(RIGHT, TRUTH, "diamonds-seed0", "is_correct")
    monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
    with pytest.raises(ConfigError, match="export OPENAI_API_KEY"):
        compute_score(RIGHT, TRUTH, "diamonds-seed0")


def test_a_monitor_without_its_label_is_a_missing_field(monitor: RunningSimulator) -> None:
    row = compute_score(RIGHT, TRUTH, "diamonds-seed0", None, missing="mask")
    assert (row["valid"], row["why"]) == (False, "missing_field")
    assert monitor.stats()["received"] == 0
