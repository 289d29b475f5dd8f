"""Proofs of queries from facts and rules."""

from batchwright.logic.prove.proofs import (
    Node,
    Proof,
    Proofs,
    Shortest,
    hidden_facts,
    prove,
    prove_all,
)

__all__ = ["Node", "Proof", "Proofs", "Shortest", "hidden_facts", "prove", "prove_all"]
