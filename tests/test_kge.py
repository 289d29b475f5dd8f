import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from batchwright.checkpoint import latest, save_checkpoint
from batchwright.envs import CartPole
from batchwright.errors import BadFile, BadLoss, ConfigError, Mismatch
from batchwright.events import read_events
from batchwright.logic.kge import (
    MODELS,
    Kge,
    KgeScorer,
    KgeShape,
    Model,
    load_kge,
    load_scorer,
    save_kge,
    softmax_loss,
)
from batchwright.logic.loaders import load_graph
from batchwright.logic.rank.ranking import rank
from batchwright.rl import PPO, PPOConfig, policy_for
from batchwright.train.kge.config import KgeConfig
from batchwright.train.kge.loop import AVERAGED, KgeTrainer, fit_kge, train_kge
from batchwright.train.run import Run
from batchwright.train.sft.state import load_state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A line of 24 with a relation to the next one, its reverse, and one two steps on."""
    triples = [(e, "next", e + 1) for e in range(23)]
    triples += [(e + 1, "before", e) for e in range(23)]
    triples += [(e, "skip", e + 2) for e in range(22)]
    order = np.random.default_rng(0).permutation(len(triples))
    lines = [f"n{triples[i][0]}\t{triples[i][1]}\tn{triples[i][2]}\n" for i in order]
    path = tmp_path / "line"
    path.mkdir()
    (path / "train.txt").write_text("".join(lines[:56]))
    (path / "valid.txt").write_text("".join(lines[56:62]))
    (path / "test.txt").write_text("".join(lines[62:]))
    return path


def config(folder: Path, run: str = "run", **changes: object) -> KgeConfig:
    plain = KgeConfig(
        data=str(folder), run_dir=folder.parent / run, rank=8, epochs=4, batch_size=16,
        penalty=0.01, eval_every=2, save_every=0,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def by_definition(kge: Kge, head: int, step: int, tail: int) -> float:
    """The score of one triple as the papers write it."""
    e = kge.entities.double().numpy()
    r = kge.steps.double().numpy()[step]
    h, t = e[head], e[tail]
    if kge.shape.model == "distmult":
        return float((h * r * t).sum())
    if kge.shape.model == "transe":
        return float(-(np.linalg.norm(h + r - t) ** 2))
    half = kge.shape.rank
    ch, ct = h[:half] + 1j * h[half:], t[:half] + 1j * t[half:]
    if kge.shape.model == "complex":
        return float((ch * (r[:half] + 1j * r[half:]) * np.conj(ct)).real.sum())
    return float(-(np.abs(ch * np.exp(1j * r) - ct) ** 2).sum())


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_all_entities_are_those_of_the_definition(model: Model) -> None:
    kge = Kge.new(KgeShape(model, 5, 7, 2), seed=3)

    for side, step in (("tail", 1), ("head", 1 + 2)):
        found = KgeScorer(kge).scores(
            np.array([4], np.int32),
            np.array([1], np.int32),
            side,  # type: ignore[arg-type]
        )[0]
        expected = np.array([by_definition(kge, 4, step, e) for e in range(7)])
        # As log-probabilities, so up to one number for all entities.
        assert found - found[0] == pytest.approx(expected - expected[0], abs=1e-5)
        assert np.exp(found).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("model", ["complex", "distmult"])
def test_a_relation_is_guessed_by_the_score_of_the_triple(model: Model) -> None:
    kge = Kge.new(KgeShape(model, 5, 7, 2), seed=3)

    guess = kge.relation_query(kge.entities[[2]], kge.entities[[6]]) @ kge.steps.T

    assert guess[0].tolist() == pytest.approx(
        [by_definition(kge, 2, step, 6) for step in range(4)], abs=1e-5
    )


def test_the_loss_and_its_slopes_are_those_of_a_softmax_over_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(300, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    aims = torch.randn(50, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(50, generator=generator, dtype=torch.float64)
    target = torch.randint(50, (700,), generator=generator)
    row = torch.randint(300, (700,), generator=generator).sort().values
    plain = torch.nn.functional.cross_entropy(query[row] @ aims.T + bias, target)
    expected = torch.autograd.grad(plain * 3, [query, aims])

    loss = softmax_loss(query, aims, bias, row, target)
    slopes = torch.autograd.grad(loss * 3, [query, aims])

    assert float(loss.detach()) == pytest.approx(float(plain.detach()))
    for found, wanted in zip(slopes, expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-12)


def test_the_loss_in_bfloat16_differs_from_the_exact_one_by_rounding_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(300, 6, generator=generator, requires_grad=True)
    aims = torch.randn(50, 6, generator=generator, requires_grad=True)
    bias = torch.randn(50, generator=generator)
    target = torch.randint(50, (700,), generator=generator)
    row = torch.randint(300, (700,), generator=generator).sort().values
    found = {}
    before = torch.get_float32_matmul_precision()
    for name in ("highest", "medium"):
        torch.set_float32_matmul_precision(name)
        loss = softmax_loss(query, aims, bias, row, target)
        torch.set_float32_matmul_precision(before)
        assert loss.dtype == torch.float32
        found[name] = [loss.detach(), *torch.autograd.grad(loss, [query, aims])]

    for exact, rounded in zip(found["highest"], found["medium"], strict=True):
        assert rounded.dtype == exact.dtype
        assert float((rounded - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("negatives", [0, 6])
def test_answers_to_one_query_are_learned_at_once_as_they_are_one_by_one(
    folder: Path, negatives: int
) -> None:
    graph = load_graph(folder)
    train = np.concatenate([graph.train, graph.train + np.array([0, 0, 1])]).astype(np.int32) % 24
    train = np.unique(train, axis=0)
    tables = []
    for answers in (1, 2, 50):
        settings = config(folder, answers=answers, negatives=negatives, relation_weight=0.5)
        trainer = KgeTrainer.of(settings, train, 24, 24)
        asked = np.concatenate([np.arange(a, b) for a, b in pairwise(trainer.ptr.tolist())])
        assert asked.tolist() == list(range(2 * len(train)))
        assert np.diff(trainer.ptr).max() <= answers
        for number in range(3):
            trainer.step(np.arange(len(trainer.ptr) - 1), number)
        tables.append(trainer.kge.entities)
    assert torch.allclose(tables[1], tables[0], atol=1e-5)
    assert torch.allclose(tables[2], tables[0], atol=1e-5)


def test_the_penalty_is_the_sum_of_cubed_absolute_values() -> None:
    kge = Kge.new(KgeShape("complex", 2, 3, 1), seed=0)
    one = torch.tensor([[3.0, 0.0, 4.0, 2.0]])

    found = kge.penalty(one, torch.zeros(1, 4), torch.zeros(1, 4))

    assert float(found) == pytest.approx(5**3 + 2**3)


def test_drawn_entities_stand_for_all_others(folder: Path) -> None:
    graph = load_graph(folder)
    trainer = KgeTrainer.of(config(folder, negatives=6), graph.train, 24, 3)
    given, answer = torch.tensor([0, 1]), torch.tensor([1, 2])
    scores = torch.linspace(-1, 1, 24, dtype=torch.float64)

    sums = []
    for number in range(400):
        candidates, bias, at, aim = trainer._candidates(given, answer, number)
        assert candidates is not None
        assert candidates[at].tolist() == [0, 1]
        assert candidates[aim].tolist() == [1, 2]
        assert len(set(candidates.tolist())) == len(candidates) <= 3 + 6
        sums.append(float((scores[candidates] + bias).exp().sum()))

    assert np.mean(sums) == pytest.approx(float(scores.exp().sum()), rel=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_a_line(folder: Path, model: Model) -> None:
    graph = load_graph(folder)
    settings = config(folder, model=model, rank=16, epochs=60, eval_every=0)

    kge, result = fit_kge(settings, graph)

    assert result.finished
    seen = rank(KgeScorer(kge), graph.train, graph.known).metrics().mrr
    # DistMult scores p(x, y) and p(y, x) alike, which on a line is half of the truth.
    assert seen > (0.5 if model == "distmult" else 0.8)


def test_a_lower_matmul_precision_ends_with_the_step_and_learns_as_well(folder: Path) -> None:
    before = torch.get_float32_matmul_precision()
    graph = load_graph(folder)
    exact, rounded = (
        fit_kge(config(folder, epochs=40, matmul_precision=name), graph)
        for name in ("highest", "medium")
    )
    assert torch.get_float32_matmul_precision() == before
    # Steps of bfloat16 end elsewhere, but not far away, on processors that have it.
    scores = [KgeScorer(kge) for kge, _ in (exact, rounded)]
    mrrs = [rank(scorer, graph.train, graph.known).metrics().mrr for scorer in scores]
    assert mrrs[0] > 0.8
    assert mrrs[1] > mrrs[0] - 0.1


def test_what_is_kept_is_the_average_of_the_tables(folder: Path) -> None:
    graph = load_graph(folder)
    of = graph.train, graph.vocab.num_entities, graph.vocab.num_predicates
    plain = KgeTrainer.of(config(folder, average=0.0), *of)
    # So long that within these steps it is a plain mean, and so short that it is the last one.
    long, short = (KgeTrainer.of(config(folder, average=each), *of) for each in (1e6, 1e-6))
    seen = []
    for number in range(24):
        queries = plain.order(number)[:16]
        for trainer in (plain, long, short):
            trainer.step(queries, number)
        if number % AVERAGED == 0:
            seen.append(plain.kge.entities.clone())

    assert plain.kept.entities is plain.kge.entities
    assert torch.equal(long.kge.entities, plain.kge.entities)
    assert torch.allclose(long.kept.entities, torch.stack(seen).mean(0), atol=1e-6)
    assert torch.allclose(short.kept.entities, seen[-1], atol=1e-6)


def test_complex_knows_what_it_was_not_shown(folder: Path) -> None:
    graph = load_graph(folder)

    kge, _ = fit_kge(config(folder, rank=32, epochs=80, penalty=0.03, eval_every=10), graph)

    chance = rank(KgeScorer(Kge.new(kge.shape, 9)), graph.test, graph.known).metrics().mrr
    assert rank(KgeScorer(kge), graph.test, graph.known).metrics().mrr > max(0.5, 2 * chance)


def tables(run: Path) -> dict[str, bytes]:
    kge, _ = load_kge(run / "model")
    return {"entities": kge.entities.numpy().tobytes(), "steps": kge.steps.numpy().tobytes()}


@pytest.mark.parametrize("negatives", [0, 5])
@pytest.mark.parametrize("stops", [[1], [6, 3], [7, 7]])
def test_a_run_that_is_stopped_and_resumed_comes_to_the_same_bits(
    folder: Path, negatives: int, stops: list[int]
) -> None:
    # With sampled entities also averaged.
    average = 0.5 if negatives else 0.0
    whole = config(folder, "whole", negatives=negatives, average=average, eval_every=1)
    train_kge(whole)
    parts = replace(whole, run_dir=folder.parent / "parts")

    for number, stop in enumerate(stops):
        result = train_kge(replace(parts, stop_after=stop), resume=number > 0)
        assert not result.finished
    result = train_kge(parts, resume=True)

    assert result.finished
    assert result.step == 4 * 7
    assert tables(folder.parent / "whole") == tables(folder.parent / "parts")
    events = [list(read_events(run / "events.jsonl")) for run in (whole.run_dir, parts.run_dir)]
    seen = [[e.fields for e in log if e.kind == "eval"] for log in events]
    assert seen[0] == seen[1]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(folder: Path) -> None:
    train_kge(config(folder, "whole"))
    run = folder.parent / "killed"
    with Run(config(folder, "killed")) as killed:
        killed.start()

    train_kge(config(folder, "killed"), resume=True)

    assert tables(run) == tables(folder.parent / "whole")


def test_the_epoch_that_did_best_on_valid_is_kept(folder: Path) -> None:
    run = folder.parent / "run"
    result = train_kge(config(folder, epochs=12, eval_every=1, lr=0.5))

    events = [e.fields for e in read_events(run / "events.jsonl") if e.kind == "eval"]
    best = max(events, key=lambda fields: fields["mrr"])
    assert (result.best_epoch, result.best_mrr) == (best["epoch"], best["mrr"])
    graph = load_graph(folder)
    again = rank(load_scorer(run, graph), graph.valid, graph.known).metrics().mrr
    assert again == pytest.approx(best["mrr"])


def test_a_run_stops_when_valid_does_not_gain(folder: Path) -> None:
    result = train_kge(config(folder, epochs=500, eval_every=1, patience=3))

    assert result.finished
    assert result.epoch == result.best_epoch + 3 < 500


def test_seeds_differ_and_repeat(folder: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train_kge(config(folder, name, seed=seed, epochs=2))

    assert tables(folder.parent / "a") == tables(folder.parent / "b")
    assert tables(folder.parent / "a") != tables(folder.parent / "c")


def test_a_run_directory_says_what_it_was_made_with(folder: Path) -> None:
    settings = config(folder, seed=5, relation_weight=0.1)
    train_kge(settings)

    assert KgeConfig.load(settings.run_dir / "config.toml") == settings
    assert json.loads((settings.run_dir / "stamp.json").read_bytes())["seed"] == 5
    kinds = [event.kind for event in read_events(settings.run_dir / "events.jsonl")]
    assert kinds == ["start", "epoch", "epoch", "eval", "epoch", "epoch", "eval", "stop"]
    with pytest.raises(ConfigError, match="already holds a run"):
        train_kge(settings)


def test_an_embedding_of_another_graph_is_refused(folder: Path, tmp_path: Path) -> None:
    train_kge(config(folder, epochs=1))
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.txt").write_text("a\tlikes\tb\n")

    with pytest.raises(Mismatch, match="other names"):
        load_scorer(folder.parent / "run", load_graph(other))


def test_a_damaged_embedding_is_named(folder: Path) -> None:
    path = folder.parent / "model"
    kge = Kge.new(KgeShape("complex", 2, 3, 1), seed=0)
    save_kge(path, kge, note="hello")
    assert load_kge(path)[1] == {"note": "hello"}

    raw = (path / "tables.safetensors").read_bytes()
    for damaged in (b"short", raw[:-1] + bytes([raw[-1] ^ 1])):
        (path / "tables.safetensors").write_bytes(damaged)
        with pytest.raises(BadFile, match=r"tables\.safetensors does not match its checksum"):
            load_kge(path)
    (path / "tables.safetensors").unlink()
    with pytest.raises(BadFile, match=r"tables\.safetensors is missing"):
        load_kge(path)

    kge.entities[0, 0] = math.nan
    save_kge(path, kge)
    with pytest.raises(BadFile, match="not finite"):
        load_kge(path)


def test_a_loss_that_is_no_number_stops_the_run_with_a_sentence(folder: Path) -> None:
    train_kge(config(folder, stop_after=1))
    path = folder.parent / "run" / "checkpoints"
    found = latest(path)
    assert found is not None
    tables = {name: table * np.float32(1e30) for name, table in found.state["tables"].items()}
    save_checkpoint(path, found.step, {**found.state, "tables": tables})

    with pytest.raises(BadLoss, match="lower --lr"):
        train_kge(config(folder), resume=True)

    last = list(read_events(folder.parent / "run" / "events.jsonl"))[-1]
    assert (last.kind, last.fields["why"]) == ("stop", "loss is not finite")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"epochs": 0},
        {"lr": 0.0},
        {"penalty": -1.0},
        {"negatives": -2},
        {"model": "transe", "relation_weight": 0.1},
    ],
)
def test_settings_that_cannot_be_are_refused(folder: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config(folder, **wrong)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(folder: Path) -> None:
    train_kge(config(folder, "whole"))
    part = config(folder, "part", save_every=1)
    train_kge(replace(part, stop_after=20))
    damaged = part.run_dir / "checkpoints" / "step_00000020" / "arrays.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])

    train_kge(part, resume=True)

    (resumed,) = [
        e.fields for e in read_events(part.run_dir / "events.jsonl") if e.kind == "resume"
    ]
    assert resumed["step"] == 14
    assert "step_00000020" in resumed["passed_over"][0]
    assert tables(part.run_dir) == tables(folder.parent / "whole")


def test_a_run_is_not_resumed_on_triples_that_changed(folder: Path) -> None:
    train_kge(config(folder, stop_after=2))
    lines = (folder / "train.txt").read_text().splitlines()
    (folder / "train.txt").write_text("\n".join([*lines[1:], lines[0]]) + "\n")

    with pytest.raises(Mismatch, match="other triples"):
        train_kge(config(folder), resume=True)


@pytest.mark.parametrize("other", [{"lr": 0.2}, {"seed": 9}, {"model": "distmult", "rank": 8}])
def test_checkpoints_of_another_run_are_not_resumed(folder: Path, other: dict[str, object]) -> None:
    mine, foreign = config(folder, "mine"), config(folder, "foreign", **other)  # type: ignore[arg-type]
    for settings in (mine, foreign):
        train_kge(replace(settings, stop_after=2))
    shutil.rmtree(mine.run_dir / "checkpoints")
    shutil.copytree(foreign.run_dir / "checkpoints", mine.run_dir / "checkpoints")

    with pytest.raises(Mismatch, match=r"of another run: it was written with --\w+ "):
        train_kge(mine, resume=True)


STATES: list[dict[str, object]] = [
    {},
    {"facts": 3},
    {"position": {}, "model": {"w": np.zeros(3)}, "optimizer": {}},
    {"config": 7, "policy": {"w": np.zeros(3)}, "runner": {}},
    {"facts": "", "at": {"round": 1}, "learner": None, "policy": 1, "best": []},
]


@pytest.mark.parametrize("state", STATES)
def test_a_checkpoint_of_another_trainer_is_one_sentence(
    folder: Path, state: dict[str, object]
) -> None:
    settings = config(folder)
    train_kge(replace(settings, stop_after=2))
    save_checkpoint(settings.run_dir / "checkpoints", 9, state)
    with pytest.raises((BadFile, Mismatch), match=r"put back the checkpoints|other triples"):
        train_kge(settings, resume=True)

    found = latest(settings.run_dir / "checkpoints")
    assert found is not None
    model = torch.nn.Linear(3, 3)
    with pytest.raises((BadFile, Mismatch)), found.restoring():
        load_state(found, model, torch.optim.AdamW(model.parameters()))
    env = CartPole(2, seed=0)
    ppo = PPO(env, policy_for(env, seed=0), PPOConfig(num_steps=2, total_steps=4))
    with pytest.raises((BadFile, Mismatch)):
        ppo.restore(found)


def test_a_changed_line_of_the_log_is_said_when_the_run_is_resumed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(folder)
    train_kge(replace(settings, stop_after=9))
    log = settings.run_dir / "events.jsonl"
    lines = log.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'"loss":', b'"lost":')
    log.write_bytes(b"\n".join(lines))

    train_kge(settings, resume=True)

    (said,) = [r.getMessage() for r in caplog.records if "events.jsonl" in r.getMessage()]
    assert f"{log}, line 2: not as it was written" in said


def test_a_run_that_stopped_early_stays_finished_when_resumed(folder: Path) -> None:
    settings = config(folder, epochs=500, eval_every=1, patience=3)
    first = train_kge(settings)

    assert train_kge(settings, resume=True).epoch == first.epoch
