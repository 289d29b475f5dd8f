"""A checkpoint is whole or passed over, holds no pickle, and the last good one stays."""

import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from batchwright.batching import CheckpointPosition
from batchwright.checkpoint import Checkpoint, latest, load_checkpoint, save_checkpoint
from batchwright.errors import BadFile, CannotWrite, ConfigError, Mismatch
from batchwright.train.sft.state import load_state, training_state

torch.set_num_threads(1)

PLAN = "f" * 64


def trained(steps: int, *, width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model after some steps, with one weight that does not train."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def at(step: int) -> CheckpointPosition:
    return CheckpointPosition(epoch=1, microbatch_idx=2 * step, global_step=step, plan=PLAN)


def save(folder: Path, step: int, *, keep: int = 10) -> None:
    save_checkpoint(folder, step, training_state(*trained(step), at(step)), keep=keep)


def newest(folder: Path) -> Checkpoint:
    found = latest(folder)
    assert found is not None
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_was_saved_comes_back_to_the_bit_and_goes_on_the_same(
    tmp_path: Path, steps: int
) -> None:
    save(tmp_path, steps)
    found = newest(tmp_path)
    model, optimizer = trained(7)  # somewhere else entirely
    # The weight that does not train is not in the file; it is the model's own.
    position = load_state(found, model, optimizer)
    expected, expected_optimizer = trained(steps)

    assert position == at(steps)
    assert found.step == steps
    assert found.passed_over == ()
    for name, weight in weights(expected).items():
        assert torch.equal(weight, weights(model)[name])
    if steps:
        for one, other in ((model, optimizer), (expected, expected_optimizer)):
            torch.manual_seed(99)
            one(torch.randn(5, 3)).square().sum().backward()
            other.step()
        for name, weight in weights(expected).items():
            assert torch.equal(weight, weights(model)[name])


def test_files_are_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = tmp_path / "step_00000003"

    assert names(folder) == ["arrays.safetensors", "manifest.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("batchwright.checkpoint", 3)
    assert manifest["files"].keys() == {"arrays.safetensors"}
    assert manifest["state"]["position"] == {
        "epoch": 1,
        "microbatch_idx": 6,
        "global_step": 3,
        "plan": PLAN,
    }
    weights = {"0.weight", "0.bias", "1.weight"}
    moments = {"step", "exp_avg", "exp_avg_sq"}
    assert load_file(folder / "arrays.safetensors").keys() == {
        *(f"model/{name}" for name in weights),
        *(f"optimizer/{name}/{moment}" for name in weights for moment in moments),
    }


def test_the_newest_are_kept_and_older_ones_go(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=2)

    assert names(tmp_path) == ["step_00000006", "step_00000008"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 2, keep=1)
    save(tmp_path, 2, keep=1)

    assert names(tmp_path) == ["step_00000002"]
    assert newest(tmp_path).step == 2


def spoil(folder: Path, how: str) -> None:
    arrays, manifest = folder / "arrays.safetensors", folder / "manifest.json"
    if how == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-7])
    elif how == "flipped":
        raw = bytearray(arrays.read_bytes())
        raw[-1] ^= 1
        arrays.write_bytes(bytes(raw))
    elif how == "no manifest":
        manifest.unlink()
    elif how == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:40])
    elif how == "no weights":
        arrays.unlink()
    elif how == "empty":
        for file in folder.iterdir():
            file.unlink()
    elif how == "other step":
        manifest.write_text(manifest.read_text().replace('"global_step": 4', '"global_step": 5'))
    elif how == "older format":
        manifest.write_text(manifest.read_text().replace('"version": 3', '"version": 1'))


DAMAGES = {
    "cut": "arrays.safetensors does not match its checksum",
    "flipped": "arrays.safetensors does not match its checksum",
    "no manifest": "it has no manifest.json",
    "torn manifest": "manifest.json cannot be read",
    "no weights": "arrays.safetensors is missing",
    "empty": "it has no manifest.json",
    "other step": "manifest.json does not match its checksum",
    "older format": "has format version 1, and this version of batchwright reads 3; use",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path: Path, how: str) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    spoil(tmp_path / "step_00000004", how)
    found = newest(tmp_path)

    assert found.step == 2
    (reason,) = found.passed_over
    assert reason.startswith("step_00000004: ")
    assert DAMAGES[how] in reason
    assert "\n" not in reason
    # And the run that goes on from the older one comes to this step again.
    save(tmp_path, 4)
    assert newest(tmp_path).step == 4


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    draw = random.Random(0)
    for file in sorted((tmp_path / "step_00000002").iterdir()):
        raw = file.read_bytes()
        for place in draw.sample(range(len(raw) - 1), 25):
            bit = 1 << draw.randrange(8)
            file.write_bytes(raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :])
            with pytest.raises(BadFile, match=r"no checkpoint in .* can be used"):
                latest(tmp_path)
        file.write_bytes(raw)

    assert newest(tmp_path).step == 2


def test_checkpoints_of_another_format_are_not_called_damaged(tmp_path: Path) -> None:
    save(tmp_path, 2)
    spoil(tmp_path / "step_00000002", "older format")
    with pytest.raises(BadFile, match=r"has format version 1, and this .* reads 3; use") as error:
        latest(tmp_path)
    assert "whole" not in str(error.value)
    assert "damaged" not in str(error.value)


def test_a_good_one_survives_behind_a_damaged_newer_one(tmp_path: Path) -> None:
    """After a resume from an older checkpoint, the damaged newer one must not push it out."""
    save(tmp_path, 2, keep=1)
    save(tmp_path, 6, keep=9)
    spoil(tmp_path / "step_00000006", "cut")
    save(tmp_path, 4, keep=1)

    assert newest(tmp_path).step == 4
    assert names(tmp_path) == ["step_00000004", "step_00000006"]


def test_leftovers_of_a_killed_save_are_not_taken_for_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / ".step_00000004.x1y2").mkdir()
    (tmp_path / "step_notes.txt").write_text("mine")

    assert newest(tmp_path).step == 2


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert latest(folder) is None


@pytest.mark.parametrize("limit", [1_000, 60_000])
def test_a_full_disk_is_one_sentence_and_the_older_one_stays(tmp_path: Path, limit: int) -> None:
    save(tmp_path, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The weights have 24 KB, the optimizer's state twice as much.
    large = training_state(*trained(1, width=1_000), at(4))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CannotWrite, match="File too large") as caught:
            save_checkpoint(tmp_path, 4, large, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step_00000002"]
    assert newest(tmp_path).step == 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    found = newest(tmp_path)
    torch.manual_seed(5)
    wider, optimizer = trained(0, width=5)
    with pytest.raises(Mismatch, match=r"another model: 0\.weight is \(4, 3\), not \(5, 3\)"):
        load_state(found, wider, optimizer)
    deeper = torch.nn.Sequential(*wider, torch.nn.Linear(2, 2))
    with pytest.raises(Mismatch, match="another model: 2 weights differ"):
        load_state(found, deeper, optimizer)


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match="not overwritten"):
        save(tmp_path, 2)
    assert names(tmp_path / "step_00000002") == ["notes.txt"]


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.lists(st.integers() | st.text())
)
states = st.recursive(
    st.dictionaries(st.text(max_size=5), leaves, max_size=3),
    lambda inside: st.dictionaries(st.text(max_size=5), inside | leaves, max_size=3),
)


@settings(max_examples=30, deadline=None)
@given(states)
def test_a_state_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    arrays = {
        "flags": np.array([True, False]),
        "nothing": np.zeros((0, 3), np.float32),
        "one": np.array(5, np.uint64),
        "turned": np.arange(6).reshape(2, 3).T,
    }
    folder = tmp_path_factory.mktemp("state")
    path = save_checkpoint(folder, 7, {"given": state, "arrays": arrays})
    back = load_checkpoint(path).state
    assert back["given"] == state
    for name, array in arrays.items():
        assert back["arrays"][name].dtype == array.dtype
        assert back["arrays"][name].shape == array.shape
        assert np.array_equal(back["arrays"][name], array)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "env/x is a object"),
        (np.array(["a"]), "env/x is an array of <U1"),
        ({1: 2}, "has the key 1"),
        ([{"y": np.zeros(2)}], "env/x is a list"),
        ({"a/b": np.zeros(2)}, "has a / in one of its names"),
        (torch.zeros(2, dtype=torch.bfloat16), "env/x cannot be saved"),
    ],
)
def test_a_state_that_is_no_plain_data_is_refused(value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        save_checkpoint(tmp_path, 1, {"env": {"x": value}})
    assert not list(tmp_path.iterdir())


def test_torch_is_not_imported_to_save_arrays(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from batchwright.checkpoint import latest, save_checkpoint\n"
        "save_checkpoint(Path(sys.argv[1]), 1, {'a': np.arange(3)})\n"
        "print(latest(Path(sys.argv[1])).state['a'].tolist(), 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[0, 1, 2] False\n"
