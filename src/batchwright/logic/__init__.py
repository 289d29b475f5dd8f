"""Facts, rules and proofs over knowledge graphs, and the embeddings beside them."""

__all__: list[str] = []
