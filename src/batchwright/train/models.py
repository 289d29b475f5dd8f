"""Models by name, for those who fine-tune: see `batchwright.models.transformers`."""

from batchwright.models.transformers import Loaded, ModelInfo, load_model, tokenizer_for

__all__ = ["Loaded", "ModelInfo", "load_model", "tokenizer_for"]
