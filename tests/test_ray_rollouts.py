"""Gym clients and environments as actors of a Ray cluster: what one machine gives, after losses."""

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ray_cluster import cluster_of  # isort: split

import ray
from ray.cluster_utils import Cluster

from batchwright.calls.simulator import Simulator
from batchwright.envs.questions import load_questions
from batchwright.integrations.ray.gym import RayGymStream
from batchwright.streaming import GymConfig, ReplayBuffer, ReplayBufferConfig
from batchwright.streaming.gym import GymEpisodeStream, GymServer
from batchwright.streaming.sample import StreamSample

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of(2) as found:
        yield found


@pytest.fixture
def gym_port() -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = GymServer()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    yield server.port
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def told(samples: list[StreamSample]) -> list[Any]:
    """All but when it was made."""
    return [sample.model_dump(exclude={"timestamp"}) for sample in samples]


def test_gym_clients_of_a_cluster_fill_the_buffer_of_one_machine_after_one_is_lost(
    cluster: Cluster, gym_port: int
) -> None:
    config = GymConfig(port=gym_port, difficulty_range=(0.0, 0.4))
    alone = list(GymEpisodeStream(config, "bytes", "random", num_episodes=24, seed=5))
    stream = RayGymStream(config, "bytes", "random", workers=2, num_episodes=24, seed=5)
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=10_000))
    samples: list[StreamSample] = []
    killed = False
    for sample in stream:
        samples.append(sample)
        buffer.add(sample)
        if not killed and stream._actors[1] is not None and len(samples) > 3:
            killed = True
            ray.kill(stream._actors[1])
    stream.close()
    assert killed
    # The episodes that it was playing then, or was asked for next.
    assert 1 <= stream.lost <= 2
    assert told(samples) == told(alone)
    assert len(buffer) == len(alone)
    assert sum(stream.status_counts.values()) == 24
    assert set(stream.status_counts) <= {"success", "failure"}


def test_a_gym_that_is_not_there_ends_the_stream_of_a_cluster(cluster: Cluster) -> None:
    from batchwright.errors import NoServer

    config = GymConfig(port=9, max_retries=0)
    stream = RayGymStream(config, workers=1, num_episodes=2)
    with pytest.raises(NoServer, match="no gym at localhost:9"):
        list(stream)
    stream.close()


def test_the_gym_command_on_a_cluster_saves_what_it_does_alone(
    cluster: Cluster, gym_port: int, tmp_path: Path, run: Any
) -> None:
    line = f"gym run -t bytes --port {gym_port} --num-episodes 6 --policy random --seed 3 -o"
    here = run(f"{line} here.json", tmp_path)
    there = run(f"{line} there.json --on ray --workers 2 --address {cluster.address}", tmp_path)
    assert (here.code, there.code) == (0, 0), here.err + there.err
    found = [told(list(ReplayBuffer.load(tmp_path / name))) for name in ("here.json", "there.json")]
    assert found[0] == found[1]
    assert len(found[0]) > 0
    for flags, said in (
        ("--on ray", "--workers, the number of actors, and --on ray go together"),
        ("--workers 2", "--workers, the number of actors, and --on ray go together"),
        ("--on ray --workers 0", "--workers must be at least 1"),
    ):
        refused = run(f"{line} other.json {flags}", tmp_path)
        assert refused.code == 1
        assert said in refused.err


def test_query_mutation_on_a_cluster_learns_what_it_does_alone_after_an_actor_is_lost(
    cluster: Cluster, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.integrations.ray import mutation
    from batchwright.train.query_mutator.config import QueryMutatorConfig
    from batchwright.train.query_mutator.loop import train_query_mutator

    monkeypatch.chdir(tmp_path)
    questions = load_questions("shipped", "all")
    with Simulator(questions=questions, latency_s=0.005).running() as url:

        def config(folder: str) -> QueryMutatorConfig:
            return QueryMutatorConfig(
                target_model=f"{url}/v1#sim-qa",
                mutator_model=f"{url}/v1#sim-mutator",
                num_processes=4,
                num_steps=4,
                num_env_steps=32,
                batch_size="4",
                save_dir=Path(folder),
            )

        alone = train_query_mutator(config("alone"))
        killed = False

        def environments(*given: Any) -> Any:
            return mutation.on_workers(2, *given)

        def progress(done: int, total: int, note: str) -> None:
            nonlocal killed
            if not killed and done >= 6:
                killed = True
                for one in living():
                    ray.kill(one)

        def living() -> list[Any]:
            import gc

            found = [o for o in gc.get_objects() if isinstance(o, mutation.RayPipelines)]
            return [actor for env in found for actor in env._actors[:1] if actor is not None]

        many = train_query_mutator(
            config("many"),
            progress=progress,
            pool=mutation.ray_pool,
            environments=environments,
        )
        assert killed
        assert many.lost_steps > 0
        assert (many.steps, many.invalid_steps, many.rejected) == (
            *(alone.steps, alone.invalid_steps),
            alone.rejected,
        )
        assert many.first_gain == alone.first_gain
        assert many.last_gain == alone.last_gain
        models = f"--target-model {url}/v1#sim-qa --mutator-model {url}/v1#sim-mutator"
        small = "--num-processes 2 --num-steps 2 --num-env-steps 4 --batch-size 2 --quiet"
        typed = run(
            f"train query-mutator {models} {small} --save-dir typed --on ray --workers 1 "
            f"--address {cluster.address}",
            tmp_path,
        )
        assert typed.code == 0, typed.err
    turns = [
        Counter(
            json.dumps({k: v for k, v in json.loads(line).items() if k != "crc"})
            for path in sorted((tmp_path / name / "rollouts").glob("*.jsonl"))
            for line in path.read_text().splitlines()
        )
        for name in ("alone", "many")
    ]
    assert turns[0] == turns[1]
    assert sum(turns[0].values()) == 32
    # Its responses are in its folder: it is replayed on one machine, with no server.
    replayed = run("train query-mutator --replay many --quiet", tmp_path)
    assert replayed.code == 0, replayed.err
