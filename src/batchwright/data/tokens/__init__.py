"""Tokens of whole data sets, made once, kept by content and tokenizer, mapped from then on."""

from batchwright.data.tokens.kept import Kept, kept_stores, prune, stores_folder
from batchwright.data.tokens.making import find_store, make_store
from batchwright.data.tokens.store import TokenStore

__all__ = [
    "Kept",
    "TokenStore",
    "find_store",
    "kept_stores",
    "make_store",
    "prune",
    "stores_folder",
]
