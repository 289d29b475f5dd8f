"""Rows encoded on all nodes of a Ray cluster, by the same code and in the same order as here.

    here: file, range of rows  ->  task: reads and encodes them  ->  here: written in order

Where a task cannot read the file, or nobody else can, the rows are read here and sent.
"""

import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from batchwright import __version__
from batchwright.data.build.known import Known
from batchwright.data.build.workers import Begin
from batchwright.data.rows.elsewhere import NotTheSame, far_chunk
from batchwright.data.rows.source import Chunk, Source
from batchwright.data.tokenizers.load import load_tokenizer
from batchwright.data.tokenizers.tokenizer import LossOn, Tokenizer, with_loss_on
from batchwright.errors import BatchwrightError, Mismatch, need, one_line
from batchwright.integrations.ray.cluster import join, raised_there, same_version

__all__ = ["RayWorkers"]

T = TypeVar("T")
Setup = tuple[str, str, LossOn, str]
"""Version of the package; name, loss rule and fingerprint of the tokenizer."""
Rows = tuple[int, int]

TASK_CHUNKS = 8
"""Chunks of rows in one task: its start costs as much as encoding some hundred rows."""
RETRIES = 5
"""Of a task whose worker or node was lost: rows that kill every worker must end the build."""
_loaded: dict[Setup, Tokenizer] = {}

log = logging.getLogger(__name__)


class RayWorkers:
    """In the place of a number of `workers`: those of the Ray cluster, one for each of its cores.

    A task is told a file and which of its rows, and reads them itself: from a folder that the
    nodes share, or from an object store. Pipes, compressed files, datasets in memory, and files
    that a node does not see as they are here are read here, and their rows are sent. The workers
    need the tokenizer by the same name. A task whose worker or node is lost is made again
    elsewhere; the result is that of one machine, byte for byte. Joins the cluster of RAY_ADDRESS
    unless `ray.init` was called before.
    """

    def __init__(self) -> None:
        self.sent = 0
        """Rows that were sent, because they could not be read where they were encoded."""
        self._told = False
        """Whether a node was named that cannot read the data of the build that is under way."""

    def map(
        self,
        begin: Begin[T],
        source: Source,
        ranges: Iterator[Rows],
        tokenizer: Tokenizer,
        known: Known,
    ) -> Iterator[T]:
        """What becomes of the chunk of each range of rows, in order."""
        ray = need("ray", extra="ray")
        if not ray.is_initialized():
            join()
        self._told = False
        setup = (__version__, tokenizer.name, tokenizer.loss_on, tokenizer.fingerprint)
        shared = ray.put(known)
        task = ray.remote(_encoded).options(num_cpus=1, max_retries=RETRIES)

        def start(group: list[Rows], *, send: bool) -> Any:
            far = [None if send else far_chunk(source, *rows) for rows in group]
            chunks = [one or source.chunk(*rows) for one, rows in zip(far, group, strict=True)]
            self.sent += sum(b - a for one, (a, b) in zip(far, group, strict=True) if one is None)
            return task.remote(begin, chunks, setup, shared)

        waiting: deque[tuple[list[Rows], Any]] = deque()

        def taken() -> list[Any]:
            group, one = waiting.popleft()
            found = self._result(ray, one)
            if isinstance(found, _Unread):
                self._tell(source, found)
                found = self._result(ray, start(group, send=True))
            assert not isinstance(found, _Unread)
            return found

        try:
            while group := list(islice(ranges, TASK_CHUNKS)):
                waiting.append((group, start(group, send=self._told)))
                # Nodes come and go: so many as keep all cores of the moment busy.
                if len(waiting) >= 2 * max(2, int(ray.cluster_resources().get("CPU", 1))):
                    yield from taken()
            while waiting:
                yield from taken()
        finally:
            for _, one in waiting:
                ray.cancel(one)

    def _tell(self, source: Source, unread: "_Unread") -> None:
        if not self._told:
            log.warning(
                "node %s cannot read %s (%s): the rows are read here and sent; put the data on a "
                "folder that all nodes share, or in an object store",
                *(unread.node, source.name, unread.why),
            )
        self._told = True

    def _result(self, ray: Any, task: Any) -> "list[Any] | _Unread":
        try:
            found: list[Any] | _Unread = ray.get(task)
            return found
        except ray.exceptions.RayTaskError as error:
            raise raised_there(error) from None
        except ray.exceptions.RayError as error:
            raise BatchwrightError(
                f"rows were lost with their worker {RETRIES + 1} times, perhaps out of memory: "
                f"{one_line(error)[:300]}; run again to resume"
            ) from None


@dataclass(frozen=True, slots=True)
class _Unread:
    """What a task returns that cannot read its rows."""

    node: str
    why: str


def _encoded(
    begin: Begin[T], group: list[Chunk], setup: Setup, known: Known
) -> "list[T] | _Unread":
    """On a worker: what becomes of some chunks."""
    # One task a core already; threads of the tokenizers library would compete for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if setup not in _loaded:
        version, name, loss_on, fingerprint = setup
        same_version(version)
        tokenizer = with_loss_on(load_tokenizer(name), loss_on)
        if tokenizer.fingerprint != fingerprint:
            raise Mismatch(
                f"the tokenizer {name} is another one on a node of the cluster; put the same "
                f"files on all nodes"
            )
        _loaded[setup] = tokenizer
    made = []
    for chunk in group:
        try:
            work = begin(chunk, _loaded[setup], known)
        except NotTheSame as error:
            import ray

            return _Unread(ray.util.get_node_ip_address(), str(error))
        work.tokenise()
        made.append(work.result())
    return made
