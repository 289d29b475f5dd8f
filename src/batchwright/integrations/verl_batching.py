"""Dynamic batching for verl: our packing and balance behind verl's own functions.

Importing this module switches it on, if verl is installed. verl imports it in every process, the
Ray workers included, by VERL_USE_EXTERNAL_MODULES=batchwright.integrations.verl_batching; every
rank must have it, because the ranks agree on a number of micro-batches in one step. Nothing else
changes: the settings are verl's (`use_dynamic_bsz`, `ppo_max_token_len_per_gpu`, `balance_batch`).
"""

import importlib
import inspect
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.batching.packing.balanced import balance_bins, fewest_bins
from batchwright.batching.plan.shards import balance
from batchwright.errors import ConfigError, Mismatch, MissingExtra, OversizedSample

__all__ = [
    "get_seqlen_balanced_partitions",
    "rearrange_micro_batches",
    "use_batchwright_batching",
    "use_verl_batching",
]

_INSTALLED = find_spec("verl") is not None
_replaced: dict[str, Any] = {}
"""verl's own functions by name, while ours stand in their place."""


def use_batchwright_batching() -> None:
    """Put our functions in the place of verl's, in every module of verl that has them.

    Modules that verl imports later get ours as well. A second call changes nothing.

    Raises:
        Mismatch: this verl has functions of another signature.
        MissingExtra: verl is not installed.
    """
    if not _INSTALLED:
        raise MissingExtra("verl is missing; run: pip install verl==0.9.1")
    module = importlib.import_module("verl.utils.seqlen_balancing")
    for ours in (get_seqlen_balanced_partitions, rearrange_micro_batches):
        name = ours.__name__
        theirs = getattr(module, name)
        if theirs is ours:
            continue
        if (seen := _parameters(theirs)) != (known := _parameters(ours)):
            raise Mismatch(
                f"verl's {name} takes {', '.join(seen)}, and {', '.join(known)} is what can be "
                f"replaced; use verl 0.9.1, or leave batchwright.integrations.verl_batching out"
            )
        _replaced[name] = theirs
        _put(name, theirs, ours)


def use_verl_batching() -> None:
    """Put verl's own functions back; without them replaced it changes nothing."""
    for name, theirs in _replaced.items():
        _put(name, globals()[name], theirs)
    _replaced.clear()


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _put(name: str, old: Any, new: Any) -> None:
    # `from verl.utils.seqlen_balancing import ...` made names of their own.
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] == "verl" and vars(module).get(name) is old:
            setattr(module, name, new)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """The indices of each partition, sorted: every index once, about equal sums, none empty.

    With `equal_size` all partitions have as many items. A tensor of costs is taken as well.

    Raises:
        AssertionError: fewer items than partitions, or not a multiple of them with `equal_size`.

    >>> get_seqlen_balanced_partitions([9, 1, 1, 9], 2, equal_size=True)
    [[0, 1], [2, 3]]
    """
    costs = _costs(seqlen_list)
    # These two are asserted by verl, and its callers may rely on it.
    if len(costs) < k_partitions:
        raise AssertionError(f"number of items:[{len(costs)}] < k_partitions:[{k_partitions}]")
    if equal_size and len(costs) % k_partitions:
        raise AssertionError(f"{len(costs)} % {k_partitions} != 0")
    part_of = balance(costs, k_partitions) if equal_size else balance_bins(costs, k_partitions)
    return _members(part_of, k_partitions)


def _costs(values: Any) -> NDArray[np.int64]:
    """Whole numbers as they are; others, which verl's float tensors hold, as parts of their sum."""
    array = np.asarray(values.tolist() if hasattr(values, "tolist") else values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not (array >= 0).all():
        raise ConfigError(
            f"seqlen_list must be a flat list of numbers of at least 0, got {values!r:.200}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"seqlen_list must be finite, got {values!r:.200}")
    if array.dtype.kind == "f" and (array != np.rint(array)).any():
        array = np.rint(array * (2**52 / array.sum()))
    return array.astype(np.int64)


def _members(bin_of: NDArray[np.int32], bins: int) -> list[list[int]]:
    """The items of each bin, in increasing order."""
    order = np.argsort(bin_of, kind="stable")
    ends = np.cumsum(np.bincount(bin_of, minlength=bins))
    return [part.tolist() for part in np.split(order, ends[:-1])]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """A batch as micro-batches of at most `max_token_len` tokens, and the rows of each.

    As few as were found to fit; more only where `min_num_micro_batch`, `num_batches_divided_by`
    or another rank of `dp_group` asks for them. `force_group_size` consecutive rows stay together.

    Raises:
        AssertionError: `max_token_len` is below the width of the batch.
        OversizedSample: the rows of one group have more than `max_token_len` tokens.
        ConfigError: a rank has fewer groups than there must be micro-batches.
    """
    import torch
    from verl.utils.seqlen_balancing import calculate_workload
    from verl.utils.tensordict_utils import index_select_tensor_dict

    tokens = _group_tokens(batch, max_token_len, force_group_size)
    costs = _costs(calculate_workload(torch.from_numpy(tokens)).sum(dim=1))
    lengths = tokens.sum(1)
    longest, groups = int(lengths.max()), len(lengths)
    count = fewest_bins(lengths, max_token_len) if longest <= max_token_len else 1
    count = max(count, min_num_micro_batch or 1)
    if same_micro_num_in_dp and dp_group is not None:
        # Every rank learns what any of them cannot do, so that all raise and none waits.
        count, longest, fewest = _largest((count, longest, -groups), dp_group)
        groups = -fewest
    step = num_batches_divided_by or 1
    count = -(-count // step) * step
    if longest > max_token_len:
        raise OversizedSample(
            f"a group of {force_group_size} rows has {longest:,} tokens, and max_token_len is "
            f"{max_token_len:,}; raise max_token_len (in verl, ppo_max_token_len_per_gpu and kin)"
        )
    if count > groups:
        raise ConfigError(
            f"{count} micro-batches are needed on every rank, and a rank has {groups} groups of "
            f"{force_group_size} rows; use fewer ranks, larger batches or a higher max_token_len"
        )
    parts = _members(balance_bins(costs, count, lengths, max_token_len), count)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda part: (int(costs[part].sum()), part[0]), reverse=True)
        # The cheapest at both ends, where a pipeline fills and drains, as verl places them.
        parts = parts[::2][::-1] + parts[1::2]
    within = np.arange(force_group_size)
    rows = [
        (np.array(part)[:, None] * force_group_size + within).ravel().tolist() for part in parts
    ]
    return [index_select_tensor_dict(batch, part) for part in rows], rows


def _group_tokens(batch: Any, max_token_len: int, group: int) -> NDArray[np.int64]:
    """Tokens of every row, [groups, group]."""
    ids = batch["input_ids"]
    if ids.is_nested:
        tokens = ids.offsets().diff()
        widest = int(tokens.max())
    else:
        mask = batch["attention_mask"]
        tokens, widest = mask.sum(dim=1), mask.shape[-1]
    if max_token_len < widest:
        raise AssertionError(
            f"max_token_len must be greater than the sequence length. Got {max_token_len=} and "
            f"max_seq_len={widest}"
        )
    if len(tokens) % group:
        raise AssertionError(
            f"Batch size {len(tokens)} must be divisible by force_group_size {group}"
        )
    array: NDArray[np.int64] = tokens.cpu().numpy().astype(np.int64)
    return array.reshape(-1, group)


def _largest(values: tuple[int, ...], group: Any) -> list[int]:
    """The largest of each over the ranks of a group."""
    import torch
    from torch import distributed as dist
    from verl.utils.device import get_device_name

    if not dist.is_initialized():
        return list(values)
    device = "cpu" if dist.get_backend(group) == "gloo" else get_device_name()
    shared = torch.tensor(values, dtype=torch.long, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in shared.tolist()]


if _INSTALLED:
    use_batchwright_batching()
