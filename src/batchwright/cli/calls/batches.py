"""`batchwright calls run --batch-api`: prompts in batches of OpenAI's Batch API."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchwright.cli.output import progress_bar, show, terminated_like_ctrl_c
from batchwright.errors import BatchwrightError, BudgetExceeded, ConfigError

if TYPE_CHECKING:
    from batchwright.calls import Endpoint
    from batchwright.calls.batch_api import BatchRun
    from batchwright.calls.engine.stats import Prices
    from batchwright.calls.promptfile import Line, Prompt, Spent
    from batchwright.calls.wire.discovery import ModelLimit

__all__ = ["check_flags", "check_no_batches", "discounted", "run_batches"]


def check_flags(endpoints: "list[Endpoint]", given: dict[str, bool]) -> None:
    """Refuse what means nothing for batches."""
    if len(endpoints) != 1:
        raise ConfigError("--batch-api takes one --endpoint; the batches of a run are at one place")
    for flag, value in given.items():
        if value:
            raise ConfigError(
                f"--{flag} means nothing with --batch-api, where the server sets the pace; "
                f"leave it out"
            )


def check_no_batches(output: Path, prompts: "list[Prompt]", known: "list[Line]") -> None:
    """Refuse to call for prompts that are in batches already, which would be paid for twice."""
    journal = output.with_name(f".{output.name}.batches")
    if journal.exists() and len(known) < len(prompts):
        raise ConfigError(
            f"prompts of {output} are in batches (see {journal}); collect them with --batch-api, "
            f"or cancel them with --batch-api --cancel, or choose another output"
        )


def discounted(
    prices: dict[str, tuple[float, float]] | None,
) -> dict[str, tuple[float, float]] | None:
    """Prices of the Batch API."""
    from batchwright.calls.batch_api import DISCOUNT

    if prices is None:
        return None
    return {model: (a * DISCOUNT, b * DISCOUNT) for model, (a, b) in prices.items()}


def run_batches(
    endpoint: "Endpoint",
    prompts: "list[Prompt]",
    output: Path,
    spent: "Spent | None",
    prices: "Prices | None",
    *,
    cancel: bool,
    max_cost: float | None,
    limits: "dict[str, ModelLimit]",
    cache: Path | None,
    error_budget: float | None,
    retry_failed: bool,
    force: bool,
    quiet: bool,
    format: str,
) -> None:
    """Send, wait, collect; a run that was stopped in any way resumes."""
    import asyncio

    from batchwright.calls import Cache
    from batchwright.calls.batch_api import BatchRun
    from batchwright.calls.promptfile import Answers

    with (
        terminated_like_ctrl_c(),
        _not_left_empty(output),
        Answers(output, prompts, retry_failed=retry_failed, force=force) as answers,
        progress_bar("batches", quiet, at_once=True) as progress,
    ):
        run = BatchRun(
            endpoint,
            prompts,
            answers,
            spent,
            prices,
            max_cost,
            max((limit.tokens for limit in limits.values()), default=None),
            None if cache is None else Cache(cache),
            progress,
        )
        if cancel and not run.journal.parts:
            raise ConfigError(f"there are no batches of {output} to cancel")
        try:
            asyncio.run(run.cancel() if cancel else run.run())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_stopped(run, answers.written)) from None
        finally:
            if run.cache is not None:
                run.cache.close()
    whole = answers.written == len(prompts)
    if whole:
        run.journal.remove()
        if not answers.failed and spent is not None:
            spent.remove()
    facts = _facts(run, spent)
    show(facts, _summary(facts, output), format)
    if not whole:
        why = (
            "the batches were cancelled"
            if not run.capped
            else f"--max-cost {max_cost:g} is reached"
        )
        raise BudgetExceeded(
            f"{answers.written:,} of {len(prompts):,} prompts have a response in {output}, then "
            f"{why}; run again to send the rest"
            + (" with a higher --max-cost" if run.capped else "")
        )
    if answers.failed and (error_budget is None or answers.failed > error_budget * len(prompts)):
        raise BudgetExceeded(
            f"{answers.failed:,} of {len(prompts):,} calls failed and are marked in {output}; "
            f"run again with --retry-failed, or allow some with --error-budget"
        )


@contextmanager
def _not_left_empty(output: Path) -> Iterator[None]:
    """A run that was refused leaves no empty output behind."""
    existed = output.exists()
    try:
        yield
    except BatchwrightError:
        if not existed and output.is_file() and not output.stat().st_size:
            output.unlink()
        raise


def _stopped(run: "BatchRun", written: int) -> str:
    open_ids = [part.batch for part in run.journal.parts.values() if part.batch]
    shown = ", ".join(open_ids[:3]) + (f" and {len(open_ids) - 3} more" if open_ids[3:] else "")
    where = f"; the server goes on with {shown}" if shown else ""
    return (
        f"{written:,} of {len(run.prompts):,} responses are in {run.answers.path}{where}; run the "
        f"same command again to collect, or with --cancel to cancel"
    )


def _facts(run: "BatchRun", spent: "Spent | None") -> dict[str, Any]:
    parts = run.journal.parts.values()
    return {
        "prompts": len(run.prompts),
        "written": run.answers.written,
        "earlier": run.answers.known,
        "failed": run.answers.failed,
        "hits": run.hits,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "foreign_lines": run.foreign,
        "capped": run.capped,
        "cost": None if spent is None else spent.total,
        "cost_earlier": None if spent is None else spent.earlier,
        "batches": [
            {
                "id": part.batch,
                "status": part.status,
                "requests": len(part.requests),
                "completed": part.counts[0],
                "failed": part.counts[1],
                "earlier": part.earlier,
            }
            for part in parts
        ],
    }


def _summary(facts: dict[str, Any], output: Path) -> str:
    lines = [
        f"{facts['written']:,} of {facts['prompts']:,} responses in {output} "
        f"({facts['earlier']:,} from an earlier run, {facts['failed']:,} failed, "
        f"{facts['hits']:,} cache hits)"
    ]
    lines += [
        f"{one['id'] or 'not sent'}: {one['status'] or 'collected before'}, "
        f"{one['completed']:,} of {one['requests']:,} done, {one['failed']:,} failed"
        for one in facts["batches"]
    ]
    if facts["foreign_lines"]:
        lines.append(f"{facts['foreign_lines']:,} lines of the batches belong to no request")
    lines.append(
        f"tokens {facts['prompt_tokens']:,} prompt, {facts['completion_tokens']:,} completion"
    )
    if facts["cost"] is not None:
        earlier = facts["cost_earlier"]
        more = f" ({earlier:.6g} in earlier runs)" if earlier else ""
        lines.append(f"{facts['cost']:.6g} spent{more}")
    return "\n".join(lines)
