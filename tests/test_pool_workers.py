"""Pools inside the worker processes of torch's DataLoader."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Done, Pool, chat
from batchwright.errors import ConfigError
from raw_server import RawServer, Seen


class _Asked(torch.utils.data.Dataset[str]):
    """Texts that a server gives, asked for by a pool of the worker's own or of the parent's."""

    def __init__(self, url: str, pool: Pool | None = None) -> None:
        self.url, self.pool = url, pool

    def __len__(self) -> int:
        return 6

    def __getitem__(self, item: int) -> str:
        self.pool = self.pool or Pool(self.url, remember=False)
        (outcome,) = self.pool.map([chat("m", f"q{item}", temperature=0)])
        assert isinstance(outcome, Done)
        return outcome.text


def test_a_pool_works_inside_the_forked_workers_of_a_dataloader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path))
    more: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 300}
    wanted = [f"re: q{item}" for item in range(6)]
    with RawServer(Seen.answer) as server, Pool(server.url, remember=False) as pool:
        assert pool.map([chat("m", "before")])[0]
        for given in (None, pool):
            asked = _Asked(server.url, given)
            assert list(torch.utils.data.DataLoader(asked, batch_size=None, **more)) == wanted
        assert pool.map([chat("m", "after")])[0]


def test_a_pool_that_would_be_sent_to_a_spawned_worker_says_to_make_one_there() -> None:
    with Pool("http://127.0.0.1:9", remember=False) as pool:
        asked = _Asked("", pool)
        loader = torch.utils.data.DataLoader(
            asked, num_workers=1, multiprocessing_context="spawn", timeout=300
        )
        with pytest.raises(ConfigError, match="make one there, when it is first used"):
            list(loader)
