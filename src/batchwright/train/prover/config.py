"""The settings of a prover's training. Light to import: the command's help is made from it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

from batchwright.errors import ConfigError
from batchwright.train.run import RunConfig

__all__ = ["REWARD_NAMES", "ProverConfig", "Recipe", "phases_said"]

Auto = Literal["auto"]


class Recipe(NamedTuple):
    """Settings whose defaults depend on the policy."""

    clone_updates: int
    ppo_steps: int
    curriculum: bool
    lr: float
    ppo_epochs: int
    entropy_coef: float
    passes: int
    beam: int
    constants: int


RECIPES = {
    "rules": Recipe(40, 100_000, True, 0.05, 4, 0.01, 8, 0, 0),
    "neural": Recipe(0, 500_000, False, 0.02, 2, 0.05, 0, 256, 0),
    "answers": Recipe(0, 1_400_000, False, 0.1, 2, 0.0, 0, 0, 1000),
}


REWARD_NAMES = ("proved", "proved_signed", "correct", "cautious", "balanced", "balanced_end")
"""The keys of `batchwright.envs.prover.REWARDS`, which would be slow to import here."""

PHASES = {"imitation": "imitation", "ppo": "PPO", "supervised": "supervised passes"}


def phases_said(parts: Iterable[str]) -> str:
    """What trained a policy, in words.

    >>> phases_said(["imitation", "ppo", "supervised"]), phases_said([])
    ('imitation, PPO and supervised passes', 'nothing (untrained)')
    """
    named = [PHASES[part] for part in parts]
    return " and ".join(filter(None, [", ".join(named[:-1]), *named[-1:]])) or "nothing (untrained)"


@dataclass(frozen=True, kw_only=True)
class ProverConfig(RunConfig):
    """What to prove by which rules, and how the prover learns."""

    REQUIRED: ClassVar = ("data",)
    CHANGEABLE: ClassVar = ("save_every", "save_minutes", "stop_after")

    data: str = ""
    """The folder with train.txt, valid.txt and test.txt."""
    rules: Path | None = None
    """A file of rules; those that are chains of 1 to 3 edges are used."""
    mine: bool = False
    """Mine the rules from train.txt; the default if no --rules are given."""
    length: int = 2
    """Longest body of a mined rule in edges, 1 to 3."""
    most: int = 300
    """Mined rules to keep for each relation, the best."""
    min_confidence: float = 0.01
    """Lowest confidence of a mined rule."""
    constants: int | Auto = "auto"
    """Rules with constants to mine for each end of a relation, for the policy answers; auto: 1,000
    for it, 0 for the others."""

    policy: Literal["rules", "neural", "answers"] = "rules"
    """rules: a logit for each rule, facts uniformly; neural: an actor-critic that embeds
    predicates, constants, variables and rules; answers: follows all rules and chooses among the
    answers that they prove by learned weights, trained by PPO alone."""
    width: int = 32
    """Embedding width of the neural policy."""
    constant_scale: float = 0.0
    """What the neural actor multiplies vectors of constants by. Above 0 it learns train answers by
    heart, which a filtered ranking leaves out; at 0 it sees only where constants are equal."""

    n_envs: int | Auto = 256
    """Parallel environments: the batch size of the rollout; auto: as the free memory allows, and
    at most so many that --ppo-steps holds 64 rollouts."""
    n_eval_envs: int | Auto = 256
    """Parallel environments in evaluations on valid; auto: as the free memory allows."""
    num_steps: int = 8
    """Rollout length: steps of each environment between two updates."""

    clone_updates: int | Auto = "auto"
    """Behaviour cloning (supervised): rollouts in which shortest proofs are imitated; auto: 40 for
    rules, 0 for neural."""
    clone_questions: int = 2000
    """Train queries that the exhaustive prover proves for behaviour cloning; 0: all."""
    clone_lr: float = 0.03
    """Learning rate of behaviour cloning (Adam)."""

    ppo_steps: int | Auto = "auto"
    """PPO steps of all environments together, for answers the answers given, in whole rollouts; 0:
    no PPO; auto: 100,000 for rules, 500,000 for neural, 1,400,000 for answers."""
    curriculum: bool | Auto = "auto"
    """Curriculum over proof depth: start with short proofs, one step more in each part of PPO;
    auto: for rules only."""
    negatives: int = 0
    """0: query p(h, ?) and penalise wrong answers; else classify triples as true or false, with
    this many corrupted ones after each."""
    reward: str = "proved_signed"
    """Reward at the end of an episode: proved, proved_signed, correct, cautious, balanced or
    balanced_end, or your own function as FILE.py:function; see the guide."""
    end_action: bool = True
    """Allow the policy to give up a query."""
    kge: Path | None = None
    """A run of `train kge`: it answers p_kge(X,Y) in --rules, and with --negatives it is the
    potential for reward shaping in PPO."""
    accept: float | None = None
    """Minimum probability of p_kge(X,Y) in --rules; default: chosen on valid.txt."""
    lr: float | Auto = "auto"
    """PPO learning rate, annealed to zero in each part; auto: 0.05 for rules, 0.02 for neural, 0.1
    for answers (Adagrad)."""
    ppo_epochs: int | Auto = "auto"
    """PPO epochs: passes over each rollout; auto: 4 for rules, 2 for neural and answers."""
    minibatches: int = 4
    """Minibatches in a pass."""
    gamma: float = 0.99
    """Discount factor."""
    clip: float = 0.2
    """PPO clip range."""
    entropy_coef: float | Auto = "auto"
    """Entropy bonus coefficient; auto: 0.01 for rules, 0.05 for neural, 0 for answers."""
    start: Literal["alike", "confidence"] = "alike"
    """Weights of rules that the policy answers starts with: all alike, or by their confidence."""
    shared: bool = False
    """Rules of one form (edges, constants) and about one confidence share what the policy answers
    learns: a factor of their weights. Few numbers, for graphs with very many rules."""
    linked: bool | Auto = "auto"
    """Ask the policy answers train queries whose two ends another fact joins, too; auto: unless
    valid has none such and train has others."""
    draws: int = 16
    """Answers that the policy answers gives to each query of a rollout."""
    decay: float = 3e-4
    """How much each query of a minibatch draws the weights of the policy answers to its start."""

    passes: int | Auto = "auto"
    """Supervised passes of the rules policy over train queries, each with its own fact hidden: they
    maximise the likelihood of the known answers, summed over all proofs; auto: 8 for rules."""
    pass_questions: int = 60_000
    """Queries in a pass, others in each; 0: all."""
    rate: float = 0.5
    """Adagrad learning rate of supervised passes."""

    beam: int | Auto = "auto"
    """Partial proofs of a query that beam search keeps in evaluations on valid; 0: the exact sum
    over all proofs, which neural does not have; auto: 0 for rules and answers, 256 for
    neural."""
    eval_every: int = 10
    """Rounds (updates or passes) between evaluations on valid, besides the end of every part."""
    eval_triples: int = 700
    """Valid triples in an evaluation, evenly spread over the file; 0: all."""
    seed: int = 0
    """Random seed of the order of queries and of the policy's actions."""
    run_dir: Path = Path("runs/prover-{n}")
    """The folder to write the run to; {n} stands for the next free number."""
    save_every: int = 10
    """Rounds between checkpoints, besides those by time."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, or 50 times what one takes if that is more; 0: none by time."""
    stop_after: int = 0
    """Save and stop after this many rounds of this call, to be resumed; 0: run to the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, *self._given("n_envs", "n_eval_envs", "ppo_epochs"))
        self.at_least(1, "most", "width", "num_steps", "minibatches")
        self.at_least(1, "eval_every", "save_every")
        self.at_least(
            0,
            *self._given("clone_updates", "ppo_steps", "passes", "entropy_coef", "beam"),
            *self._given("constants"),
        )
        self.at_least(2, "draws")
        self.at_least(0, "clone_questions", "negatives", "constant_scale", "decay")
        self.at_least(0, "pass_questions", "eval_triples", "stop_after", "save_minutes")
        self.above_zero(*self._given("lr"), "clone_lr", "rate", "clip")
        self.from_0_to_1("gamma", "min_confidence")
        if self.rules is not None and self.mine:
            raise ConfigError("--rules and --mine exclude each other; give one of them")
        if self.kge is not None and not self.negatives and self.rules is None:
            raise ConfigError(
                "--kge answers p_kge in rules, or shapes the rewards of true and false triples; "
                "give --rules or --negatives"
            )
        if self.accept is not None and (self.kge is None or self.rules is None):
            raise ConfigError("--accept is for rules that use p_kge; give --rules and --kge")
        if self.reward not in REWARD_NAMES and ".py:" not in self.reward:
            raise ConfigError(
                f"--reward must be one of {', '.join(REWARD_NAMES)}, or FILE.py:function, got "
                f"{self.reward!r}"
            )
        if self.policy == "neural" and (self.recipe.passes or not self.recipe.beam):
            raise ConfigError(
                f"the exact sum over all proofs is for --policy rules: with neural, --passes must "
                f"be 0 and --beam at least 1, got {self.recipe.passes} and {self.recipe.beam}"
            )

        embedded = {"width": 32, "constant_scale": 0.0}
        given = [name for name, value in embedded.items() if getattr(self, name) != value]
        if self.policy != "neural" and given:
            raise ConfigError(
                f"{' and '.join(self.flag(name) for name in given)} {'are' if given[1:] else 'is'} "
                f"for --policy neural; leave {'them' if given[1:] else 'it'} out with {self.policy}"
            )
        if self.policy == "answers":
            self._only_answers()
        elif self.start != "alike" or self.shared or self.linked != "auto":
            raise ConfigError(
                f"--start, --shared and --linked are for --policy answers; leave them out with "
                f"{self.policy}"
            )
        elif self.recipe.constants:
            raise ConfigError(
                f"rules with constants are followed by --policy answers only; leave --constants "
                f"out with {self.policy}"
            )

    def _only_answers(self) -> None:
        """Refuse what the policy `answers` does not have."""
        own, recipe = RECIPES["answers"], self.recipe
        given = [
            name
            for name in ("clone_updates", "passes", "curriculum", "beam")
            if getattr(recipe, name) != getattr(own, name)
        ]
        default = {"negatives": 0, "reward": "proved_signed", "end_action": True}
        given += [name for name, value in default.items() if getattr(self, name) != value]
        if given:
            raise ConfigError(
                f"--policy answers is trained by PPO alone, on answers that are right or wrong; "
                f"leave out {', '.join(self.flag(name) for name in given)}"
            )

    @property
    def num_envs(self) -> int:
        """`n_envs` of a run that began: what was `auto` is a number there."""
        assert self.n_envs != "auto"
        return self.n_envs

    @property
    def steps_each(self) -> int:
        """PPO steps of one environment between two updates; of answers, the answers to a query."""
        return self.draws if self.policy == "answers" else self.num_steps

    @property
    def rollout(self) -> int:
        """PPO steps between two updates."""
        return self.steps_each * self.num_envs

    @property
    def recipe(self) -> Recipe:
        """The settings that are `auto`, or else as given."""
        own = RECIPES[self.policy]
        return own._replace(**{name: getattr(self, name) for name in self._given(*own._fields)})

    def _given(self, *names: str) -> tuple[str, ...]:
        """Those of the fields that are not `auto`."""
        return tuple(name for name in names if getattr(self, name) != "auto")

    @property
    def ask(self) -> Literal["tail", "truth"]:
        """The query of PPO's episodes: p(h, ?), or whether a triple is true."""
        return "truth" if self.negatives else "tail"

    def named(self) -> Self:
        super().named()
        recipe = self.recipe
        if not (recipe.clone_updates or recipe.ppo_steps or recipe.passes):
            raise ConfigError(
                "nothing to do: --clone-updates, --ppo-steps and --passes are all 0; raise one"
            )
        return self
