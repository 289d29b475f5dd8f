"""Mutations and answers, sequential and batched: the speedup of concurrent calls.

    python benchmark_batching.py                                 # against the shipped simulator
    python benchmark_batching.py --endpoint ollama://localhost --model gemma3

Change NUM_QUERIES to test larger batches.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

from batchwright.calls import Texts, batch_mutate_queries, batch_query_target_model
from batchwright.calls.simulator import Simulator

NUM_QUERIES = 8
BATCH_SIZES = (1, 4, 8)

SUBJECTS = ("rivers", "bridges", "bees", "glaciers", "violins", "tides", "maps", "lanterns")
TEMPLATE = "Paraphrase the question; answer with the new question alone.\nQuestion: {}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", help="your server; default: start the simulator")
    parser.add_argument("--model", default="sim", help="the model's name there")
    args = parser.parse_args()
    queries = [
        f"What is the best known fact about {SUBJECTS[i % len(SUBJECTS)]}, number {i + 1}?"
        for i in range(NUM_QUERIES)
    ]
    prompts = [TEMPLATE.format(query) for query in queries]
    with server(args.endpoint) as address:
        model = f"{address}#{args.model}"
        # A warm-up call opens connections and, on a real server, loads the model.
        batch_query_target_model(["Are you there?"], model, max_tokens=64)
        print(f"{NUM_QUERIES} queries, {args.model} at {address}")
        compare("mutate", lambda n: batch_mutate_queries(queries, prompts, model, batch_size=n))
        compare(
            "answer",
            lambda n: batch_query_target_model(queries, model, max_tokens=64, batch_size=n),
        )


@contextlib.contextmanager
def server(given: str | None) -> Iterator[str]:
    """The address of the given server, or of a simulated one that sustains eight calls at once."""
    if given is not None:
        yield given
        return
    with Simulator(kind="queue", knee=8, latency_s=0.1).running() as address:
        yield address


def compare(name: str, work: Callable[[int], Texts]) -> None:
    """Time the same work with each batch size; 1 is sequential."""
    alone = 0.0
    for size in BATCH_SIZES:
        start = time.perf_counter()
        texts = work(size)
        seconds = time.perf_counter() - start
        alone = alone or seconds
        print(
            f"  {name}, batch size {size}: {seconds:6.2f} s, {alone / seconds:4.1f}x, "
            f"{texts.invalid_count} of {len(texts)} invalid"
        )


if __name__ == "__main__":
    main()
