"""Facts, rules, proofs and embeddings of knowledge graphs."""

from batchwright.logic.facts import Facts
from batchwright.logic.loaders import Graph, load_graph
from batchwright.logic.prove.proofs import Proof, Proofs, Shortest, prove, prove_all
from batchwright.logic.rank.hybrid import Hybrid
from batchwright.logic.rank.ranking import Ranks, Scorer, rank
from batchwright.logic.rank.scorers import RuleScorer
from batchwright.logic.rules import Rules, parse_rules
from batchwright.logic.vocab import Vocab

__all__ = [
    "Facts",
    "Graph",
    "Hybrid",
    "Proof",
    "Proofs",
    "Ranks",
    "RuleScorer",
    "Rules",
    "Scorer",
    "Shortest",
    "Vocab",
    "load_graph",
    "parse_rules",
    "prove",
    "prove_all",
    "rank",
]
