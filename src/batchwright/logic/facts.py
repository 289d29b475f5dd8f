"""Facts p(s, o) in two indexes: by predicate and subject, and by predicate and object.

A goal with one argument bound is answered by a slice of an array, whatever the size of the graph;
memory is bounded by the number of facts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from batchwright.errors import BadProgram, ConfigError
from batchwright.jit import kernel, quicker_without_numba
from batchwright.logic.rows import index_rows, row_span, span_of
from batchwright.logic.vocab import Vocab

__all__ = ["Facts", "as_triples", "check_size", "is_fact", "lower_bound"]

Ints = NDArray[np.int32]

MOST_TRIPLES = 2**63
"""Triples that could be made of the ids: each has a number of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Triples (head, predicate, tail), each once, and where to find them.

    With `N` entities, the objects of p(s, ?) are the slice `row_span(ps_ptr, p * N + s)` of
    `ps_obj`, and the subjects of p(?, o) the slice `row_span(po_ptr, p * N + o)` of `po_sub`, both
    ascending; see `batchwright.logic.rows`. The facts of a whole predicate are a slice of `ps_sub`
    and `ps_obj`: `group_span(ps_ptr, p, N)`. Self-loops p(x, x) are listed once more, in
    `loop_sub[loop_ptr[p] : loop_ptr[p + 1]]`.

    >>> vocab = Vocab.of(["a", "b", "c"], ["p"])
    >>> facts = Facts.of([(0, 0, 1), (0, 0, 2), (2, 0, 1)], vocab)
    >>> facts.tails(0, 0).tolist(), facts.heads(0, 1).tolist()
    ([1, 2], [0, 2])
    >>> facts.contains([0, 1], 0, [2, 2]).tolist()
    [True, False]
    """

    num_entities: int
    num_predicates: int
    ps_ptr: Ints
    ps_sub: Ints
    ps_obj: Ints
    po_ptr: Ints
    po_sub: Ints
    loop_ptr: Ints
    loop_sub: Ints

    @classmethod
    def of(cls, triples: ArrayLike, vocab: "Vocab | Facts") -> "Facts":
        """Index triples of ids of `vocab` (or of other facts); repeated ones count once."""
        given = as_triples(triples)
        n, preds = vocab.num_entities, vocab.num_predicates
        check_size(n, preds)
        high = np.array([n, preds, n])
        bad = np.flatnonzero(((given < 0) | (given >= high)).any(axis=1))
        if bad.size:
            raise BadProgram(
                f"triple {bad[0]:,} is {given[bad[0]].tolist()}, and ids are allowed up to "
                f"{(high - 1).tolist()}; index it with the vocabulary it came from"
            )
        h, p, t = (given[:, column].astype(np.int64) for column in range(3))
        by_subject = np.unique((p * n + h) * n + t) if n else np.empty(0, np.int64)
        row, obj = by_subject // max(n, 1), by_subject % max(n, 1)
        pred, sub = row // max(n, 1), row % max(n, 1)
        loops = sub == obj
        order = np.argsort((pred * n + obj) * n + sub, kind="stable")
        return cls(
            n,
            preds,
            index_rows(row, preds, n),
            sub.astype(np.int32),
            obj.astype(np.int32),
            index_rows((pred * n + obj)[order], preds, n),
            sub[order].astype(np.int32),
            index_rows(pred[loops], preds, 1),
            sub[loops].astype(np.int32),
        )

    def __len__(self) -> int:
        return len(self.ps_obj)

    @property
    def triples(self) -> Ints:
        """All facts as (head, predicate, tail), [n, 3], by predicate, head and tail."""
        n = self.num_entities
        spans = [span_of(self.ps_ptr, p * n, n) for p in range(self.num_predicates)]
        counts = [high - low for low, high in spans]
        preds = np.repeat(np.arange(self.num_predicates, dtype=np.int32), counts)
        return np.stack([self.ps_sub, preds, self.ps_obj], axis=1)

    def contains(self, h: ArrayLike, p: ArrayLike, t: ArrayLike) -> NDArray[np.bool_]:
        """Whether p(h, t) is a fact, for arrays that fit each other's shapes."""
        heads, preds, tails = np.broadcast_arrays(h, p, t)
        flat = np.stack([heads.ravel(), preds.ravel(), tails.ravel()], axis=1).astype(np.int32)
        if quicker_without_numba(0.01 * len(self.ps_ptr) + 0.2 * len(flat)):
            hits = self._contains_by_numpy(flat)
        else:
            hits = _contains(self.ps_ptr, self.ps_obj, self.num_entities, self.num_predicates, flat)
        return hits.reshape(heads.shape)

    def tails(self, h: int, p: int) -> Ints:
        """All t with p(h, t), ascending."""
        return self.ps_obj[slice(*span_of(self.ps_ptr, p * self.num_entities + h))]

    def heads(self, p: int, t: int) -> Ints:
        """All h with p(h, t), ascending."""
        return self.po_sub[slice(*span_of(self.po_ptr, p * self.num_entities + t))]

    def _contains_by_numpy(self, triples: Ints) -> NDArray[np.bool_]:
        """`_contains` for as long as numba is not worth loading."""
        n = self.num_entities
        (s, q, o), (h, p, t) = (each.T.astype(np.int64) for each in (self.triples, triples))
        facts, wanted = (q * n + s) * n + o, (p * n + h) * n + t
        place = np.searchsorted(facts, wanted)
        inside: NDArray[np.bool_] = (h >= 0) & (h < n) & (t >= 0) & (t < n) & (p >= 0)
        inside &= place < len(facts)
        inside[inside] = facts[place[inside]] == wanted[inside]
        return inside

    def __repr__(self) -> str:
        counts = f"{self.num_entities:,} entities, {self.num_predicates:,} predicates"
        return f"Facts({len(self):,} facts, {counts})"


def check_size(entities: int, predicates: int) -> None:
    """Refuse a vocabulary over which triples cannot be numbered."""
    possible = predicates * entities**2
    if possible >= MOST_TRIPLES:
        raise ConfigError(
            f"{predicates:,} predicates and {entities:,} entities can form {possible:,} triples; "
            f"fewer than 2**63 are allowed, split the graph by predicate"
        )


def as_triples(triples: ArrayLike) -> Ints:
    """An int32 array [n, 3] of anything that can be one."""
    array = np.asarray(triples)
    if array.size == 0:
        return np.empty((0, 3), np.int32)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise BadProgram(
            f"triples have shape [n, 3] and integer ids (head, predicate, tail), "
            f"not {list(array.shape)} of {array.dtype}"
        )
    return np.ascontiguousarray(array, np.int32)


@kernel
def lower_bound(values: Ints, low: int, high: int, wanted: int) -> int:
    """The first place in the ascending `values[low:high]` that is not below `wanted`."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def is_fact(ps_ptr: Ints, ps_obj: Ints, n: int, h: int, p: int, t: int) -> bool:
    """Whether p(h, t) is a fact; `n` is the number of entities."""
    low, end = row_span(ps_ptr, np.int64(p) * n + h)
    place = lower_bound(ps_obj, low, end, t)
    return bool(place < end and ps_obj[place] == t)


@kernel
def _contains(ps_ptr: Ints, ps_obj: Ints, n: int, preds: int, triples: Ints) -> NDArray[np.bool_]:
    """`is_fact` for each of `triples` (head, predicate, tail); ids out of range are not facts."""
    out = np.zeros(triples.shape[0], np.bool_)
    for i in range(triples.shape[0]):
        h, p, t = triples[i, 0], triples[i, 1], triples[i, 2]
        if 0 <= h < n and 0 <= p < preds:
            out[i] = is_fact(ps_ptr, ps_obj, n, h, p, t)
    return out
