"""How far the money goes: no call that may cost more than is left."""

from batchwright.calls.engine.stats import Ledger, estimate_usage
from batchwright.calls.request import Request

__all__ = ["Purse"]


class Purse:
    """At most `most` dollars for the calls of a ledger.

    What is under way counts as the mean of what came back, or before that as estimated, so only
    answers longer than usual can pass the sum, and not by much.
    """

    def __init__(self, most: float, ledger: Ledger) -> None:
        self.most = most
        self.empty = False
        """No call is made any more, whatever the ones under way turn out to cost."""
        self._ledger = ledger

    def allows(self, request: Request, under_way: int) -> bool:
        """Whether there is money for this call beside those under way."""
        spent = self._ledger.cost + (under_way + 1) * self._each(request)
        return not self.empty and spent <= self.most

    def close(self, request: Request) -> str:
        """Nothing is under way and the next call is too much: a sentence for all that wait."""
        self.empty = True
        return (
            f"max_cost={self.most:g} is reached, {self._ledger.cost:.6g} were spent and the next "
            f"call would cost about {self._each(request):.2g}; raise it and run again, what came "
            f"back is kept"
        )

    def _each(self, request: Request) -> float:
        ledger = self._ledger
        return ledger.mean_cost or ledger.price(request, estimate_usage(request))
