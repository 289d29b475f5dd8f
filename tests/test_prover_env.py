"""The batched prover environment equals a plain one, whatever its batch size and whoever acts."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchwright.envs import Env, ProverEnv, Step, check_env
from batchwright.envs.prover.env import END, NEXT, REWARDS
from batchwright.envs.prover.kernels.episodes import permute_row
from batchwright.envs.prover.layout import C_END, CHUNK, INDEX
from batchwright.envs.prover.settings import Ended
from batchwright.errors import BadProgram, ConfigError, Mismatch
from batchwright.logic.facts import Facts
from batchwright.logic.loaders import load_graph, shipped_graph
from batchwright.logic.prove.proofs import prove_all
from batchwright.logic.rules import Rules, parse_rules
from batchwright.logic.vocab import Vocab
from batchwright.permutation import permutation

sys.path.insert(0, str(Path(__file__).parent))

from plain_prover import Atom, Row, State, canonical, programs, successors
from test_prove import FAMILY, FAMILY_RULES

Program = tuple[Vocab, list[Atom], Rules]
OBS = ("goals", "candidates", "mask", "n_valid", "query")


class PlainEpisode:
    """One episode, written for reading: lists, tuples and the textbook's unification."""

    def __init__(self, env: ProverEnv, triples: set[Atom], b: int, label: bool) -> None:
        self.env, self.triples, self.label = env, triples, label
        self.end_action = bool(env._config[C_END])
        self.n = env.facts.num_entities
        # The open argument of a query is shown as -1; what it hides is asked of the stream.
        h, p, t = (
            env.queries[env._own.slots[b, INDEX]].tolist()
            if -1 in env._obs["query"][b]
            else (env._obs["query"][b].tolist())
        )
        self.target = (h, p, t)
        asked = env._obs["query"][b].tolist()
        self.side = 1 if asked[0] < 0 else 2 if asked[2] < 0 else 0
        inverse = int(env.inverse[p])
        self.hidden = {(h, p, t)} | ({(t, inverse, h)} if inverse >= 0 else set())
        goal = (p, self.n if self.side == 1 else h, self.n if self.side == 2 else t)
        self.state: State = canonical([goal], self.n if self.side else t, self.n)
        self.visited = [self.state]
        self.page = 0

    def options(self) -> tuple[list[tuple[Row, State]], int]:
        """What may follow, and how many successors have no room."""
        goals = self.env.spec["goals"].shape[0]
        every = list(successors(self.state, self.triples, self.env.rules, self.n, self.hidden))
        if self.side and len(self.visited) == 1:
            every = [option for option in every if option[0][0] != 0]
        fitting = [option for option in every if len(option[1][0]) <= goals]
        return (
            [option for option in fitting if option[1] not in self.visited],
            len(every) - len(fitting),
        )

    def check(self, obs: dict[str, Any], b: int, final: bool = False) -> None:
        end_action = self.end_action or final
        options, _ = self.options()
        size = self.env.num_actions - 2
        page = options[self.page * size : (self.page + 1) * size]
        assert obs["n_valid"][b] == len(options)
        goals = [list(atom) for atom in self.state[0]]
        assert obs["goals"][b, : len(goals)].tolist() == goals
        assert (obs["goals"][b, len(goals) :] == -1).all()
        rows = obs["candidates"][b]
        assert rows[2 : len(page) + 2].tolist() == [list(row) for row, _ in page]
        assert (rows[len(page) + 2 :] == -1).all()
        more = len(options) > (self.page + 1) * size
        mask = [True] * len(page) + [False] * (size - len(page))
        ends = end_action or not options
        assert obs["mask"][b].tolist() == [ends, more, *mask]
        assert rows[:2].tolist() == [
            [END if ends else -1, *[-1] * 3],
            [NEXT if more else -1, *[-1] * 3],
        ]

    def act(self, action: int, depth: int) -> tuple[str, bool, bool]:
        """How the episode stands: '' or a reason to end; whether it ended, and was truncated."""
        options, _ = self.options()
        size = self.env.num_actions - 2
        here = options[self.page * size : (self.page + 1) * size]
        if action == 1 and len(options) > (self.page + 1) * size:
            self.page += 1
            return "", False, False
        if not 2 <= action < len(here) + 2:
            offered = self.end_action or not options
            return "end" if action == 0 and offered else "invalid", True, False
        self.state = here[action - 2][1]
        self.visited.append(self.state)
        self.page = 0
        if not self.state[0]:
            return "proven", True, False
        options, cut = self.options()
        if not options:
            return "stuck", cut == 0, cut > 0
        return "", False, len(self.visited) > depth

    def reward(self, reason: str, scheme: tuple[float, ...], negatives: int) -> float:
        right = self.label
        if reason == "proven" and self.side:
            answer = self.state[1]
            h, p, t = self.target
            fact = (answer, p, t) if self.side == 1 else (h, p, answer)
            right = answer < self.n and (fact == self.target or fact in self.triples)
        if reason == "proven":
            return scheme[0] if right else scheme[2]
        if right:
            return scheme[1]
        return scheme[3] / max(negatives, 1) + scheme[4] * (reason == "end")


@settings(max_examples=80, deadline=None)
@given(programs(), st.data())
def test_the_kernels_do_what_plain_python_does(program: Program, data: st.DataObject) -> None:
    vocab, triples, rules = program
    entity, predicate = (
        st.integers(0, vocab.num_entities - 1),
        st.integers(0, vocab.num_predicates - 1),
    )
    queries = data.draw(
        st.lists(st.tuples(entity, predicate, entity), min_size=1, max_size=4), "queries"
    )
    ask = data.draw(st.sampled_from(["truth", "truth", "head", "tail", "both"]), "ask")
    negatives = data.draw(st.integers(0, 2), "negatives") if ask == "truth" else 0
    depth = data.draw(st.integers(1, 5), "depth")
    end_action = data.draw(st.booleans(), "end_action")
    inverse = data.draw(
        st.lists(
            st.integers(-1, vocab.num_predicates - 1),
            min_size=vocab.num_predicates,
            max_size=vocab.num_predicates,
        ),
        "inverse",
    )
    env = ProverEnv(
        Facts.of(triples, vocab),
        rules,
        queries,
        data.draw(st.integers(1, 3), "batch_size"),
        seed=data.draw(st.integers(0, 99), "seed"),
        depth=depth,
        goals=data.draw(st.integers(1, 5), "goals"),
        max_candidates=data.draw(st.integers(3, 8), "K"),
        negatives=negatives,
        ask=ask,
        end_action=end_action,
        reward="balanced_end",
        inverse=np.array(inverse, np.int32),
    )
    known = set(triples) | set(queries)

    def label(b: int) -> bool:
        return bool(ask != "truth" or tuple(env._obs["query"][b].tolist()) in known)

    plain = [PlainEpisode(env, set(triples), b, label(b)) for b in range(env.num_envs)]
    for number in range(12):
        for b in range(env.num_envs):
            plain[b].check(env._obs, b)
        actions = env.random_actions(number)
        if data.draw(st.integers(0, 5), "wild") == 0:
            actions = np.array(
                data.draw(
                    st.lists(st.integers(-9, 9), min_size=env.num_envs, max_size=env.num_envs),
                    "actions",
                )
            )
        step = env.step(actions)
        for b in range(env.num_envs):
            reason, over, stopped = plain[b].act(int(actions[b]), depth)
            stopped = stopped and not over
            assert (step.terminated[b], step.truncated[b]) == (over, stopped)
            expected = plain[b].reward(reason, REWARDS["balanced_end"], negatives) if over else 0.0
            assert step.reward[b] == pytest.approx(expected)
            assert step.info["proven"][b] == (reason == "proven")
            assert step.valid[b]
            if stopped:
                plain[b].check(step.final_obs, b, final=True)
            if over or stopped:
                goals = [list(atom) for atom in plain[b].state[0]]
                assert step.final_obs["goals"][b, : len(goals)].tolist() == goals
                plain[b] = PlainEpisode(env, set(triples), b, label(b))


VOCAB = Vocab.of("abcdef", ["p", "q"])
FACTS = Facts.of([(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 0), (4, 1, 4), (0, 0, 2)], VOCAB)
RULES = parse_rules("p(X,Y) :- q(X,Y).\np(X,Y) :- q(X,Z), p(Z,Y).\np(X,X).", VOCAB)
QUERIES = [(0, 0, 2), (1, 0, 3), (2, 0, 4), (5, 0, 5), (3, 0, 1)]


def small(batch_size: int = 4, **settings: Any) -> ProverEnv:
    return ProverEnv(FACTS, RULES, QUERIES, batch_size, **settings)


def copied(step: Step) -> dict[str, Any]:
    """Everything of a step, kept from being written over."""
    arrays = {f"obs/{name}": step.obs[name] for name in OBS} | dict(step.info)
    arrays |= {f"final/{name}": step.final_obs[name][step.done] for name in OBS}
    parts = ("reward", "terminated", "truncated", "valid")
    arrays |= {name: getattr(step, name) for name in parts}
    return {name: array.copy() for name, array in arrays.items()}


def episodes(env: ProverEnv, number: int) -> dict[int, list[Any]]:
    """What happens in the first episodes when actions depend on episode and step only."""
    lives: dict[int, list[Any]] = {}
    while (env.episode < number).any():
        numbers, actions = env.episode, env.random_actions()
        shown = [[env._obs[name][b].tolist() for name in OBS] for b in range(env.num_envs)]
        step = env.step(actions)
        for b in range(env.num_envs):
            end = [float(step.reward[b]), bool(step.terminated[b]), bool(step.truncated[b])]
            lives.setdefault(int(numbers[b]), []).append([shown[b], int(actions[b]), end])
    return {n: lives[n] for n in range(number)}


def test_it_is_an_env() -> None:
    assert isinstance(small(), Env)


class Wrapped:
    """An environment of somebody else, with the same observations."""

    def __init__(self, env: ProverEnv) -> None:
        self.num_envs, self.num_actions, self.spec = env.num_envs, env.num_actions, env.spec
        self.reset, self.step = env.reset, env.step
        self.state_dict, self.load_state_dict = env.state_dict, env.load_state_dict
        self.num_predicates, self.num_rules = env.num_predicates, env.num_rules
        self.num_terms = env.num_terms


def test_a_policy_is_built_from_what_an_environment_says_of_itself() -> None:
    from batchwright.rl import GoalEncoder, PPOConfig, policy_for
    from batchwright.rl.ppo import PPO

    env = small()
    ours, theirs = policy_for(env, width=8), policy_for(Wrapped(small()), width=8)
    assert isinstance(theirs.actor, GoalEncoder)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert np.array_equal(one.detach().numpy(), other.detach().numpy())
    ppo = PPO(Wrapped(env), theirs, PPOConfig(total_steps=64, num_steps=4, minibatches=1))
    assert np.isfinite(list(ppo.step().values())).all()


@pytest.mark.parametrize("settings", [{"negatives": 1}, {"ask": "both"}, {"max_candidates": 4}])
def test_it_passes_the_check_for_environments(settings: dict[str, Any]) -> None:
    def make(num_envs: int) -> ProverEnv:
        return small(num_envs, depth=4, **settings)

    check_env(make(6), make=make)


@pytest.mark.parametrize("settings", [{"negatives": 2}, {"ask": "both"}])
def test_an_episode_is_the_same_whatever_the_batch_size(settings: dict[str, Any]) -> None:
    one, seven, forty = (
        episodes(small(size, seed=5, depth=4, **settings), 30) for size in (1, 7, 40)
    )
    assert one == seven == forty
    assert one != episodes(small(7, seed=6, depth=4, **settings), 30)


def test_an_episode_is_the_same_in_batches_of_more_than_one_block() -> None:
    sizes = (9, CHUNK, 2 * CHUNK + 3)
    few, block, blocks = (
        episodes(small(size, seed=5, depth=4, negatives=2), 3 * CHUNK) for size in sizes
    )
    assert few == block == blocks


@given(n=st.integers(1, 5_000), key=st.integers(0, 2**64 - 1), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_of_places_is_a_part_of_the_permutation(
    n: int, key: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, n - 1))
    count = data.draw(st.integers(0, n - first))
    left, right = np.zeros((2, n), np.uint32)
    permute_row(first, count, n, np.uint64(key), left, right)
    whole = permutation(n, np.uint64(key))
    assert left[:count].tolist() == whole[first : first + count].tolist()


def test_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def make() -> ProverEnv:
        teacher = prove_all(QUERIES, FACTS, RULES, 4)
        settings = {"negatives": 1, "depth": 4, "max_candidates": 4, "teacher": teacher}
        return small(5, potential=lambda triples: triples[:, 2] * 0.1, **settings)

    whole = make()
    for number in range(7):
        whole.step(whole.random_actions(number))
    # Through a file, as another process would get it.
    np.savez(tmp_path / "state.npz", allow_pickle=False, **whole.state_dict())
    resumed = make()
    with np.load(tmp_path / "state.npz", allow_pickle=False) as saved:
        resumed.load_state_dict({**saved, "program": str(saved["program"])})
    for name in OBS:
        assert np.array_equal(whole._obs[name], resumed._obs[name])
    for number in range(40):
        assert np.array_equal(whole.expert_actions(), resumed.expert_actions())
        actions = whole.random_actions(number)
        a, b = copied(whole.step(actions)), copied(resumed.step(actions))
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert whole.counters == resumed.counters


def test_a_state_of_another_environment_is_refused() -> None:
    with pytest.raises(Mismatch, match="other facts, rules, queries or settings"):
        small(4).load_state_dict(small(4, depth=3).state_dict())
    with pytest.raises(Mismatch, match="same batch_size"):
        small(4).load_state_dict(small(3).state_dict())


def test_actions_outside_the_mask_end_the_episode_and_are_counted() -> None:
    env = small(4, reward="balanced")
    step = env.step(np.array([-1, -7, 64, 10**9]))

    assert step.terminated.all()
    assert step.info["invalid"].all()
    assert env.counters["invalid"] == 4
    assert step.reward.tolist() == [-1.0] * 4


def test_corruptions_are_never_known_and_change_one_side_in_turn() -> None:
    known = Facts.of([*FACTS.triples.tolist(), *QUERIES, (0, 0, 3), (0, 0, 4)], VOCAB)
    env = small(1, negatives=4, known=known)
    sides: list[int] = []
    for _ in range(300):
        h, p, t = env._obs["query"][0].tolist()
        step = env.step(np.array([0]))
        label, index = bool(step.info["label"][0]), int(step.info["query_index"][0])
        assert bool(known.contains(h, p, t)) == label
        if not label:
            changed = [a != b for a, b in zip((h, p, t), QUERIES[index], strict=True)]
            assert changed in ([True, False, False], [False, False, True])
            sides.append(changed.index(True))
    assert len(sides) == 240
    assert sides == [0, 2] * 120


def test_where_nothing_can_be_corrupted_the_query_stays_true() -> None:
    vocab = Vocab.of("ab", ["p"])
    full = Facts.of([(h, 0, t) for h in range(2) for t in range(2)], vocab)
    env = ProverEnv(full, Rules.of([], vocab), [(0, 0, 1)], 1, negatives=1)
    labels = [bool(env.step(np.array([0])).info["label"][0]) for _ in range(6)]
    assert labels == [True] * 6


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (0, (1, 0, 0, 0, 0)),
        ("proved_signed", (1, 0, -1, 0, 0)),
        (2, (1, 0, 0, 1, 1)),
        ("cautious", (1, -0.5, -1.5, 1, 1)),
        (4, (1, -1, -1, 1, 1)),
        ("balanced_end", (1, -1, -1, 1.3, 1.3)),
    ],
)
def test_rewards_go_by_number_or_name(scheme: str | int, expected: tuple[float, ...]) -> None:
    # p(f, f) is proved by the third rule at once; p(f, a) has only dead ends.
    asked = [(5, 0, 5), (5, 0, 5), (5, 0, 5), (5, 0, 5), (5, 0, 0)]
    labels = [True, True, False, False, False]
    env = ProverEnv(FACTS, RULES, asked, 5, once=True, labels=labels, reward=scheme)
    rule = env._obs["candidates"][0, :, 1].tolist().index(2)
    step = env.step(np.array([rule, 0, rule, 0, 0]))
    assert step.reward.tolist() == pytest.approx(expected)


def test_once_asks_every_query_exactly_once_in_order() -> None:
    env = small(2, once=True)
    asked: list[int] = []
    for _ in range(60):
        step = env.step(env.random_actions())
        asked += step.info["episode_index"][step.done].tolist()
        assert not step.done[~step.valid].any()
    assert sorted(asked) == list(range(len(QUERIES)))
    assert not env.active.any()
    assert env._obs["mask"].sum(axis=1).tolist() == [1, 1]
    assert (env._obs["goals"] == -1).all()
    assert env.reset() is not None
    assert env.active.all()


def test_what_is_filled_bounds_what_is_no_padding() -> None:
    for own in ({}, {"once": True}, {"end_action": False}):
        env = small(6, **own)
        for turn in range(40):
            behind = np.arange(env.num_actions) >= env.filled[:, None]
            assert (env.observation["candidates"][behind] == -1).all()
            if turn == 20:
                env.copy_slots(np.array([3, 3, 3, 0, 4, 5]))
            elif turn == 30:
                env.load_state_dict(env.state_dict())
            else:
                env.step(env.random_actions(turn))


def test_a_part_of_the_slots_can_begin_anew() -> None:
    env = small(4)
    env.step(env.random_actions(1))
    before = {name: env._obs[name].copy() for name in OBS}
    where = np.array([False, True, False, True])
    numbers = env.episode

    env.reset(where)

    for name in OBS:
        assert np.array_equal(env._obs[name][~where], before[name][~where])
    assert (env.episode[where] > numbers.max()).all()
    assert np.array_equal(env.episode[~where], numbers[~where])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.integers(0, 5))
def test_episodes_of_other_slots_go_on_as_if_no_slot_had_begun_anew(seed: int, steps: int) -> None:
    """An episode that ends then is followed by the next of the stream, which may be another."""
    env = small(8, seed=seed, negatives=1, depth=4, max_candidates=5, goals=3)
    for number in range(steps):
        env.step(env.random_actions(number))
    state, actions = env.state_dict(), env.random_actions(99)
    where = np.arange(8) % 2 == 0

    env.reset(where)
    one = copied(env.step(np.where(where, env.random_actions(99), actions)))
    env.load_state_dict(state)
    two = copied(env.step(actions))

    for name in ("reward", "terminated", "truncated", "valid", *env.step(actions).info):
        if name != "cut":
            assert np.array_equal(one[name][~where], two[name][~where]), name
    going_on = ~where & ~one["terminated"] & ~one["truncated"]
    for name in OBS:
        assert np.array_equal(one[f"obs/{name}"][going_on], two[f"obs/{name}"][going_on])


def test_shaping_adds_the_discounted_difference_of_potentials() -> None:
    def potential(triples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return triples[:, 0] + 10.0 * triples[:, 2]

    plain = small(6, depth=3, seed=2)
    shaped = small(6, depth=3, seed=2, potential=potential, gamma=0.9)

    def value(goals: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        terms = np.where(goals[:, 0, 1:] < VOCAB.num_entities, goals[:, 0, 1:], -1)
        return terms[:, 0] + 10.0 * terms[:, 1]

    for number in range(30):
        now = value(plain._obs["goals"])
        actions = plain.random_actions(number)
        a, b = plain.step(actions), shaped.step(actions)
        following = value(a.obs["goals"])
        following[a.truncated] = value(a.final_obs["goals"])[a.truncated]
        following[a.terminated] = 0.0
        assert b.reward == pytest.approx(a.reward + 0.9 * following - now, abs=1e-4)


def test_the_teacher_is_followed_to_a_proof_and_gives_up_what_has_none() -> None:
    teacher = prove_all(QUERIES, FACTS, RULES, 6)
    env = small(3, teacher=teacher, once=True, max_candidates=3, depth=6)
    lengths: dict[int, tuple[bool, int]] = {}
    while env.active.any():
        actions = env.expert_actions()
        step = env.step(np.where(env.active, actions, 0))
        for b in np.flatnonzero(step.done):
            proven, depth = bool(step.info["proven"][b]), int(step.info["depth"][b])
            lengths[int(step.info["query_index"][b])] = (proven, depth)
    expected = {q: (n > 0, n) for q, n in enumerate(teacher.lengths.tolist())}
    assert lengths == expected


def test_an_episode_off_the_teachers_path_has_no_expert_action_until_the_next() -> None:
    # Two rules that say the same: the teacher knows one of them.
    rules = parse_rules("p(X,Y) :- q(X,Z), q(Z,Y).\np(X,Y) :- q(X,Z), q(Z,Y).", VOCAB)
    asked = [(0, 0, 2)]
    teacher = prove_all(asked, FACTS, rules, 6)
    env = ProverEnv(FACTS, rules, asked, 1, teacher=teacher)
    expert = int(env.expert_actions()[0])
    assert expert in (2, 3)

    assert not env.step(np.array([5 - expert])).done[0]
    assert env.expert_actions().tolist() == [-1]
    assert env.step(np.array([0])).done[0]
    assert env.expert_actions()[0] == expert


def test_pages_show_every_successor_once() -> None:
    vocab = Vocab.of([f"e{i:03}" for i in range(100)], ["p", "q"])
    facts = Facts.of([(0, 1, i) for i in range(1, 100)], vocab)
    rules = parse_rules("p(X,Y) :- q(X,Z), q(Z,Y).", vocab)
    env = ProverEnv(facts, rules, [(0, 0, 1)], 1, max_candidates=12, depth=2)
    env.step(np.array([2]))
    seen: list[int] = []
    while True:
        rows = env._obs["candidates"][0]
        assert env._obs["n_valid"][0] == 99
        seen += rows[2:][env._obs["mask"][0, 2:], 3].tolist()
        if not env._obs["mask"][0, 1]:
            break
        step = env.step(np.array([1]))
        assert not step.done[0]
    assert seen == list(range(1, 100))


def test_rules_that_have_no_room_are_counted_not_hidden() -> None:
    env = ProverEnv(FACTS, RULES, [(1, 0, 0)], 1, goals=1)
    # The rule with two atoms in its body does not fit.
    step = env.step(np.array([2]))
    assert env.counters["cut"] >= 1
    assert step.info["cut"].tolist() == [1]


def test_the_batch_size_can_follow_the_memory() -> None:
    env = ProverEnv(FACTS, RULES, QUERIES, "auto")
    assert env.num_envs & (env.num_envs - 1) == 0
    assert 1 <= env.num_envs <= 16_384


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"max_candidates": 2}, "max_candidates must be at least 3, got 2"),
        ({"negatives": -1}, "negatives must be at least 0, got -1"),
        ({"ask": "why"}, "ask must be one of truth, head, tail, both, got 'why'"),
        ({"reward": 9}, "reward must be 0 to 5 .* got 9"),
        ({"reward": "nice"}, "0 to 5 or one of proved"),
        ({"negatives": 1, "once": True}, "leave negatives at 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        small(**settings)


def test_queries_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadProgram, match="no queries"):
        ProverEnv(FACTS, RULES, [], 1)
    with pytest.raises(BadProgram, match=r"query 1 is \[0, 2, 0\]"):
        ProverEnv(FACTS, RULES, [(0, 0, 0), (0, 2, 0)], 1)
    with pytest.raises(Mismatch, match="vocabular"):
        ProverEnv(FACTS, Rules.of([], Vocab.of("ab", ["p"])), QUERIES, 1)
    with pytest.raises(Mismatch, match="labels"):
        small(labels=[True])
    with pytest.raises(Mismatch, match="known and facts"):
        small(known=Facts.of([], Vocab.of("abcdef", ["p"])))
    with pytest.raises(Mismatch, match=r"inverse has shape \[3\]"):
        small(inverse=np.full(3, -1, np.int32))


def provable_by_env(env: ProverEnv) -> set[int]:
    """The queries that are proved when everybody follows the teacher."""
    proved: set[int] = set()
    while env.active.any():
        step = env.step(np.maximum(env.expert_actions(), 0))
        proved |= set(step.info["query_index"][step.done & step.info["proven"]].tolist())
    return proved


def family(every: int, depth: int) -> None:
    graph = load_graph(FAMILY)
    rules = parse_rules(FAMILY_RULES, graph.vocab)
    queries = graph.train[::every]
    teacher = prove_all(queries, graph.facts, rules, depth)
    env = ProverEnv(
        graph.facts, rules, queries, 256, once=True, depth=depth, goals=depth, teacher=teacher
    )

    assert provable_by_env(env) == set(np.flatnonzero(teacher.lengths > 0).tolist())
    assert env.counters["invalid"] == env.counters["truncated"] == 0

    # What random play proves is provable by the prover, at most as deep as it was played.
    env = ProverEnv(graph.facts, rules, queries, 256, depth=depth, goals=depth)
    lengths = teacher.lengths
    for number in range(300):
        step = env.step(env.random_actions(number))
        won = step.done & step.info["proven"]
        shortest = lengths[step.info["query_index"][won]]
        assert (shortest > 0).all()
        assert (shortest <= step.info["depth"][won]).all()


@pytest.mark.skipif(not FAMILY.is_dir(), reason="no family data set; set BATCHWRIGHT_DATA")
def test_a_sample_of_the_family_is_as_provable_here_as_by_the_prover() -> None:
    family(every=20, depth=5)


@pytest.mark.slow
@pytest.mark.skipif(not FAMILY.is_dir(), reason="no family data set; set BATCHWRIGHT_DATA")
def test_the_family_is_as_provable_here_as_by_the_prover() -> None:
    family(every=1, depth=7)


@pytest.mark.parametrize("ask", ["truth", "tail"])
def test_a_reward_function_sees_what_the_presets_reward(ask: str) -> None:
    """A preset written as a function gives the same rewards, episode by episode."""
    graph = load_graph("family")
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)
    settings = {"ask": ask, "depth": 3, "negatives": 1 if ask == "truth" else 0, "seed": 4}

    def cautious(ended: Ended) -> NDArray[Any]:
        worth = np.where(
            ended.label, np.where(ended.proved, 1, -0.5), np.where(ended.proved, -1.5, 1)
        )
        return np.where(ended.truncated, 0, worth)

    def make(reward: Any) -> ProverEnv:
        return ProverEnv(graph.facts, rules, graph.train, 32, reward=reward, **settings)

    preset, own = make("cautious"), make(cautious)
    total = set()
    for _ in range(40):
        actions = preset.random_actions()
        expected = preset.step(actions)
        found = own.step(actions)
        assert np.array_equal(found.reward, expected.reward)
        total |= set(found.reward.tolist())
    assert total >= {0.0, 1.0, -0.5}
    state = own.state_dict()
    with pytest.raises(Mismatch, match="other facts, rules, queries or settings"):
        preset.load_state_dict(state)
    make(cautious).load_state_dict(state)


def test_a_reward_function_gets_depths_and_must_give_numbers() -> None:
    graph = load_graph("family")
    rules = parse_rules(shipped_graph() / "rules.txt", graph.vocab)
    seen = []

    def longer(ended: Ended) -> NDArray[Any]:
        seen.append(ended)
        return -1.0 * ended.depth

    env = ProverEnv(graph.facts, rules, graph.train, 16, depth=3, reward=longer)
    for _ in range(20):
        step = env.step(env.random_actions())
        assert np.array_equal(step.reward[step.done], -1.0 * step.info["depth"][step.done])
    assert sum(len(ended.proved) for ended in seen) == env.counters["finished"] > 0
    bad = ProverEnv(graph.facts, rules, graph.train, 16, depth=3, reward=lambda ended: 1.0)
    give_up = np.zeros(16, np.int64)
    with pytest.raises(ConfigError, match="one for each episode that ended"):
        bad.step(give_up)
