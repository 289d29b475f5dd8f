"""Permutations: bijections that never change and look like chance."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.jit import interpreted
from batchwright.permutation import (
    _sides,
    mix,
    mix_many,
    permutation,
    permute,
    permute_many,
    permute_run,
    unpermute,
)

M64 = 2**64 - 1
M32 = 2**32 - 1
keys = st.integers(0, M64)


def plain_mix(key: int, counter: int) -> int:
    x = (key + 0x9E3779B97F4A7C15 * (counter + 1)) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def plain_hash(x: int) -> int:
    x ^= x >> 15
    x = (x * 0x2C1B3C6D) & M32
    x ^= x >> 12
    x = (x * 0x297A2D39) & M32
    return x ^ (x >> 15)


def plain_permutation(n: int, key: int) -> list[int]:
    """Written from the description alone: swaps up to 64, an eight-round Feistel beyond."""
    if n <= 64:
        order = list(range(n))
        for last in reversed(range(1, n)):
            other = ((plain_mix(key, last) >> 32) * (last + 1)) >> 32
            order[last], order[other] = order[other], order[last]
        return order
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = []
    for index in range(n):
        x = index
        while True:
            sides = list(divmod(x, b))
            for number in range(8):
                # Even rounds move the left half by a hash of the right, odd ones the other way.
                moved, size = (0, a) if number % 2 == 0 else (1, b)
                half = (sides[1 - moved] + (plain_mix(key, number) & M32)) & M32
                sides[moved] = (sides[moved] + ((plain_hash(half) * size) >> 32)) % size
            x = sides[0] * b + sides[1]
            if x < n:
                break
        out.append(x)
    return out


def test_permutations_never_change() -> None:
    assert int(mix(np.uint64(42), np.uint64(7))) == 14769051326987775908
    for (n, key), expected in GOLDEN.items():
        assert permutation(n, np.uint64(key))[:10].tolist() == expected


GOLDEN: dict[tuple[int, int], list[int]] = {
    (1, 0): [0],
    (2, 5): [0, 1],
    (10, 42): [8, 2, 4, 7, 0, 5, 1, 9, 3, 6],
    (64, 18446744073709551615): [34, 45, 11, 63, 28, 58, 19, 44, 55, 54],
    (65, 0): [15, 28, 50, 2, 7, 24, 64, 43, 9, 10],
    (1000, 42): [531, 860, 333, 682, 238, 867, 409, 91, 962, 540],
    (12345, 9223372036854775808): [7112, 409, 8088, 1197, 10178, 9144, 2832, 3646, 4270, 2811],
}


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.integers(1, 70), st.integers(1, 700)), keys)
def test_orders_equal_their_plain_twin_and_invert(n: int, key: int) -> None:
    k = np.uint64(key)
    order = permutation(n, k)

    assert order.tolist() == plain_permutation(n, key)
    assert sorted(order.tolist()) == list(range(n))
    for index in range(0, n, max(1, n // 20)):
        assert permute(index, n, k) == order[index]
        assert unpermute(int(order[index]), n, k) == index


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1, exclude_max=True), keys)))
def test_many_orders_at_once_and_interpreted_ones_are_those_of_the_kernels(drawn) -> None:
    cases = [(int(share * n), n, np.uint64(key)) for n, share, key in drawn]
    # The same key names other orders of other sizes.
    cases += [(0, n, key) for _, _, key in cases[:2] for n in (2, 40, 41, 90)]
    index, n = (np.array([case[k] for case in cases], np.int64) for k in (0, 1))
    key = np.array([case[2] for case in cases], np.uint64)

    expected = [permute(*case) for case in cases]

    assert permute_many(index, n, key).tolist() == expected
    assert mix_many(key, n.astype(np.uint64)).tolist() == [
        int(mix(k, np.uint64(m))) for _, m, k in cases
    ]
    with interpreted():
        assert all(permutation(n, k)[i] == v for v, (i, n, k) in zip(expected, cases, strict=True))
        assert [permute(*case) for case in cases] == expected
        assert all(unpermute(v, n, k) == i for v, (i, n, k) in zip(expected, cases, strict=True))


@pytest.mark.parametrize("n", [2**52 - 1, 2**52, 2**52 + 1, (2**30 + 1) ** 2, 2**61 - 1])
def test_the_sides_of_huge_orders_are_exact(n: int) -> None:
    # Beyond 2**53 a double cannot tell neighbours apart; the sides are whole numbers all the same.
    a, b = _sides(n)

    assert a == math.isqrt(n - 1) + 1
    assert b == -(-n // a)


@pytest.mark.parametrize("n", [63, 64, 65, 4095, 4096, 4097, 65_536, 100_003])
def test_large_orders_are_bijections(n: int) -> None:
    order = permutation(n, np.uint64(n * 31))

    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**40 + 1, 2**61])
def test_huge_orders_invert_without_being_made(n: int) -> None:
    key = np.uint64(7)
    seen = set()
    for index in [0, 1, n // 2, n - 2, n - 1]:
        value = permute(index, n, key)
        assert 0 <= value < n
        assert unpermute(value, n, key) == index
        seen.add(value)
    assert len(seen) == 5


def chi_square(counts: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def within(chi: float, freedom: int) -> bool:
    """Six standard deviations either way: a fair draw almost never leaves, a flaw does at once."""
    return abs(chi - freedom) < 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_small_permutation_is_equally_likely(n: int) -> None:
    seen = Counter(
        tuple(permutation(n, np.uint64(plain_mix(1, draw))).tolist()) for draw in range(12_000)
    )
    counts = np.array([seen[order] for order in permutations(range(n))])

    assert within(chi_square(counts), max(1, math.factorial(n) - 1))


@pytest.mark.parametrize("n", [50, 65, 130])
def test_every_place_is_equally_likely_for_every_index(n: int) -> None:
    draws = 4000
    orders = np.array([permutation(n, np.uint64(plain_mix(2, i))) for i in range(draws)])
    counts = np.array([np.bincount(orders[:, index], minlength=n) for index in range(n)])

    assert within(chi_square(counts), (n - 1) ** 2)
    # Neighbours are as far apart as chance has it: the difference modulo n is uniform over 1..n-1.
    apart = np.bincount(((orders[:, 1:] - orders[:, :-1]) % n).ravel(), minlength=n)
    assert apart[0] == 0
    assert within(chi_square(apart[1:]), n - 2)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 2000), keys, st.data())
def test_a_run_is_the_part_of_the_permutation_that_it_names(
    n: int, key: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, n - 1))
    out = np.empty(data.draw(st.integers(1, n - start)), np.int64)
    expected = plain_permutation(n, key)[start : start + len(out)]

    permute_run(start, n, np.uint64(key), out)
    assert out.tolist() == expected
    out[:] = -1
    with interpreted():
        permute_run(start, n, np.uint64(key), out)
    assert out.tolist() == expected


def test_runs_of_large_permutations_are_those_of_single_indices() -> None:
    for n in (2**31 - 1, 10**9 + 7):
        key, out = np.uint64(n), np.empty(1000, np.int64)
        permute_run(n - 1000, n, key, out)

        assert out.tolist() == [permute(index, n, key) for index in range(n - 1000, n)]
