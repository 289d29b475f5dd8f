"""One pool for a Ray cluster: several nodes, real actors, nodes that are lost."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ray_cluster import cluster_of, lose, new_node  # isort: split

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchwright.calls import Done, Failed, Outcome, chat
from batchwright.calls.simulator import Simulator
from batchwright.integrations.ray import RayPool

# A cluster of processes has sockets and files of its own, which Ray leaves to the system at exit.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of(2, 2) as found:
        yield found


def on_node(node: Any) -> Any:
    return NodeAffinitySchedulingStrategy(node.node_id, soft=False)


def answers_of(url: str, prompts: list[str], settings: dict[str, Any]) -> list[Outcome]:
    with RayPool(url, **settings) as pool:
        return pool.map(chat("sim", prompt, temperature=0) for prompt in prompts)


answers = ray.remote(num_cpus=0)(answers_of)


@ray.remote(num_cpus=0)
def callers(url: str, asked: list[list[str]], settings: dict[str, Any]) -> list[list[Outcome]]:
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(lambda mine: answers_of(url, mine, settings), asked))


def prompts(count: int) -> list[Any]:
    return [chat("sim", f"question {number}", temperature=0) for number in range(count)]


def test_64_callers_on_two_nodes_stay_within_one_limit_and_pay_an_equal_request_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings = {"limit": 6, "cache": str(tmp_path / "calls.db"), "hedge": False}
    nodes = list(cluster.list_all_nodes())
    with Simulator(latency_s=0.02).running() as url:
        # Each caller has 8 questions, half of which the next one has too.
        asked = [[f"question {4 * caller + n}" for n in range(8)] for caller in range(64)]
        # Four processes of sixteen threads, each with a pool of its own.
        waiting = [
            callers.options(scheduling_strategy=on_node(nodes[part % len(nodes)])).remote(
                url, asked[16 * part : 16 * part + 16], settings
            )
            for part in range(4)
        ]
        found = [outcomes for part in ray.get(waiting) for outcomes in part]
        stats = url.stats(calls=True)
    texts: dict[str, str] = {}
    for mine, outcomes in zip(asked, found, strict=True):
        for prompt, outcome in zip(mine, outcomes, strict=True):
            assert isinstance(outcome, Done)
            assert texts.setdefault(prompt, outcome.text) == outcome.text
    assert stats["peak_in_flight"] <= 6
    assert stats["finished"] == stats["distinct"] == len(texts) == 260
    assert {one["finished"] for one in stats["calls"]} == {1}


def pools() -> set[str]:
    """The names of the actors of pools."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in found if one["namespace"] == "batchwright"}


def start_on(node: Any, start: Callable[[], Any]) -> None:
    """Have the actor of a pool on a node that its first caller is on.

    Not all nodes know of a new one at once, and until then its actors start elsewhere.
    """
    while True:
        before = pools()
        start()
        (name,) = pools() - before
        actor = ray.get_actor(name, namespace="batchwright")
        if ray.get(actor.stats.remote())["node"] == node.node_id:
            return
        ray.kill(actor, no_restart=True)
        while name in pools():
            time.sleep(0.1)


@pytest.mark.parametrize("cached", [True, False])
def test_a_node_lost_in_the_middle_of_a_map_costs_at_most_what_was_in_flight(
    cluster: Cluster, tmp_path: Path, cached: bool
) -> None:
    settings = {
        "limit": 8,
        "hedge": False,
        "cache": str(tmp_path / "calls.db") if cached else None,
        "deadline_s": 60.0,
    }
    doomed = new_node(cluster, 1)
    with Simulator(latency_s=0.25).running() as url, ThreadPoolExecutor(1) as thread:
        first = answers.options(scheduling_strategy=on_node(doomed))
        start_on(doomed, lambda: ray.get(first.remote(url, ["the first"], settings)))
        before = url.stats()["received"]
        pool = RayPool(url, **settings)
        waiting = thread.submit(pool.map, prompts(320))
        # Groups share the limit, so they end at about the same time: by what the server has.
        while url.stats()["received"] < before + 64:
            time.sleep(0.05)
        lose(cluster, doomed)
        outcomes = waiting.result(300)
        stats = url.stats()
        counts = pool.stats()["caller"]
        again = pool.map(prompts(320))
        pool.shutdown()
        if cached:
            assert url.stats()["received"] == stats["received"]
    assert all(outcomes), [one for one in outcomes if not one][:3]
    assert [one.text for one in outcomes] == [one.text for one in again]
    assert counts["lost_groups"] > 0
    # Nobody knows what became of the calls in flight, nor of responses that were about to be
    # committed; all others are on disk.
    most = 2 * 8 if cached else 64 * counts["lost_groups"]
    assert stats["received"] <= before + 320 + most


def test_the_pool_of_a_cluster_streams_calls_singly_and_counts(cluster: Cluster) -> None:
    import asyncio

    with Simulator(latency_s=0.0).running() as url:
        pool = RayPool(url, limit=4)

        async def singly() -> list[Outcome]:
            one = await pool.call(chat("sim", "one"))
            return [one, *await pool.amap(prompts(70))]

        alone = asyncio.run(singly())
        streamed = dict(pool.stream(prompts(70)))
        stats = pool.stats()
        pool.shutdown()
    assert all(alone)
    assert [streamed[n].text for n in range(70)] == [one.text for one in alone[1:]]
    assert stats["caller"]["asked"] == stats["asked"] == 141
    assert [one["limit"] for one in stats["endpoints"]] == [4]


def test_a_failure_in_the_actor_is_typed_where_the_caller_is(cluster: Cluster) -> None:
    from batchwright.calls import ErrorBudget
    from batchwright.errors import BudgetExceeded, ConfigError, NoServer

    with Simulator(faults={"500": 1.0}, latency_s=0.0).running() as url:
        with RayPool(url, limit=4, tries=1) as pool:
            (failed,) = pool.map(prompts(1))
            assert isinstance(failed, Failed)
            assert failed.kind == "http_5xx"
        with (
            RayPool(url, limit=4, tries=1, budget=ErrorBudget(0.0)) as pool,
            pytest.raises(BudgetExceeded, match="calls failed"),
        ):
            pool.map(prompts(20))
    with RayPool("http://127.0.0.1:9", limit=4) as pool, pytest.raises(NoServer):
        pool.check(prompts(1))
    # The key is read where the actor is, and is missing there.
    with (
        RayPool("https://127.0.0.1:9/v1", key_env_of("NO_SUCH_KEY")) as pool,
        pytest.raises(ConfigError, match="NO_SUCH_KEY"),
    ):
        pool.map(prompts(1))


def key_env_of(name: str) -> Any:
    from batchwright.calls import Endpoint

    return Endpoint("https://127.0.0.1:10/v1", key_env=name)


def test_an_idle_actor_ends_and_the_next_call_starts_another(cluster: Cluster) -> None:
    with Simulator(latency_s=0.0).running() as url:
        pool = RayPool(url, limit=2, idle_s=0.5)
        before = pool.map(prompts(3))
        while True:
            try:
                ray.get_actor(pool.name, namespace="batchwright")
            except ValueError:
                break
            time.sleep(0.1)
        after = pool.map(prompts(3))
        pool.shutdown()
    assert [one.text for one in before] == [one.text for one in after]


def test_rewards_of_all_workers_go_through_one_pool_by_one_setting(
    cluster: Cluster, tmp_path: Path
) -> None:
    with Simulator(latency_s=0.01).running() as url:
        config = tmp_path / "rewards.toml"
        config.write_text(
            f'endpoints = ["{url}"]\non = "ray"\nbatch_size = 3\nmissing = "mask"\n'
            f'cache = "{tmp_path}/judge.db"\n'
            '[[part]]\nkind = "judge"\nmodels = ["sim-judge"]\n'
        )

        @ray.remote(num_cpus=0)
        def scored(node: str) -> list[Any]:
            from batchwright.rewards import compute_score

            texts = [f"response {n}" for n in range(20)]
            rows = compute_score(
                data_sources=["d"] * 20,
                solution_strs=texts,
                ground_truths=[None] * 20,
                config=str(config),
            )
            return [(row["valid"], row["why"]) for row in rows]

        nodes = cluster.list_all_nodes()
        workers = [
            scored.options(scheduling_strategy=on_node(nodes[n % len(nodes)])).remote(str(n))
            for n in range(3)
        ]
        found = ray.get(workers)
        stats = url.stats()
    assert all(one == found[0] for one in found)
    assert stats["peak_in_flight"] <= 3
    assert stats["distinct"] == 20
    assert stats["repeated"] == 0


def test_the_command_and_the_reward_functions_of_trainers_score_through_the_pool_of_the_cluster(
    cluster: Cluster, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.integrations import openrlhf, trl
    from batchwright.rewards import compute_score
    from batchwright.rewards.compute import close_scorers

    texts = [f"response {n}" for n in range(20)]
    asked = ["question"] * len(texts)
    rows = [{"id": str(n), "prompt": "question", "response": one} for n, one in enumerate(texts)]
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def of_trl(config: str) -> Any:
        return trl.RewardFunction(tmp_path / config)(asked, texts)

    def of_openrlhf(config: str) -> Any:
        queries = [f"question{one}" for one in texts]
        found = openrlhf.RewardFunction(tmp_path / config)(queries, asked, [None] * len(texts))
        return found["rewards"].tolist()

    answer = "<measurements>\\n- True\\n</measurements>"

    def of_environment(on: str) -> Any:
        monkeypatch.setenv("BATCHWRIGHT_ON", on)
        found = compute_score(
            data_sources=["diamonds"],
            solution_strs=[answer],
            ground_truths=[[True]],
            extra_infos=[{"is_correct": True}],
            missing="mask",
        )
        close_scorers()
        return found

    with Simulator(latency_s=0.005).running() as url:
        part = '[[part]]\nkind = "judge"\nmodels = ["sim-judge"]\n'
        both = f'endpoints = ["{url}"]\nbatch_size = 3\nmissing = 0.0\n'
        (tmp_path / "here.toml").write_text(both + part)
        (tmp_path / "ray.toml").write_text(f'{both}on = "ray"\n{part}')
        line = "reward score -i responses.jsonl -c here.toml -o"
        here = run(f"{line} here.jsonl", tmp_path)
        there = run(f"{line} there.jsonl --on ray --address {cluster.address}", tmp_path)
        assert (here.code, there.code) == (0, 0), here.err + there.err
        before = pools()
        for function in (of_trl, of_openrlhf):
            assert function("ray.toml") == function("here.toml")
        # All functions of one configuration are callers of one pool.
        assert len(pools() - before) <= 1
        monkeypatch.setenv("TRAIN_WITH_MONITOR", "true")
        monkeypatch.setenv("OPENAI_BASE_URL", str(url))
        monkeypatch.setenv("MONITOR_CACHE", "false")
        monkeypatch.setenv("MONITOR_MODEL_NAME", "sim-judge")
        before = pools()
        alone = of_environment("here")
        assert pools() == before
        # A reward that is missing is not equal to itself.
        assert repr(of_environment("ray")) == repr(alone)
        assert len(pools() - before) == 1
    scores = [
        [json.loads(row)["score"] for row in (tmp_path / name).read_text().splitlines()]
        for name in ("here.jsonl", "there.jsonl")
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 20


def test_commands_on_a_cluster_say_which_and_write_what_one_machine_does(
    cluster: Cluster, tmp_path: Path, run: Any
) -> None:
    rows = [{"id": str(n), "prompt": f"question {n}"} for n in range(150)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Simulator(latency_s=0.005).running() as url:
        line = f"calls run -i prompts.jsonl -e {url} -m sim --temperature 0 --batch-size 4 -o"
        here = run(f"{line} here.jsonl", tmp_path)
        there = run(f"{line} there.jsonl --on ray --address {cluster.address}", tmp_path)
        assert here.code == 0, here.err
        assert there.code == 0, there.err
        assert f"Ray: the cluster at {cluster.address} (2 nodes, 4 cores)" in there.err
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        for unfit in ("--run-dir r", "--batch-api"):
            refused = run(f"{line} other.jsonl --on ray {unfit}", tmp_path)
            assert refused.code == 1
            assert "does not go with --on ray" in refused.err
    texts = [
        [json.loads(row)["text"] for row in (tmp_path / name).read_text().splitlines()]
        for name in ("here.jsonl", "there.jsonl")
    ]
    assert texts[0] == texts[1]
    lost = run(f"{line} other.jsonl --on ray --address 127.0.0.1:1", tmp_path)
    assert lost.code == 1
    assert "cannot join the Ray cluster at 127.0.0.1:1" in lost.err
    assert "Traceback" not in lost.err
    # Ray itself would try for minutes.
    with Simulator().running() as url:
        place = url.partition("//")[2].rstrip("/")
        other = run(f"{line} other.jsonl --on ray --address {place}", tmp_path)
    assert other.code == 1
    assert f"cannot join the Ray cluster at {place}: what answers there is not Ray" in other.err


def test_the_doctor_compares_the_nodes_of_a_cluster(
    cluster: Cluster, tmp_path: Path, run: Any
) -> None:
    same = run(f"doctor --address {cluster.address} --format json", tmp_path)
    assert same.code == 0, same.err + same.out
    assert cluster.address in same.data["cluster"]["state"]
    assert len(same.data["cluster"]["nodes"]) == 2
    assert same.data["cluster"]["problems"] == []
    # A node whose processes find another version first.
    other = tmp_path / "other" / "batchwright-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: batchwright\nVersion: 9.9\n")
    node = new_node(cluster, 1, env_vars={"PYTHONPATH": str(other.parent)})
    differs = run(f"doctor --address {cluster.address}", tmp_path)
    cluster.remove_node(node)
    assert differs.code == 1
    assert "batchwright differs between the nodes: 0.1.0, 9.9" in differs.out
    gone = run("doctor --address 127.0.0.1:1", tmp_path)
    assert gone.code == 1
    assert "cannot join the Ray cluster at 127.0.0.1:1" in gone.err


def test_a_judged_batch_that_loses_the_node_of_its_pool_has_every_score(
    cluster: Cluster, tmp_path: Path
) -> None:
    from batchwright.rewards import compute_score

    texts = [f"response {n}" for n in range(160)]

    def scored(mine: list[str]) -> list[Any]:
        count = len(mine)
        rows = compute_score(
            data_sources=["d"] * count,
            solution_strs=mine,
            ground_truths=[None] * count,
            config=str(config),
        )
        return [(row["valid"], row["score"], row["why"]) for row in rows]

    doomed = new_node(cluster, 1)
    with Simulator(latency_s=0.2).running() as url, ThreadPoolExecutor(1) as thread:
        config = tmp_path / "rewards.toml"
        config.write_text(
            f'endpoints = ["{url}"]\non = "ray"\nbatch_size = 8\nmissing = "mask"\n'
            f'cache = "{tmp_path}/judge.db"\n'
            '[[part]]\nkind = "judge"\nmodels = ["sim-judge"]\n'
        )
        there = ray.remote(num_cpus=0)(scored).options(scheduling_strategy=on_node(doomed))
        start_on(doomed, lambda: ray.get(there.remote(["the first"])))
        waiting = thread.submit(scored, texts)
        while url.stats()["received"] < 40:
            time.sleep(0.05)
        lose(cluster, doomed)
        found = waiting.result(300)
        received = url.stats()["received"]
        # All of it is cached by now: the same scores, and no call.
        assert scored(texts) == found
        assert url.stats()["received"] == received
    assert len(found) == 160
    assert received <= 161 + 2 * 8


def typed(line: str, folder: Path) -> None:
    """A command within this process, which is on a node of the cluster."""
    from batchwright.cli.app import main

    os.chdir(folder)
    sys.argv = ["batchwright", *line.split()]
    with suppress(SystemExit):
        main()


def test_calls_run_that_loses_the_node_of_its_pool_answers_every_prompt_once_and_in_order(
    cluster: Cluster, tmp_path: Path
) -> None:
    rows = [{"id": str(n), "prompt": f"question {n}"} for n in range(200)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "first.jsonl").write_text(json.dumps({"id": "a", "prompt": "the first"}) + "\n")
    doomed = new_node(cluster, 1)
    with Simulator(latency_s=0.2).running() as url:
        words = (
            f"calls run -e {url} -m sim --temperature 0 --quiet --batch-size 8 "
            f"--cache {tmp_path}/calls.db --on ray --address {cluster.address}"
        )
        # Another command with the same settings, from that node: they share its pool.
        there = ray.remote(num_cpus=0)(typed).options(scheduling_strategy=on_node(doomed))
        first = f"{words} -i first.jsonl -o first.out.jsonl"
        start_on(doomed, lambda: ray.get(there.remote(first, tmp_path)))
        before, known = url.stats()["received"], pools()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "batchwright", *words.split()),
                *("-i", "prompts.jsonl", "-o", "out.jsonl"),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while url.stats()["received"] < before + 40 and process.poll() is None:
            time.sleep(0.05)
        lose(cluster, doomed)
        out, err = process.communicate(timeout=300)
        received = url.stats()["received"]
        assert pools() == known
    assert process.returncode == 0, out + err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert all(row["text"] for row in found)
    assert received <= before + 200 + 2 * 8


def test_without_ray_every_command_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "train.jsonl").write_text('{"text": "some words"}\n')
    hide = "import sys; sys.modules['ray'] = None; from batchwright.cli.app import main; main()"
    for words in (
        "calls run -i prompts.jsonl -o out.jsonl -e http://127.0.0.1:9 -m m --on ray",
        "data lengths build -d train.jsonl -t bytes -o lengths.jsonl --on ray",
        "train sft --model tiny --data train.jsonl --run-dir run --on ray --workers 2",
        "gym run -t bytes --on ray --workers 2",
        "doctor --address 127.0.0.1:1",
    ):
        done = subprocess.run(
            [sys.executable, "-c", hide, *words.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, words
        assert done.stderr.count("\n") == 1, done.stderr
        assert "[ray]" in done.stderr
    assert not (tmp_path / "run" / "config.toml").exists()


def test_another_batchwright_on_a_node_is_one_sentence_wherever_it_is_met(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.data import build_lengths
    from batchwright.errors import Mismatch
    from batchwright.integrations.ray import RayWorkers, gym, pool, workers

    data = tmp_path / "train.jsonl"
    data.write_text('{"text": "some words"}\n')
    for module in (workers, pool, gym):
        monkeypatch.setattr(module, "__version__", "9.9")
    one = r"^(a|the) node (of the pool )?has batchwright \S+ and the command 9\.9; "
    with pytest.raises(Mismatch, match=one):
        build_lengths(data, "bytes", tmp_path / "lengths.jsonl", workers=RayWorkers())
    assert not (tmp_path / "lengths.jsonl").exists()
    with Simulator(latency_s=0.0).running() as url:
        asking = RayPool(url, limit=2)
        with pytest.raises(Mismatch, match=one):
            asking.map(prompts(2))
        assert url.stats()["received"] == 0
        asking.shutdown()
    stream = gym.RayGymStream(workers=1, num_episodes=1)
    with pytest.raises(Mismatch, match=one):
        list(stream)
    stream.close()


def test_a_cluster_of_another_ray_is_one_sentence(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "some words"}\n')
    words = f"data lengths build -d train.jsonl -t bytes -o l.jsonl --address {cluster.address}"
    # Ray itself compares what the head was started with.
    other = "import ray; ray.__version__ = '2.50.0'; from batchwright.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", other, *words.split(), "--on", "ray"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (said,) = done.stderr.strip().splitlines()
    assert f"cannot join the Ray cluster at {cluster.address}: Version mismatch" in said
    assert "2.50.0" in said
    assert not (tmp_path / "l.jsonl").exists()


def test_calls_whose_actor_never_comes_back_fail_as_unreachable(cluster: Cluster) -> None:
    with Simulator(latency_s=0.2).running() as url:
        pool = RayPool(url, limit=2, deadline_s=1.0, hedge=False)
        assert all(pool.map(prompts(2)))
        gone = threading.Event()

        def progress(done: int, total: int) -> None:
            if not gone.is_set():
                gone.set()
                # Nothing is left that could start it again.
                pool._engine._find = lambda: actor
                ray.kill(actor, no_restart=True)

        actor = ray.get_actor(pool.name, namespace="batchwright")
        outcomes = pool.map(prompts(200), progress=progress)
        pool.close()
    failed = [one for one in outcomes if not one]
    assert gone.is_set()
    assert failed
    assert {one.kind for one in failed} == {"unreachable"}
