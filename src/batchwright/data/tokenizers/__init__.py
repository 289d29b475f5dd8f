"""Tokenizers by name: the built-in bytes, a file, a folder or a hub id."""

from batchwright.data.tokenizers.files import FileTokenizer
from batchwright.data.tokenizers.load import load_tokenizer
from batchwright.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]
