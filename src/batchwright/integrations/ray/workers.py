"""Rows encoded on all nodes of a Ray cluster, by the same code and in the same order as here."""

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

from batchwright import __version__
from batchwright.data.build.known import Known
from batchwright.data.build.workers import Begin
from batchwright.data.rows.source import Chunk
from batchwright.data.tokenizers.load import load_tokenizer
from batchwright.data.tokenizers.tokenizer import LossOn, Tokenizer, with_loss_on
from batchwright.errors import BatchwrightError, Mismatch, need, one_line
from batchwright.integrations.ray.cluster import join, raised_there

__all__ = ["RayWorkers"]

T = TypeVar("T")
Setup = tuple[str, str, LossOn, str]
"""Version of the package; name, loss rule and fingerprint of the tokenizer."""

TASK_CHUNKS = 8
"""Chunks of rows in one task: its start costs as much as encoding some hundred rows."""
RETRIES = 5
"""Of a task whose worker or node was lost: rows that kill every worker must end the build."""
_loaded: dict[Setup, Tokenizer] = {}


class RayWorkers:
    """In the place of a number of `workers`: those of the Ray cluster, one for each of its cores.

    The rows are read here and sent to the workers, which need the tokenizer by the same name. A
    task whose worker or node is lost is made again elsewhere; the result is that of one machine,
    byte for byte. Joins the cluster of RAY_ADDRESS unless `ray.init` was called before.
    """

    def map(
        self, begin: Begin[T], chunks: Iterator[Chunk], tokenizer: Tokenizer, known: Known
    ) -> Iterator[T]:
        """What becomes of each chunk, in order."""
        ray = need("ray", extra="ray")
        if not ray.is_initialized():
            join()
        setup = (__version__, tokenizer.name, tokenizer.loss_on, tokenizer.fingerprint)
        shared = ray.put(known)
        task = ray.remote(_encoded).options(num_cpus=1, max_retries=RETRIES)
        waiting: deque[Any] = deque()
        try:
            while group := list(islice(chunks, TASK_CHUNKS)):
                waiting.append(task.remote(begin, group, setup, shared))
                # Nodes come and go: so many as keep all cores of the moment busy.
                if len(waiting) >= 2 * max(2, int(ray.cluster_resources().get("CPU", 1))):
                    yield from self._result(ray, waiting.popleft())
            while waiting:
                yield from self._result(ray, waiting.popleft())
        finally:
            for one in waiting:
                ray.cancel(one)

    def _result(self, ray: Any, task: Any) -> list[Any]:
        try:
            found: list[Any] = ray.get(task)
            return found
        except ray.exceptions.RayTaskError as error:
            raise raised_there(error) from None
        except ray.exceptions.RayError as error:
            raise BatchwrightError(
                f"rows were lost with their worker {RETRIES + 1} times, perhaps out of memory: "
                f"{one_line(error)[:300]}; run again to resume"
            ) from None


def _encoded(begin: Begin[T], group: list[Chunk], setup: Setup, known: Known) -> list[T]:
    """On a worker: what becomes of some chunks."""
    # One task a core already; threads of the tokenizers library would compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if setup not in _loaded:
        version, name, loss_on, fingerprint = setup
        if version != __version__:
            raise Mismatch(
                f"a node has batchwright {__version__} and the command {version}; install one "
                f"version on all nodes"
            )
        tokenizer = with_loss_on(load_tokenizer(name), loss_on)
        if tokenizer.fingerprint != fingerprint:
            raise Mismatch(
                f"the tokenizer {name} is another one on a node of the cluster; put the same "
                f"files on all nodes"
            )
        _loaded[setup] = tokenizer
    made = []
    for chunk in group:
        work = begin(chunk, _loaded[setup], known)
        work.tokenise()
        made.append(work.result())
    return made
