"""Rules, embedding, both and a trained prover on one graph with one seed: the work of bench_kg.py.

Every graph and seed leaves a file, and is not run again while its settings and the code that it
came from stay the same (comments aside). The settings were found beforehand in a few tries judged
by valid, though test figures of some tries were in sight as well (of the prover alone: of one try
for each graph).
"""

import ast
import functools
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import batchwright
from batchwright.events import read_events
from batchwright.fingerprint import digest
from batchwright.logic.kge import KgeScorer, load_kge
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.mine.constants import mine_constants
from batchwright.logic.mine.mining import mine
from batchwright.logic.rank.hybrid import Hybrid, choose_beta
from batchwright.logic.rank.ranking import Scorer, average_precision, rank, summary
from batchwright.logic.rank.scorers import choose_rules
from batchwright.logic.rules import parse_rules
from batchwright.train.kge.config import KgeConfig
from batchwright.train.kge.loop import train_kge
from batchwright.train.prover.answers import AnswerPolicy, AnswerScorer, Weighed
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.loop import load_prover, train_prover

__all__ = [
    *("CODE", "DATA", "GRAPHS", "PHASES", "PHASE_GRAPHS", "RL_GRAPHS", "TARGETS", "Settings"),
    *("code", "kept_or_run", "phases", "embedding", "rl_seed"),
]

SHARED = Path(__file__).parents[2] / "shared" / "data"
DATA = Path(os.environ.get("BATCHWRIGHT_DATA", SHARED)) / "kg"
RANKED = ("rng.py", "permutation.py", "logic/*.py", "logic/mine/*.py", "logic/rank/*.py")
CODE = {
    "kge": ("rng.py", "permutation.py", "logic/*.py", "logic/rank/ranking.py", "train/kge/*.py"),
    "graph": (*RANKED, "train/kge/*.py"),
    "answers": (*RANKED, "train/prover/*.py"),
    "rules": (*RANKED, "train/prover/*.py", "logic/prove/*.py", "envs/prover/**/*.py", "rl/*.py"),
}
"""The sources that figures come from: of the embedding's training, of rules, embedding and both,
and of the prover's policies. They are those of which something is called in a run, save what reads
and writes files, and what any of them imports as a part of a kernel."""
NOT_CALLED = {
    "kge": ("logic/audit.py", "logic/rules.py"),
    "graph": ("logic/audit.py", "logic/rank/accept.py"),
    "answers": (
        *("logic/audit.py", "logic/kge.py", "logic/rank/accept.py", "logic/rank/hybrid.py"),
        *(f"train/prover/{name}.py" for name in ("episodes", "gain", "policy", "program")),
        "train/prover/search.py",
    ),
    "rules": (
        *("logic/audit.py", "logic/kge.py", "logic/rank/accept.py", "logic/rank/hybrid.py"),
        *(f"train/prover/{name}.py" for name in ("answers", "gain", "search")),
        *("logic/prove/answers.py", "envs/prover/batched.py"),
    ),
}
"""Of these sources, those of which nothing is called that could change a figure."""
REGIONS = ("africa", "americas", "asia", "europe", "oceania")


@dataclass(frozen=True)
class Settings:
    """How one graph is treated."""

    length: int = 2
    min_confidence: float = 0.01
    most: int = 300
    constants: int = 1000
    """Rules with constants for each end of a relation."""
    learn: int = 4
    """Passes over train in which the evidence of rules is learned, at most."""
    kge: dict[str, Any] = field(default_factory=dict)
    area_goal: float | None = None
    within_s: float = 300.0


SMALL = {"eval_every": 3, "eval_triples": 0, "save_every": 0}
COUNTRIES = {**SMALL, "rank": 100, "penalty": 0.03, "epochs": 30}
GRAPHS = {
    "umls": Settings(
        learn=6, kge={**SMALL, "rank": 200, "penalty": 0.01, "epochs": 30}
    ),
    "family": Settings(
        most=1000, learn=2,
        kge={**SMALL, "rank": 100, "penalty": 0.01, "epochs": 15, "eval_triples": 700},
    ),
    "kinship": Settings(
        most=600, kge={**SMALL, "rank": 250, "penalty": 0.01, "epochs": 27}
    ),
    "countries_s1": Settings(length=3, kge=COUNTRIES, area_goal=1.0),
    "countries_s2": Settings(length=3, kge=COUNTRIES, area_goal=1.0),
    "countries_s3": Settings(length=3, kge=COUNTRIES, area_goal=0.95),
    "wn18rr": Settings(
        length=3, min_confidence=0.001, most=1000, learn=20, within_s=600.0,
        kge={
            "rank": 500, "penalty": 0.1, "relation_weight": 0.1, "negatives": 2000,
            "batch_size": 500, "answers": 16, "average": 2.0, "epochs": 9,
            "matmul_precision": "medium", "eval_every": 3, "save_every": 3,
        },
    ),
    "fb15k237": Settings(
        length=3, most=500, learn=0, within_s=3600.0,
        kge={
            "rank": 256, "penalty": 0.05, "relation_weight": 4.0, "negatives": 2000,
            "batch_size": 250, "answers": 16, "lr": 0.2, "average": 1.0, "epochs": 24,
            "matmul_precision": "medium", "eval_every": 2, "save_every": 2,
        },
    ),
}  # fmt: skip

ANSWERS = ProverConfig(policy="answers", eval_triples=0, eval_every=50)
RL_GRAPHS: dict[str, tuple[ProverConfig, float]] = {
    "family": (replace(ANSWERS, most=1000, eval_triples=1400), 300.0),
    "umls": (ANSWERS, 300.0),
    "kinship": (replace(ANSWERS, most=600), 300.0),
    "wn18rr": (
        replace(
            ANSWERS, length=3, most=1000, min_confidence=0.001, ppo_steps=5_600_000, decay=0.0,
            eval_every=350, eval_triples=1000,
        ),
        1800.0,
    ),
    "fb15k237": (
        replace(
            ANSWERS, length=3, most=500, shared=True, draws=64, lr=2.0,
            ppo_steps=2_000_000, decay=0.0, eval_every=20, eval_triples=500,
        ),
        1800.0,
    ),
}  # fmt: skip
"""Settings of the policy `answers`, and the processor seconds it may take."""

EVEN = ProverConfig(eval_triples=0, passes=10)
PHASE_GRAPHS = {
    "family": replace(EVEN, most=1000, passes=4, eval_triples=1400),
    "umls": replace(EVEN, rate=1.0),
    "kinship": replace(EVEN, most=600, rate=1.0),
}
"""Settings of the policy `rules`, whose phases are left out one after the other."""

TARGETS: dict[str, dict[str, float]] = {
    "umls": {"rl": 0.90, "hybrid": 0.975},
    "family": {"rl": 0.97, "hybrid": 0.985},
    "kinship": {"rules": 0.80, "rl": 0.80, "hybrid": 0.89},
    "wn18rr": {"rules": 0.47, "rl": 0.44, "hybrid": 0.49},
    "fb15k237": {"rules": 0.28, "rl": 0.28, "hybrid": 0.37},
}
"""The MRR to reach on test."""

PHASES: dict[str, dict[str, Any]] = {
    "all phases": {},
    "imitation alone": {"ppo_steps": 0, "passes": 0},
    "PPO alone": {"clone_updates": 0, "passes": 0},
    "supervised passes alone": {"clone_updates": 0, "ppo_steps": 0},
    "imitation and PPO": {"passes": 0},
    "all but PPO": {"ppo_steps": 0},
}
"""The training of the policy `rules` with phases left out."""

PROVED = ("Clock", "measured", "rl_seed", "parts")
RUN = {
    "kge": (),
    "graph": ("Clock", "measured", "embedding", "run_seed"),
    "answers": PROVED,
    "rules": PROVED,
}
"""What makes the figures in this module."""


@functools.cache
def code(way: str) -> str:
    """A digest of the sources in `CODE[way]`, without their comments, and of what is run of this
    module. Settings are no part of it, since every file that is left names its own.
    """
    package = Path(batchwright.__file__).parent
    left_out = {package / name for name in NOT_CALLED[way]}
    files = sorted({p for part in CODE[way] for p in package.glob(part)} - left_out)
    own = [
        node
        for node in ast.parse(Path(__file__).read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in RUN[way]
    ]
    trees = [*own, *(ast.parse(file.read_text()) for file in files)]
    return digest("kg/code", way, list(REGIONS), [ast.dump(tree) for tree in trees])


def kept(path: Path, mark: str, way: str) -> dict[str, Any] | None:
    """What an earlier call left, if its settings and code were these."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_bytes())
        if (found.get("settings"), found.get("code")) == (mark, code(way)):
            return found
    return None


def leave(path: Path, mark: str, way: str, found: dict[str, Any]) -> dict[str, Any]:
    """Keep what was found for later calls."""
    found = {"settings": mark, "code": code(way), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    return found


class Clock:
    """Elapsed and processor seconds since it was made."""

    def __init__(self) -> None:
        self.begun, self.worked = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "wall_s": time.perf_counter() - self.begun,
            "cpu_s": time.process_time() - self.worked,
        }


def measured(graph: Graph, scorer: Scorer, spent: dict[str, float]) -> dict[str, Any]:
    """All columns of one scorer; `spent` is what making it took."""
    clock = Clock()
    found = summary(rank(scorer, graph.test, graph.known, sampled=100), graph.vocab.predicates)
    if graph.name.startswith("countries"):
        regions = np.array([graph.vocab.entity(name) for name in REGIONS], np.int32)
        found["area"] = average_precision(scorer, graph.test, regions)
        found["area_chances"] = average_precision(scorer, graph.test, regions, softmax=True)
        # What says on valid whether the scores or the chances are to be compared.
        for key, chances in (("valid_area", False), ("valid_area_chances", True)):
            found[key] = average_precision(scorer, graph.valid, regions, softmax=chances)
    return {**found, "spent": spent, "ranking": clock.read()}


def embedding(
    folder: Path, runs: Path, name: str, settings: Settings, seed: int
) -> tuple[KgeScorer, dict[str, float]]:
    """The embedding of one seed and the seconds of its epochs, trained or left by an earlier call.

    Tables that other code or other settings trained are neither resumed nor ranked.
    """
    mark = digest("kg/embedding", code("kge"), json.dumps(settings.kge, sort_keys=True))
    run = runs / f"{name}-{seed}-{mark[:12]}"
    config = KgeConfig(data=str(folder / name), run_dir=run, seed=seed, **settings.kge)
    if not (run / "model").is_dir():
        train_kge(config, resume=(run / "config.toml").exists())
    epochs = [event.fields for event in read_events(run / "events.jsonl") if event.kind == "epoch"]
    spent = {
        "wall_s": sum(epoch["seconds"] for epoch in epochs),
        "cpu_s": sum(epoch["cpu_s"] for epoch in epochs),
    }
    return KgeScorer(load_kge(run / "model")[0]), spent


def run_seed(folder: Path, runs: Path, name: str, settings: Settings, seed: int) -> dict[str, Any]:
    """Rules, embedding and both, on one graph with one seed."""
    whole = load_graph(folder / name)
    graph = whole.without_test()
    clock = Clock()
    mined = mine(
        graph.train,
        graph.vocab,
        length=settings.length,
        min_confidence=settings.min_confidence,
        most=settings.most,
    )
    constants = mine_constants(graph.train, graph.vocab, most=settings.constants)
    mining = clock.read()
    rules, tried = choose_rules(
        graph.facts, mined.rules.plus(constants), graph.train, graph.valid, graph.known,
        epochs=settings.learn, seed=seed,
    )  # fmt: skip
    for_rules = clock.read()

    kge, for_kge = embedding(folder, runs, name, settings, seed)
    clock = Clock()
    choice = choose_beta(kge, rules, graph.valid, graph.known, facts=graph.facts)
    choosing = clock.read()
    together = {k: for_rules[k] + for_kge[k] + choosing[k] for k in for_kge}
    hybrid = Hybrid(kge, rules, choice.table, choice.floor, choice.linked, graph.facts)
    found = {
        "rules": measured(whole, rules, for_rules),
        "kge": measured(whole, kge, for_kge),
        "hybrid": measured(whole, hybrid, together),
    }
    if choice.linked:
        plain = Hybrid(kge, rules, choice.table, choice.floor)
        found["hybrid, links not used"] = measured(whole, plain, together)
    return {
        **found,
        "mined": {
            "rules": len(mined.rules),
            "constants": len(constants),
            "bodies": mined.bodies,
            **mining,
        },
        "rules_tried_on_valid": tried,
        "beta": choice.beta,
        "beta_by_predicate": choice.own,
        "floor": choice.floor,
        "linked": choice.linked,
        "valid_mrr": choice.mrr,
    }


def kept_or_run(runs: Path, name: str, seed: int, only_kept: bool = False) -> dict[str, Any] | None:
    """Rules, embedding and both, from the file of an earlier call if there is one that holds."""
    settings = GRAPHS[name]
    path = runs / f"{name}-{seed}.json"
    form = "kg/constants" if settings.area_goal is None else "kg/constants, areas on valid"
    mark = digest(form, json.dumps(asdict(settings), sort_keys=True))
    found = kept(path, mark, "graph")
    if found is not None or only_kept:
        return found
    return leave(path, mark, "graph", run_seed(DATA, runs, name, settings, seed))


def phases(runs: Path, name: str, seed: int, only_kept: bool = False) -> dict[str, float] | None:
    """MRR on test with each phase alone and with some left out, kept by valid like the whole."""
    found = {}
    for phase, off in PHASES.items():
        settings = replace(PHASE_GRAPHS[name], **off)
        label = f"{phase.replace(' ', '-')}-"
        one = rl_seed(DATA, runs, name, seed, settings, label, only_kept)
        if one is None:
            return None
        found[phase] = float(one["rl"]["both"]["mrr"])
    return found


def rl_seed(
    folder: Path,
    runs: Path,
    name: str,
    seed: int,
    settings: ProverConfig | None = None,
    label: str = "",
    only_kept: bool = False,
) -> dict[str, Any] | None:
    """The row of one seed, of the prover alone: {"rl": ..., "rl_parts": ...}.

    Of the policy `answers` also {"untrained": ...}: the same rules and search without PPO.
    """
    settings = settings or RL_GRAPHS[name][0]
    path = runs / f"rl-{label}{name}-{seed}.json"
    mark = digest("kg_rl", json.dumps(asdict(settings), sort_keys=True, default=str))
    way = "answers" if settings.policy == "answers" else "rules"
    before = kept(path, mark, way)
    if before is not None or only_kept:
        return before
    run = runs / f"rl-{label}{name}-{seed}"
    # A run that was cut off begins anew: its time is to be that of one whole run.
    shutil.rmtree(run, ignore_errors=True)
    clock = Clock()
    config = replace(settings, data=str(folder / name), run_dir=run, seed=seed)
    train_prover(config)
    spent = clock.read()
    graph = load_graph(folder / name)
    found = {
        "rl": measured(graph, load_prover(run, graph), spent),
        "rl_parts": parts(run),
    }
    if config.policy == "answers":
        seen = graph.without_test()
        weighed = Weighed(seen, parse_rules(run / "rules.txt", seen.vocab))
        untrained = AnswerScorer(weighed, AnswerPolicy(weighed.start(config.start)))
        found["untrained"] = measured(graph, untrained, {"wall_s": 0.0, "cpu_s": 0.0})
    return leave(path, mark, way, found)


def parts(run: Path) -> dict[str, float]:
    """MRR on valid before training, and after each part of it (of supervised passes, the best)."""
    part, found = "untrained", {}
    for event in read_events(run / "events.jsonl"):
        if event.kind == "round":
            part = event.fields["part"]
        elif event.kind == "eval":
            mrr = event.fields["mrr"]
            found[part] = max(mrr, found.get(part, 0.0)) if part == "supervised" else mrr
    return found
