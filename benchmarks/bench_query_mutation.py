"""Steps of query mutation: time by the way calls are made, and what PPO gains on a real model.

A step of N environments is N rewritings and N answers, each answer after its rewriting. The same
questions and operators go to a simulated server of lognormal latency by

    sequential    one call after the other
    two phases    a thread pool: all rewritings, then all answers (`width` threads), http.client
    batchwright   a pipeline an environment through the pool, `width` calls in flight or `auto`

Step time is that of training: the time of a rollout of several steps by their number. In ours no
environment waits for the slowest one of a step (`--no-overlap` makes all of them wait, to the same
steps), and the rollout includes the first answers to its questions as they stand. A step for
itself ends with its slowest environment, so pipelines can gain only what two waits for the slowest
call take longer than one wait for the slowest pair: that stands beside it, with the bound by the
same latencies. Nothing is in a cache: each step has questions of its own. `--real` instead serves
SmolLM2 with llama.cpp, trains on it and compares ways on held-out questions, which takes many
minutes on a processor and is saved apart.
"""

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from batchwright.calls.queries import mutated_text
from batchwright.calls.simulator import Simulator
from batchwright.envs.query_mutation.env import MutationPipelines
from batchwright.envs.query_mutation.models import SYSTEM
from batchwright.envs.query_mutation.operators import OPERATORS
from batchwright.envs.questions import Question, load_questions
from batchwright.events import read_events
from batchwright.report.figures import intervals_png
from batchwright.rl.policy import policy_for
from batchwright.rl.rollout import Runner
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.query_mutator.evaluate import evaluate_run
from batchwright.train.query_mutator.loop import train_query_mutator
from batchwright.train.query_mutator.models import Models, open_models
from batchwright.train.query_mutator.rollout import OverlappingRunner
from common import RESULTS, Report, arguments

LATENCY_S = 0.05
SIGMA = 0.5
STEPS = 8
"""Of a rollout."""
KNEE = 64
ASKING = [number for number, operator in enumerate(OPERATORS) if operator.asks]
WIDTHS = (1, 2, 4, 8, 16, 32)


def tasks(n: int, step: int) -> list[tuple[Question, int]]:
    """Questions and operators of one step, no question twice in a measurement."""
    questions = load_questions("shipped", "all")
    chosen = [questions[(step * n + b) % len(questions)] for b in range(n)]
    return [(q, ASKING[(step + b) % len(ASKING)]) for b, q in enumerate(chosen)]


def post(url: str, model: str, messages: list[dict[str, str]], **more: float) -> str:
    """One call by the standard library, on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        body = json.dumps({"model": model, "messages": messages, "max_tokens": 64, **more})
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return str(answer["choices"][0]["message"]["content"])


def mutate(url: str, task: tuple[Question, int]) -> str:
    question, operator = task
    prompt = OPERATORS[operator].prompt(question.question, question.question)
    said = post(url, "sim-mutator", [{"role": "user", "content": prompt}], temperature=0.7, seed=1)
    return mutated_text(said) or question.question


def answer(url: str, wording: str) -> str:
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": wording}]
    return post(url, "sim-qa", asked, temperature=0)


def sequential(url: str, given: Sequence[tuple[Question, int]]) -> None:
    for task in given:
        answer(url, mutate(url, task))


def two_phases(url: str, given: Sequence[tuple[Question, int]], width: int) -> None:
    with ThreadPoolExecutor(width) as threads:
        wordings = list(threads.map(lambda task: mutate(url, task), given))
    with ThreadPoolExecutor(width) as threads:
        list(threads.map(lambda wording: answer(url, wording), wordings))


def environments(models: Models, n: int, number: int, **more: Any) -> MutationPipelines:
    """The environments of one step, each with the question that the other ways have there."""
    return MutationPipelines(
        *([q for q, _ in tasks(n, number)], models.mutator, models.target, models.rate, n),
        run=models.run,
        embed=models.embed,
        dim=models.dim,
        least_similarity=-1.0,
        order="each",
        seed=number,
        **more,
    )


@contextmanager
def ours(url: str, n: int, width: int | str) -> Iterator[Callable[[int], float]]:
    """Seconds of a step of our environments; what comes before the step is not timed."""
    with opened(url, n, width) as models:

        def step(number: int) -> float:
            env = environments(models, n, number)
            env.reset()
            start = time.perf_counter()
            taken = env.step(np.array([operator for _, operator in tasks(n, number)]))
            seconds = time.perf_counter() - start
            assert taken.valid.all(), taken.info["why"]
            return seconds

        yield step


@contextmanager
def our_rollout(
    url: str, n: int, width: int | str, *, overlap: bool = True
) -> Iterator[Callable[[int], float]]:
    """Seconds of a rollout of our environments, the first answers to its questions included."""
    with opened(url, n, width) as models:

        def rollout(number: int) -> float:
            asking = [OPERATORS[at] for at in ASKING]
            env = environments(models, n, number, operators=asking, max_steps=STEPS)
            runner = (OverlappingRunner if overlap else Runner)(env, STEPS, seed=number)
            policy = policy_for(env, seed=0)
            start = time.perf_counter()
            taken = runner.collect(policy)
            seconds = time.perf_counter() - start
            assert taken.valid.all()
            return seconds

        yield rollout


@contextmanager
def opened(url: str, n: int, width: int | str) -> Iterator[Models]:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        config = QueryMutatorConfig(
            target_model=f"{url}/v1#sim-qa",
            mutator_model=f"{url}/v1#sim-mutator",
            batch_size=str(width),
            num_processes=n,
            save_dir=Path(folder),
        )
        with open_models(config, Path(folder)) as models:
            yield models


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare_steps(report: Report, url: str, n: int, repeats: int) -> None:
    """Seconds of a step in rollouts, as PPO needs them."""
    found: dict[str, float] = {}
    # Sequential steps differ little from each other, and take long.
    found["sequential"] = timed(lambda: sequential(url, tasks(n, 0)))

    def phases(number: int, width: int) -> None:
        for step in range(STEPS):
            two_phases(url, tasks(n, number + step), width)

    for width in (8, n):
        phases(300, width)
        rollouts = [timed(lambda s=s, w=width: phases(s, w)) for s in range(repeats)]
        found[f"two phases, {width} threads"] = statistics.median(rollouts) / STEPS
    ours_by = {"step by step": (n, False), "": (n, True), "auto": ("auto", True)}
    for name, (limit, overlap) in ours_by.items():
        with our_rollout(url, n, limit, overlap=overlap) as rollout:
            rollout(300)  # connections, and for auto the limit
            seconds = statistics.median(map(rollout, range(repeats)))
            found[f"batchwright, {name}" if name else "batchwright"] = seconds / STEPS
    best = found["batchwright"]
    report.table(
        f"a step of {n} environments in rollouts of {STEPS}, {1000 * LATENCY_S:.0f} ms a call: "
        f"median of {repeats}",
        ("", "seconds", "x sequential", "of ours"),
        [[name, s, found["sequential"] / s, s / best] for name, s in found.items()],
    )
    if n == 64:
        report.target(f"N = {n}: times sequential", found["sequential"] / best, least=20.0)
        wide = found[f"two phases, {n} threads"] / best
        report.target(f"N = {n}: times two phases of width {n}", wide, least=1.5)


def compare_single_steps(report: Report, url: str, n: int, repeats: int) -> None:
    """One step for itself, where everybody waits for the slowest environment."""
    seconds = [timed(lambda s=s: two_phases(url, tasks(n, s), n)) for s in range(repeats)]
    phases = statistics.median(seconds)
    with ours(url, n, n) as step:
        step(100)
        alone = statistics.median(map(step, range(repeats)))
    report.table(
        f"one step of {n} environments for itself: median of {repeats}",
        ("", "seconds", "x two phases"),
        [
            [f"two phases, {n} threads", phases, 1.0],
            ["batchwright", alone, phases / alone],
            ["bound by the same latencies", None, bound(n)],
        ],
    )


def bound(n: int) -> float:
    """How far the slowest of n pairs of calls is ahead of two slowest calls, in the median."""
    latencies = np.exp(SIGMA * np.random.default_rng(0).standard_normal((2, 20_000, n)))
    apart, together = latencies.max(2).sum(0), latencies.sum(0).max(1)
    return float(np.median(apart) / np.median(together))


def compare_widths(report: Report, url: str, n: int, repeats: int) -> None:
    """The documents' table of batch sizes, and `auto` beside it."""
    found: dict[str, list[float]] = {}
    for width in (*WIDTHS, "auto"):
        with ours(url, n, width) as step:
            step(200)
            if width == "auto":
                for number in range(201, 209):
                    step(number)
            # Steps of one call at a time differ little, and take long.
            steps = repeats if width == "auto" or width >= 8 else max(2, repeats // 5)
            found[str(width)] = [step(number) for number in range(steps)]
    medians = {width: statistics.median(seconds) for width, seconds in found.items()}
    best = min(value for width, value in medians.items() if width != "auto")
    report.table(
        f"seconds of a step of {n} environments by batch size",
        ("batch size", "seconds", "x batch size 1"),
        [[width, value, medians["1"] / value] for width, value in medians.items()],
    )
    report.target("auto: of the best batch size", medians["auto"] / best, most=1.05)
    rows = [
        (f"batch size {width}", medians[width], min(seconds), max(seconds))
        for width, seconds in found.items()
    ]
    if not report.args.no_save and not report.args.quick:
        path = RESULTS / "query_mutation.png"
        intervals_png(path, rows, "seconds of a step, median", "from the least to the greatest")


@contextmanager
def served() -> Iterator[str]:
    """SmolLM2 on llama.cpp, by the installed command."""
    command = [sys.executable, "-m", "batchwright", "serve", "smollm2", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--parallel", "4"], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "http" not in line:
            raise RuntimeError(f"the server said {line!r}")
        yield next(word for word in line.split() if word.startswith("http")).rstrip("/.,")
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def real(report: Report, steps: int, questions: int) -> None:
    """PPO with the real model as mutator and target; every answer counts."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, served() as url:
        base = url if url.endswith("/v1") else url + "/v1"
        config = QueryMutatorConfig(
            target_model=f"{base}#smollm2",
            num_processes=16,
            num_env_steps=steps,
            num_steps=8,
            per_episode_max_steps=1,
            max_tokens=40,
            deadline_s=600.0,
            save_dir=Path(folder) / "run",
        )
        start = time.perf_counter()
        result = train_query_mutator(config)
        trained = time.perf_counter() - start
        start = time.perf_counter()
        found = evaluate_run(config.save_dir, questions=questions, bandit_episodes=64, output=None)
        evaluated = time.perf_counter() - start
        records = [e.fields for e in read_events(config.save_dir / "events.jsonl")]
        flight = [row["in_flight"] for row in records if row.get("in_flight") is not None]
    rows = [
        [
            *(one.name, one.plan, 100 * one.accuracy, 100 * one.gain),
            f"{100 * one.low:+.1f} to {100 * one.high:+.1f}",
            *(one.questions, one.calls, one.tokens),
        ]
        for one in found.strategies
    ]
    report.table(
        f"SmolLM2-135M on its own server: {steps} steps of training, {questions} test questions",
        ("", "operators", "right %", "gain", "95 %", "questions", "calls", "tokens"),
        rows,
    )
    busy = statistics.fmean(min(1.0, value / 4) for value in flight) if flight else None
    report.table(
        "cost of the run",
        ("", ""),
        [
            ["calls of training", result.calls.get("asked")],
            ["of them sent", result.calls.get("sent")],
            ["seconds of training", trained],
            ["seconds of evaluation", evaluated],
            ["steps left out as invalid", result.invalid_steps],
            ["call slots in use, % of 4", None if busy is None else 100 * busy],
            ["target right in every wording, %", 100 * found.robustness.worst],
            ["target right in at least one, %", 100 * found.robustness.best],
        ],
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="train on SmolLM2 instead")
    parser.add_argument("--real-steps", type=int, default=512)
    parser.add_argument("--real-questions", type=int, default=60)
    args = parser.parse_args()
    if args.real:
        report = Report("query_mutation_real", args)
        real(report, args.real_steps, args.real_questions)
        report.close()
        return
    report = Report("query_mutation", args)
    server = Simulator(
        questions=load_questions("shipped", "all"), knee=KNEE, latency_s=LATENCY_S, sigma=SIGMA
    )
    with server.running() as url:
        for n in (4,) if args.smoke else (16,) if args.quick else (16, 64):
            compare_steps(report, url, n, 2 if args.quick else 3)
        size, steps = (4 if args.smoke else 16, 2) if args.quick else (64, 15)
        compare_single_steps(report, url, size, steps)
        compare_widths(report, url, 8 if args.smoke else 32, 2 if args.quick else 20)
    report.not_measured("SmolLM2", "`--real` has a file of its own")
    report.close()


if __name__ == "__main__":
    main()
