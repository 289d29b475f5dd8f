"""The prover environment's memory: copies live apart, and no kernel leaves its arrays.

A mistake here ends the interpreter, so the checks that could do that run in processes of their own:
this file is also the script that they run.
"""

import copy
import gc
import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from batchwright.envs import ProverEnv
from batchwright.envs.prover.blocks import LINE, ROW, allocate, fields, pack, stamp, view
from batchwright.envs.prover.kernels import step as kernels
from batchwright.envs.prover.layout import Memory, Task
from batchwright.errors import ConfigError, Mismatch
from batchwright.jit import DEBUG
from batchwright.logic import Facts, Vocab, load_graph, parse_rules, prove_all
from batchwright.logic.loaders import shipped_graph

SRC = Path(__file__).parents[1] / "src"
STEPS = 40


class Small(NamedTuple):
    """A layout to test with."""

    ints: Annotated[NDArray[np.int32], 2]
    flags: Annotated[NDArray[np.bool_], 1]
    none: Annotated[NDArray[np.int64], 1]
    cube: Annotated[NDArray[np.float32], 3]
    longs: Annotated[NDArray[np.int64], 2]


SHAPES = {"ints": (3, 5), "flags": (7,), "none": (0,), "cube": (2, 3, 4), "longs": (2, 2)}


def ran(check: str, **more: str) -> None:
    """Run one of `CHECKS` in a process of its own; it must end well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, check],
        env={**os.environ, "PYTHONPATH": str(SRC), **more},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (0, f"{check}: well\n"), done.stderr[-2000:]


def falling(triples: NDArray[np.int32]) -> NDArray[np.float64]:
    """A potential that can be pickled."""
    return triples[:, 2] * 0.1


def family(batch_size: int = 5, **settings: Any) -> ProverEnv:
    graph = load_graph(shipped_graph())
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)
    return ProverEnv(graph.facts, rules, graph.train, batch_size, **settings)


def taught() -> ProverEnv:
    """An environment with everything that one may have."""
    graph = load_graph(shipped_graph())
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)
    queries = graph.train[:30]
    return ProverEnv(
        graph.facts,
        rules,
        queries,
        5,
        negatives=1,
        depth=4,
        max_candidates=6,
        teacher=prove_all(queries, graph.facts, rules, 4),
        potential=falling,
    )


def played(env: ProverEnv, steps: int = STEPS) -> str:
    """A digest of all that is seen in random play, teacher and state included."""
    seen = hashlib.sha256()
    for number in range(steps):
        step = env.step(env.random_actions(number))
        arrays = {**step.obs, **step.info}
        arrays |= {f"final {name}": array[step.done] for name, array in step.final_obs.items()}
        parts = ("reward", "terminated", "truncated", "valid")
        arrays |= {name: getattr(step, name) for name in parts}
        for name in sorted(arrays):
            seen.update(np.ascontiguousarray(arrays[name]).tobytes())
        if env._teacher is not None:
            seen.update(env.expert_actions().tobytes())
    for value in env.state_dict().values():
        seen.update(value.encode() if isinstance(value, str) else value.tobytes())
    return seen.hexdigest()


def moved(make: Callable[[], ProverEnv]) -> ProverEnv:
    """In the middle of episodes."""
    env = make()
    played(env, 7)
    return env


def pickled(env: ProverEnv) -> ProverEnv:
    again: ProverEnv = pickle.loads(pickle.dumps(env))
    return again


def same_trajectory_apart() -> None:
    for make in (family, taught):
        expected = played(moved(make))
        for copied in (copy.copy, copy.deepcopy, pickled):
            env = moved(make)
            before = env._memory.copy()
            other = copied(env)
            assert played(other) == expected, copied
            # The copy has moved, and nothing of the original has.
            assert np.array_equal(env._memory, before), copied
            assert played(env) == expected, copied


def original_gone() -> None:
    for copied in (copy.copy, copy.deepcopy, pickled):
        env = moved(taught)
        other = copied(env)
        twice = copied(other)
        del env, other
        gc.collect()
        # What was freed is taken by someone else.
        junk = [np.full(size, -1, np.int64) for size in (10, 1000, 100_000) for _ in range(20)]
        assert played(twice) == played(moved(taught))
        assert len(junk) == 60


def _child(env: ProverEnv, answers: Any) -> None:
    answers.put(played(env))


def other_processes() -> None:
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        env = moved(taught)
        before = env._memory.copy()
        child = context.Process(target=_child, args=(env, answers))
        child.start()
        found = answers.get(timeout=120)
        child.join(timeout=60)
        assert child.exitcode == 0, method
        assert np.array_equal(env._memory, before), method
        assert found == played(env), method


def graphs() -> list[ProverEnv]:
    """Environments that reach every branch of the kernels, pages and cuts included."""
    envs = [
        family(ask=ask, depth=5, max_candidates=width, goals=goals)
        for ask, width, goals in (("truth", 64, 6), ("head", 5, 3), ("tail", 3, 2), ("both", 9, 1))
    ]
    envs += [taught(), family(600, once=True), family(negatives=3, depth=1)]
    odd = """
    p(X,X).
    p(a,X) :- q(X,Y), q(Y,X).
    p(X,Y) :- q(X,Z), p(Z,W), q(W,Y).
    q(X,Y) :- p(Y,X).
    q(X,Y) :- p(Z,Z), q(X,Y).
    q(X,X) :- p(X,V), p(V,W), q(W,X).
    """
    for number in range(4):
        draws = np.random.default_rng(number)
        vocab = Vocab.of("abcdefgh"[: 2 + 2 * number], ["p", "q"])
        n = vocab.num_entities
        triples = np.stack([draws.integers(0, m, 6 * n) for m in (n, 2, n)], 1)
        envs += [
            ProverEnv(
                Facts.of(triples, vocab),
                parse_rules(odd, vocab),
                triples,
                9,
                depth=6,
                goals=1 + 2 * number,
                max_candidates=4 + number,
                inverse=np.array([1, 0], np.int32),
                ask=ask,  # type: ignore[arg-type]
            )
            for ask in ("truth", "both")
        ]
    return envs


def other_threads() -> None:
    """Several threads on one environment: each call plays, or is refused; none ends the process."""
    env, copied = family(256), []
    env.reset()
    refused: list[str] = []

    def play() -> None:
        for _ in range(300):
            try:
                env.step(env.random_actions())
                copied.append(copy.deepcopy(env))
                copied.clear()
            except ConfigError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("in use by another thread" in sentence for sentence in refused)
    # Alone again, it goes on, and so does a copy.
    for one in (env, copy.deepcopy(env)):
        one.step(one.random_actions())


def inside_a_step() -> None:
    """A second thread that comes while a step is under way is refused, for certain."""
    refused: list[str] = []

    def shaped(triples: NDArray[np.int32]) -> NDArray[np.float64]:
        def other() -> None:
            try:
                env.step(np.zeros(5, np.int64))
            except ConfigError as error:
                refused.append(str(error))

        if playing:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return triples[:, 2] * 0.1

    playing = False
    env = family(potential=shaped)
    env.reset()
    playing = True
    env.step(env.random_actions())
    assert refused
    assert "give each thread a copy" in refused[0]


def bounds_hold() -> None:
    assert DEBUG
    for env in graphs():
        played(env, 200)
        # Actions that no mask allows.
        env.step(np.arange(env.num_envs) * 10**9 - 7)
        env.reset(np.arange(env.num_envs) % 2 == 0)
        played(env, 5)


def hostile_states() -> None:
    assert DEBUG
    draws = np.random.default_rng(0)
    refused = taken = 0
    for env in graphs():
        good = env.state_dict()
        for _ in range(60):
            bad = {name: copy.copy(array) for name, array in good.items()}
            for _ in range(draws.integers(1, 4)):
                name = draws.choice(["slots", "goals", "history", "counters", "query"])
                flat = bad[name].reshape(-1)
                extremes = np.iinfo(flat.dtype)
                values = [-1, 0, 1, 5, 100, -(10**6), 10**6, extremes.min, extremes.max]
                flat[draws.integers(0, len(flat))] = draws.choice(values)
            try:
                env.load_state_dict(bad)
            except Mismatch:
                refused += 1
                continue
            taken += 1
            played(env, 12)
    assert refused > 50, refused
    assert taken > 50, taken


def too_small() -> None:
    assert DEBUG
    for name in ("scratch", "history", "candidates", "slots", "final_goals", "live"):
        env = graphs()[-1]
        place = Memory._fields.index(name)
        env._memory[place * ROW + 1 + fields(Memory)[place][1]] = 2
        try:
            played(env, 100)
        except IndexError:
            continue
        raise AssertionError(f"an index left {name}, and nobody noticed")


CHECKS = {
    check.__name__: check
    for check in (
        *(same_trajectory_apart, original_gone, other_processes, other_threads, inside_a_step),
        *(bounds_hold, hostile_states, too_small),
    )
}


def test_a_copy_plays_what_the_original_would_and_does_not_move_it() -> None:
    ran("same_trajectory_apart")


def test_a_copy_outlives_its_original() -> None:
    ran("original_gone")


def test_forked_and_spawned_processes_play_the_same_and_do_not_move_the_original() -> None:
    ran("other_processes")


@pytest.mark.parametrize("check", ["other_threads", "inside_a_step"])
def test_a_second_thread_is_refused_and_crashes_nothing(check: str) -> None:
    ran(check)


@pytest.mark.training
@pytest.mark.parametrize("check", ["bounds_hold", "hostile_states", "too_small"])
def test_bounds_are_checked_in_kernels_compiled_for_debugging(check: str) -> None:
    ran(check, BATCHWRIGHT_DEBUG_KERNELS="1")


def test_arrays_of_a_block_do_not_touch() -> None:
    arrays = view(Small, allocate(Small, SHAPES))

    assert {name: array.shape for name, array in arrays._asdict().items()} == SHAPES
    assert [array.dtype for array in arrays] == [dtype for dtype, _ in fields(Small)]
    for number, array in enumerate(arrays):
        assert not array.any()
        assert array.ctypes.data % LINE == 0
        array[...] = number + 1
    for number, array in enumerate(arrays):
        assert (array == np.full(array.shape, number + 1, array.dtype)).all()


def test_a_kernel_reads_and_writes_the_arrays_that_python_names() -> None:
    given = Small(
        *(np.arange(np.prod(shape)).reshape(shape).astype(dtype) for (dtype, _), shape in
          zip(fields(Small), SHAPES.values(), strict=True))
    )  # fmt: skip
    block = pack(given)

    @numba.njit  # type: ignore[untyped-decorator]
    def sums(block: NDArray[np.int64]) -> tuple[float, ...]:
        own = view(Small, block)
        own.longs[1, 0] = 70
        own.flags[6] = False
        found = own.ints[2, 4], own.cube[1, 2, 3], own.cube[0, 1].sum(), own.none.size
        return *found, own.ints.sum(), own.ints.shape[1]

    assert sums(block) == (14.0, 23.0, 22.0, 0, 105, 5)
    after = view(Small, block)
    assert after.longs.tolist() == [[0, 1], [70, 3]]
    assert after.flags.tolist() == [False, *[True] * 5, False]
    assert given.longs[1, 0] == 2


def test_an_array_that_stands_twice_in_a_block_is_stored_once() -> None:
    class Twice(NamedTuple):
        one: Annotated[NDArray[np.int64], 1]
        two: Annotated[NDArray[np.int64], 1]

    large = np.arange(1000)
    assert len(pack(Twice(large, large))) < 1100 < 2000 < len(pack(Twice(large, large.copy())))


def test_a_block_of_another_layout_is_refused_by_the_kernel() -> None:
    env = family()
    assert (env._task[0], env._memory[0]) == (stamp(Task), stamp(Memory))
    env._memory[0] += 1

    with pytest.raises(RuntimeError, match="another layout"):
        kernels.advance(env._task, env._memory, np.zeros(5, np.int64), False)


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("slots", (0, 0), 7, "number of goals from 1 to 7, and 0 to 6 are possible"),
        ("slots", (2, 2), -1, "depth from -1"),
        ("goals", (1, 0, 1), 10**6, "term from .* to 1,000,000"),
        ("counters", (0,), -5, "counter from -5"),
    ],
)
def test_a_state_that_cannot_be_is_refused(name: str, place: Any, value: int, said: str) -> None:
    env = family()
    state = env.state_dict()
    state[name][place] = value
    expected = played(copy.deepcopy(env))

    with pytest.raises(Mismatch, match=said):
        env.load_state_dict(state)
    # And nothing was changed by it.
    assert played(env) == expected


def test_a_state_of_other_shapes_or_types_is_refused() -> None:
    env = family()
    state = env.state_dict()

    with pytest.raises(Mismatch, match=r"history .* is needed"):
        env.load_state_dict({**state, "history": state["history"][:-1]})
    with pytest.raises(Mismatch, match="goals of the saved environment is float64"):
        env.load_state_dict({**state, "goals": state["goals"].astype(np.float64)})


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    print(f"{sys.argv[1]}: well")
