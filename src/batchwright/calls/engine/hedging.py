"""Which calls are so late that a second try is worth it."""

from collections.abc import Iterator, Mapping

from batchwright.calls.engine.job import Job, Run
from batchwright.calls.engine.stats import Ledger

__all__ = ["stragglers"]

FROM = 16
"""So many answers must be known before one can be called late."""
SHARE = 0.05
"""At most this share of all tries are hedges."""


def stragglers(flying: Mapping[Job, Run], ledger: Ledger, now: float) -> Iterator[tuple[Job, Run]]:
    """Calls to a server that take longer than twice the 95th percentile, the longest first.

    `flying` is in the order of starting. Hedges are to be counted in the ledger as they are sent:
    there are no more stragglers once they are 2 and one in twenty tries.
    """
    if ledger.measured < FROM:
        return
    (p95,) = ledger.quantiles(0.95)
    late = 2 * (p95 or 0.0)
    for job, run in list(flying.items()):
        if now - run.started <= late or ledger.hedges >= 2 + SHARE * ledger.sent:
            return
        if len(job.runs) == 1 and not job.over and run.lane.endpoint.remote:
            yield job, run
