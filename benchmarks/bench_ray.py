"""What Ray costs and brings: calls, lengths, training after a loss, object stores.

Everything runs on this machine, in a cluster of two nodes of one core each, against servers on
loopback. Ratios are of ways that take turns in one run; seconds are of a small model on a busy or
idle machine, whichever it was. Processes of Ray are started before the clock.
The prover's environments are not distributed: the last table shows how much of a core one of them
takes, which is what another process could win at most on a core that is free.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Report, arguments, data_folder
from ray_nodes import cluster_of, lose, new_node

GROUP = 64
QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
"""Settings of the head of a cluster, by which a lost node is noticed soon."""
MOTO = """
from moto.server import ThreadedMotoServer
import time
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
time.sleep(3600)
"""


def least_of(ways: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """The least seconds of each way; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            found[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in found.items()}


def calls(report: Report, count: int, turns: int) -> None:
    from batchwright.calls import Pool, chat
    from batchwright.calls.simulator import Simulator
    from batchwright.integrations.ray import RayPool

    def prompts(draw: int) -> list[Any]:
        return [chat("sim", f"{draw}: question {n}", temperature=0) for n in range(count)]

    draws = iter(range(10**6))
    with tempfile.TemporaryDirectory() as folder, Simulator(latency_s=0.0).running() as url:
        here = Pool(url, limit=GROUP, hedge=False)
        there = RayPool(url, limit=GROUP, hedge=False)
        cached = RayPool(url, limit=GROUP, hedge=False, cache=f"{folder}/calls.db")
        for pool in (here, there, cached):
            pool.map(prompts(-1))
        found = least_of(
            {
                "Pool": lambda: here.map(prompts(next(draws))),
                "RayPool": lambda: there.map(prompts(next(draws))),
                "RayPool, all cached": lambda: cached.map(prompts(-1)),
            },
            turns,
        )
        for pool in (here, there, cached):
            pool.close()
        there.shutdown()
        cached.shutdown()
    report.table(
        f"calls in groups of {GROUP} to a server without latency",
        ("", "us a call", "calls/s"),
        [(name, 1e6 * s / count, count / s) for name, s in found.items()],
    )
    report.target("RayPool over Pool, time a call", found["RayPool"] / found["Pool"], most=2.0)
    report.target(
        "cached outcomes a second through the actor",
        count / found["RayPool, all cached"],
        least=5000.0,
    )


def verl_loop(report: Report, count: int, turns: int) -> None:
    """The same calls by verl's own reward loop, in an environment of its own."""
    from batchwright.calls.simulator import Simulator

    folder = os.environ.get("BATCHWRIGHT_VERL_VENV") or Path(__file__).parents[1] / ".venv-verl"
    python = Path(folder) / "bin" / "python"
    if not python.exists():
        why = "it has no environment here; `python tests/verl_venv.py` makes one"
        report.not_measured("verl's reward loop", why)
        return
    script = Path(__file__).with_name("verl_loop.py")
    with Simulator(latency_s=0.0).running() as url:
        done = subprocess.run(
            [python, script, url, str(count), str(turns)],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        report.not_measured("verl's reward loop", done.stderr.strip().splitlines()[-1][:200])
        return
    found = json.loads(done.stdout.splitlines()[-1])
    names = {"verl": "verl's reward loop, 2 workers", "RayPool": "RayPool"}
    report.table(
        "the same calls as rewards of verl, in verl's environment",
        ("", "us a call", "calls/s"),
        [(names[way], 1e6 * s / count, count / s) for way, s in found.items()],
    )


def lengths(report: Report, copies: int, turns: int) -> None:
    import ray.data

    from batchwright.data import build_lengths
    from batchwright.integrations.ray import RayWorkers

    text = data_folder() / "text" / "gsm8k_train.jsonl"
    if not text.exists():
        report.not_measured("lengths", "GSM8K is not here; see benchmarks/README.md")
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_bytes(text.read_bytes() * copies)
        rows = len(text.read_bytes().splitlines()) * copies
        numbers = iter(range(10**6))

        def build(workers: Any) -> None:
            number = next(numbers)
            os.environ["BATCHWRIGHT_TOKENS"] = f"{folder}/tokens-{number}"
            out = Path(folder) / f"{number}.safetensors"
            build_lengths(data, "gpt2", out, workers=workers)

        ray.data.DataContext.get_current().enable_progress_bars = False
        ray.data.DataContext.get_current().print_on_execution_start = False

        def ray_data() -> int:
            # Less than a core for each actor, so that there is room for the tasks that read.
            found = ray.data.read_json(str(data), lines=True, num_cpus=0.2).map_batches(
                Counted, batch_size=1024, compute=ray.data.ActorPoolStrategy(size=2), num_cpus=0.8
            )
            return sum(int(batch["length"].sum()) for batch in found.iter_batches())

        build(RayWorkers())
        found = least_of(
            {
                "2 processes": lambda: build(2),
                "2 nodes of Ray": lambda: build(RayWorkers()),
                "2 nodes of Ray Data, map_batches, counted only": ray_data,
            },
            turns,
        )
    report.table(
        f"lengths of {rows:,} rows of GSM8K, GPT-2",
        ("", "seconds", "rows/s"),
        [(name, s, rows / s) for name, s in found.items()],
    )
    report.target(
        "speed of 2 one-core nodes over 2 processes",
        found["2 processes"] / found["2 nodes of Ray"],
        least=0.8,
    )


class Counted:
    """What each of Ray Data's actors does: the tokenizer is loaded once."""

    def __init__(self) -> None:
        from batchwright.data import load_tokenizer

        self._tokenizer = load_tokenizer("gpt2")

    def __call__(self, batch: Any) -> Any:
        import numpy as np

        texts = [
            f"{question}\n{answer}"
            for question, answer in zip(batch["question"], batch["answer"], strict=True)
        ]
        encoded = self._tokenizer.encode_batch(texts, special=False)
        return {"length": np.array([len(tokens) for tokens in encoded])}


def after_a_loss(report: Report, name: str, checks: dict[str, str]) -> None:
    """Train on two nodes, lose one, and wait for the next step; `checks` are settings of Ray."""
    import ray

    from batchwright.integrations.ray.train import train_sft_on_ray

    at: dict[str, float] = {}

    def notice() -> None:
        while sum(node["Alive"] for node in ray.nodes()) > 1:
            time.sleep(0.1)
        at["noticed"] = time.monotonic()

    def say(text: str) -> None:
        kind = "started" if text.startswith("training on ") else "given up"
        at[f"{kind} {sum(key.startswith(kind) for key in at)}"] = time.monotonic()

    def progress(step: int, total: int, loss: float) -> None:
        if "started 1" not in at and step >= 7 and "lost" not in at:
            at["lost"] = time.monotonic()
            lose(cluster, second)
            threading.Thread(target=notice, daemon=True).start()
        elif "started 1" in at and "stepped" not in at:
            at["stepped"] = time.monotonic()
            signal.raise_signal(signal.SIGUSR1)

    before = {key: os.environ.get(key) for key in checks}
    os.environ |= checks
    with tempfile.TemporaryDirectory() as folder, cluster_of(1) as cluster:
        second = new_node(cluster, 1)
        at["begun"] = time.monotonic()
        result = train_sft_on_ray(small_run(Path(folder)), workers=2, progress=progress, say=say)
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})
    if result.worlds != (2, 1):
        report.not_measured(f"the loss of a node, {name}", f"workers in turn: {result.worlds}")
        return
    parts = {
        "from the command to its first start": ("begun", "started 0"),
        "from the loss until Ray declares the node dead": ("lost", "noticed"),
        "until Ray Train has ended the other worker": ("noticed", "given up 0"),
        "until the new worker trains: process, torch, checkpoint": ("given up 0", "started 1"),
        "until its first step is done": ("started 1", "stepped"),
        "from the loss to the next optimizer step, in all": ("lost", "stepped"),
    }
    report.table(
        f"a node is lost in the middle of training, {name}",
        ("", "seconds"),
        [(part, at[end] - at[start]) for part, (start, end) in parts.items()],
    )


def small_run(folder: Path) -> Any:
    """A run of a tiny model that is not over before a node is lost."""
    from batchwright.train.sft.config import SftConfig

    rows = [{"prompt": f"question {n}", "completion": f" answer {n}"} for n in range(60)]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SftConfig(
        model="tiny",
        data=str(data),
        layout="packed",
        pack_max_len=128,
        token_budget=128,
        epochs=1000,
        schedule="constant",
        save_every=5,
        run_dir=folder / "run",
    )


def object_store(report: Report, rows: int, turns: int) -> None:
    if find_spec("moto") is None or find_spec("s3fs") is None:
        report.not_measured("object store", "moto or s3fs is not installed")
        return
    from batchwright.data.rows.source import open_source

    server = subprocess.Popen(
        [sys.executable, "-c", MOTO],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {
                "AWS_ENDPOINT_URL": server.stdout.readline().strip(),
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
                "BATCHWRIGHT_HOME": f"{folder}/home",
            }
            import s3fs

            local = Path(folder) / "rows.jsonl"
            line = json.dumps({"text": "some words " * 20})
            local.write_text(f"{line}\n" * rows)
            files = s3fs.S3FileSystem()
            files.mkdir("data")
            files.put(str(local), "data/rows.jsonl")

            def read(spec: str) -> int:
                source = open_source(spec)
                return sum(len(str(source[n])) for n in range(len(source)))

            start = time.perf_counter()
            read("s3://data/rows.jsonl")
            first = time.perf_counter() - start
            found = least_of(
                {
                    "local": lambda: read(str(local)),
                    "s3, from its copy": lambda: read("s3://data/rows.jsonl"),
                },
                turns,
            )
    finally:
        server.kill()
        server.wait()
    report.table(
        f"{rows:,} rows read one by one",
        ("", "seconds"),
        [("s3, the first time", first), *found.items()],
    )
    report.target(
        "speed of s3 over local after the first pass",
        found["local"] / found["s3, from its copy"],
        least=0.8,
    )


def prover(report: Report, steps: int) -> None:
    from batchwright.envs import ProverEnv
    from batchwright.logic import load_graph, parse_rules
    from batchwright.logic.loaders import shipped_graph

    graph = load_graph("family")
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)
    env = ProverEnv(graph.facts, rules, graph.train, 256, ask="tail", depth=4)
    env.reset()
    env.step(env.random_actions())
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        env.step(env.random_actions())
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    report.table(
        "the prover's environments in one process",
        ("", "value"),
        [("steps a second", 256 * steps / wall), ("share of a core it takes", busy / wall)],
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("ray", args)
    turns = 1 if args.smoke else 2 if args.quick else 3
    prover(report, 20 if args.smoke else 2000)
    object_store(report, 500 if args.smoke else 20_000, turns)
    if find_spec("ray") is None:
        report.not_measured("Ray", "ray is not installed; `make machines` installs it")
    else:
        with cluster_of(1, 1):
            calls(report, GROUP * (2 if args.smoke else 32), turns)
            lengths(report, 1 if args.smoke else 4, turns)
        if args.smoke:
            report.not_measured("a node lost in training", "it takes a minute")
            report.not_measured("verl's reward loop", "it takes a minute")
        else:
            after_a_loss(report, "Ray's settings", {})
            after_a_loss(report, "four checks, half a second apart", QUICK)
            verl_loop(report, GROUP * 32, turns)
    report.close()


if __name__ == "__main__":
    main()
