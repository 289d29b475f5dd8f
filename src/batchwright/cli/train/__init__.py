"""`batchwright train`: the loops that use the engines."""

from cyclopts import App

__all__ = ["train"]

COMMANDS = {
    "sft": ("sft:sft", "Fine-tune a model on rows, over a batch plan, with exact resume."),
    "query-mutator": (
        "query_mutator:train_query_mutator",
        "Learn which rewriting of a question makes a target model answer it correctly.",
    ),
    "kge": ("kge:train_kge", "Train an embedding of a knowledge graph, with exact resume."),
    "prover": (
        "prover:train_prover",
        "Train a prover by PPO; the policy `rules` also by cloning and supervised passes.",
    ),
}

train = App(name="train")
for command, (place, words) in COMMANDS.items():
    train.command(f"batchwright.cli.train.{place}", name=command, help=words)
