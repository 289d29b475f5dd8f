"""A few mutations of every format; `make fuzz` does thousands."""

from pathlib import Path

import pytest
from formats import FORMATS

from fuzz import GOOD, make, part

# Torch is loaded for the embedding alone: `make fuzz` has it.
NAMES = [name for name in FORMATS if "embedding" not in name]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_is_refused_or_read_as_it_was_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("BATCHWRIGHT_HOME", "BATCHWRIGHT_TOKENS"):
        monkeypatch.setenv(variable, str(tmp_path))
    whole = make(name, tmp_path / "example")

    found = part(name, range(3), tmp_path / "example", tmp_path / "place", whole)

    assert len(found) == 3
    assert [row for row in found if row[1] not in GOOD] == []
