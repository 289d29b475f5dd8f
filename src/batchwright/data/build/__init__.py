"""The one way from rows to tokens: parallel, and resumed by a journal after kill -9."""

from batchwright.data.build.build import Build, EncodedChunk

__all__ = ["Build", "EncodedChunk"]
