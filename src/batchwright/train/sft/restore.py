"""The plan and the tokens of a run that is resumed; made again where they are damaged or gone."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from batchwright.batching import BatchPlan
from batchwright.checkpoint import Checkpoint
from batchwright.data.tokenizers import Tokenizer
from batchwright.errors import BadFile, BatchwrightError, Mismatch, MissingFile
from batchwright.sealed import read_sealed_json
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.prepare import Prepared, open_prepared, prepare

__all__ = ["Parts", "open_parts", "restore", "telling_what_to_remove"]

log = logging.getLogger(__name__)

Parts = tuple[Prepared | None, Prepared | None]
FILES = {"": ("plan", "tokens"), "eval_": ("eval_plan", "eval_tokens")}


def open_parts(config: SftConfig) -> Parts:
    """What a run trains on, None online, and what it is evaluated on, if there is anything."""
    train = None if config.online else _opened(config, "")
    held_out = _opened(config, "eval_") if _evaluates(config) else None
    return train, held_out


@contextmanager
def telling_what_to_remove(run: Path) -> Iterator[None]:
    """Say of files of the run that are found to be damaged what makes them again.

    Tokens are checked as they are read, so a run may be well under way by then.
    """
    try:
        yield
    except BadFile as error:
        told, _, _ = str(error).partition(";")
        for name in (name for names in FILES.values() for name in names):
            if f" {run / name} " in told and (run / "config.toml").exists():
                raise BadFile(
                    f"{told}; remove {run / name} and resume with --resume {run}, which makes it "
                    f"again from the data"
                ) from error
        raise


def restore(
    config: SftConfig,
    tokenizer: Tokenizer,
    found: Checkpoint | None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Make what of a run is damaged or gone again from its data, if these are unchanged.

    Its plan must be the one of the checkpoint, so that the run goes on with the same steps.
    """
    broken = {part: why for part in FILES if (why := _damage(config, part))}
    if not broken:
        return
    why = "; ".join(broken.values())
    log.warning("%s; it is made again from the data", why)
    wanted = None if found is None or config.online else str(found.state["position"]["plan"])
    with tempfile.TemporaryDirectory(prefix=".again-", dir=config.run_dir) as folder:
        made = Path(folder)
        try:
            _make(config, made, tokenizer, wanted, progress)
            _same_evaluation(config, made)
        except BatchwrightError as error:
            raise BadFile(f"{why}, and cannot be made again: {error}") from None
        for part in broken:
            for name in FILES[part]:
                if (made / name).exists():
                    shutil.rmtree(config.run_dir / name, ignore_errors=True)
                    (made / name).rename(config.run_dir / name)


def _make(
    config: SftConfig,
    folder: Path,
    tokenizer: Tokenizer,
    wanted: str | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Prepare the run once more, in `folder`, as it was on the ranks that began it."""
    stamp = read_sealed_json(config.run_dir / "stamp.json", "stamp of a run", "restore it")
    if config.batchplan is not None and not config.batchplan.exists():
        # Its copy in the run, if that is what is left.
        config = replace(config, batchplan=config.run_dir / "plan")
    # A plan that lists its epochs is another with more of them; --epochs may be raised since.
    for epochs in range(config.epochs, -1, -1):
        again = replace(config, run_dir=folder, epochs=epochs)
        prepare(again, tokenizer, int(stamp["world"]), progress, check=True)
        if config.online or wanted is None:
            return
        seen = BatchPlan.load(folder / "plan").whole_fingerprint
        if seen == wanted:
            return
    raise Mismatch(
        f"the run was trained on plan {wanted[:16] if wanted else wanted}, the data give "
        f"{seen[:16]} now; put the data back as they were, or start a new run in another --run-dir"
    )


def _same_evaluation(config: SftConfig, folder: Path) -> None:
    """Refuse other held-out data, where the old plan for them is there to tell."""
    if not _evaluates(config):
        return
    try:
        old = BatchPlan.load(config.run_dir / "eval_plan").whole_fingerprint
    except (BadFile, MissingFile):
        return
    if BatchPlan.load(folder / "eval_plan").whole_fingerprint != old:
        raise Mismatch(
            "the held-out data have changed since the run began; put them back as they were, or "
            "start a new run in another --run-dir"
        )


def _damage(config: SftConfig, part: str) -> str | None:
    """Why a part of a run cannot be used, without the way out that its files name."""
    if config.online if part == "" else not _evaluates(config):
        return None
    try:
        opened = _opened(config, part, whole=True)
    except (BadFile, MissingFile, Mismatch) as error:
        return str(error).partition(";")[0]
    return None if opened else f"{config.run_dir} has no {part}plan"


def _opened(config: SftConfig, part: str, *, whole: bool = False) -> Prepared:
    opened = open_prepared(config.run_dir, part, whole=whole)
    if opened is None:
        raise MissingFile(f"no {part}plan in {config.run_dir}; restore it, or start a new run")
    # Proves the arrays of a saved plan, which are mapped.
    _ = opened.plan.whole_fingerprint
    return opened


def _evaluates(config: SftConfig) -> bool:
    return bool(config.eval_data or config.eval_fraction)
