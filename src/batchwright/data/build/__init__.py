"""The one way from rows to tokens: parallel, and resumed by a journal after kill -9."""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = ["Build", "EncodedChunk"]

if TYPE_CHECKING:
    from batchwright.data.build.build import Build, EncodedChunk
else:
    # The journal alone is needed to read a length cache.
    __getattr__ = lazy_names(__name__, "batchwright.data.build.build")
