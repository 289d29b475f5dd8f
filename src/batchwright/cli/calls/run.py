"""`batchwright calls run`: a file of prompts in, a file of responses out."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from batchwright.cli.calls.batches import check_flags, check_no_batches, discounted, run_batches
from batchwright.cli.calls.flags import EndpointFlag, KeyEnv, ModelFlag, endpoint_at
from batchwright.cli.flags import Address, On, at_least, joined
from batchwright.cli.output import (
    Force,
    Format,
    Quiet,
    progress_bar,
    show,
    terminated_like_ctrl_c,
)
from batchwright.cli.rundir import RunDir, recorded
from batchwright.errors import BudgetExceeded, ConfigError, Mismatch

if TYPE_CHECKING:
    from batchwright.calls import Done, Endpoint, Outcome, Pool
    from batchwright.calls.promptfile import Answers, Line, Prompt, Spent
    from batchwright.calls.wire.discovery import ModelLimit

__all__ = ["run"]

PATIENCE_S = 5.0
"""A Ctrl-C this long after the first one stops what the first one left to be done."""


def run(
    *,
    input: Annotated[
        Path, Parameter(name=["--input", "-i"], help="JSONL: prompt or messages, id, parameters.")
    ],
    output: Annotated[
        Path,
        Parameter(name=["--output", "-o"], help="JSONL in the same order; run again to resume."),
    ],
    endpoint: EndpointFlag,
    model: ModelFlag,
    batch_size: Annotated[
        str, Parameter(help="Calls in flight for each endpoint: a number, or auto.")
    ] = "auto",
    cache: Annotated[
        Path | None, Parameter(help="Cache responses here for other runs (else only for this one).")
    ] = None,
    rpm: Annotated[
        float | None, Parameter(help="Rate limit in requests per minute, for each endpoint.")
    ] = None,
    tpm: Annotated[
        float | None, Parameter(help="Rate limit in tokens per minute, for each endpoint.")
    ] = None,
    max_cost: Annotated[
        float | None, Parameter(help="Spending cap over all runs of the output.")
    ] = None,
    price_in: Annotated[float | None, Parameter(help="Price of a million prompt tokens.")] = None,
    price_out: Annotated[
        float | None, Parameter(help="Price of a million completion tokens.")
    ] = None,
    deadline: Annotated[
        float, Parameter(help="Timeout of a call in seconds, retries included.")
    ] = 600.0,
    tries: Annotated[int, Parameter(help="Tries per call; a 429 does not count.")] = 5,
    temperature: Annotated[
        float | None, Parameter(help="Sampling temperature of rows that set none.")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="Most completion tokens, for rows that set none.")
    ] = None,
    model_max_tokens: Annotated[
        int | None,
        Parameter(
            help="Most completion tokens of the model itself, for bounds (default: by its server)."
        ),
    ] = None,
    seed: Annotated[int | None, Parameter(help="Sampling seed of rows that set none.")] = None,
    error_budget: Annotated[
        float | None,
        Parameter(help="Stop when more than this fraction of the last 1000 calls fail."),
    ] = None,
    api: Annotated[
        Literal["chat", "responses"],
        Parameter(help="Send to /chat/completions, or to OpenAI's /responses."),
    ] = "chat",
    batch_api: Annotated[
        bool,
        Parameter(negative="", help="Send in batches of OpenAI's Batch API, at half the price."),
    ] = False,
    cancel: Annotated[
        bool,
        Parameter(negative="", help="With --batch-api: cancel the open batches and collect."),
    ] = False,
    key_env: KeyEnv = None,
    hedge: Annotated[
        bool, Parameter(help="Send the last stragglers a second time, which is paid for twice.")
    ] = True,
    run_dir: RunDir = None,
    retry_failed: Annotated[
        bool, Parameter(negative="", help="Retry the calls that failed in an earlier run.")
    ] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Show what would be called and what it may cost.")
    ] = False,
    on: On = "here",
    address: Address = None,
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Call a model with every prompt of a file. Stopped in any way, the same command resumes."""
    from batchwright.calls.promptfile import Answers, Spent, read_prompts
    from batchwright.files import check_apart

    check_apart(output, [input])
    if cache is not None:
        check_apart(cache, [input], "cache")
        check_apart(cache, [output], "cache", "output")
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    parameters = {name: value for name, value in given.items() if value is not None}
    if api == "responses" and seed is not None:
        raise ConfigError("the Responses API has no seed; leave out --seed, or use --api chat")
    prompts = read_prompts(input, model, parameters, api)
    prices = _prices(prompts, price_in, price_out, max_cost)
    known = _known(output, prompts, force)
    endpoints = [endpoint_at(target, key_env) for target in endpoint]
    own = output.with_name(f".{output.name}.partial.db")
    if model_max_tokens is not None:
        at_least(1, model_max_tokens=model_max_tokens)
    if on == "ray":
        _check_ray({"--batch-api": batch_api, "--run-dir": run_dir, "--price-in": prices})
    if batch_api:
        unused = {"batch-size": batch_size != "auto", "rpm": rpm, "tpm": tpm}
        check_flags(endpoints, {flag: bool(given) for flag, given in unused.items()})
        prices = discounted(prices)
    elif cancel:
        raise ConfigError("--cancel goes with --batch-api; Ctrl-C stops any other run")
    else:
        check_no_batches(output, prompts, known)
    limits: dict[str, ModelLimit] = {}
    if dry_run or max_cost is not None:
        limits = _limits(prompts, endpoints, model_max_tokens)
    most_tokens = {name: limit.tokens for name, limit in limits.items()}
    if dry_run:
        cached = cache or own
        _predict(prompts, known, cached, endpoints, prices, retry_failed, format, limits, batch_api)
        return
    if batch_api:
        run_batches(
            endpoints[0],
            prompts,
            output,
            Spent(output, prices, prompts, known, most_tokens) if prices is not None else None,
            prices,
            cancel=cancel,
            max_cost=max_cost,
            limits=limits,
            cache=cache,
            error_budget=error_budget,
            retry_failed=retry_failed,
            force=force,
            quiet=quiet,
            format=format,
        )
        return
    spent = left = None
    if prices is not None:
        spent = Spent(output, prices, prompts, known, most_tokens)
        if cache is None and own.exists():
            spent.settle(_cached(own, endpoints), prompts)
        if max_cost is not None:
            left = _left(max_cost, spent, prompts)
    cluster = joined(on, address)
    settings: dict[str, Any] = {"input": str(input), "output": str(output), "model": model}
    settings |= {"endpoint": [one.name for one in endpoints], "batch_size": batch_size}
    with (
        terminated_like_ctrl_c(),
        # Failures that stand: all others are made again, and are not counted twice.
        recorded(
            run_dir,
            "calls",
            settings,
            prompts=len(prompts),
            failed=0 if retry_failed else sum("error" in row for _, row in known),
            # A run that was killed had no time to log what its last calls cost.
            spent=None if spent is None else spent.earlier,
        ) as events,
    ):
        pool = _open(
            endpoints,
            batch_size,
            {
                "deadline_s": deadline,
                "tries": tries,
                "hedge": hedge,
                "cache": cache or own,
                "rpm": rpm,
                "tpm": tpm,
                "prices": prices,
                "max_cost": left,
                "model_max_tokens": most_tokens,
                "ledger": spent,
                "budget": _budget(error_budget),
                "events": events,
            },
            cluster,
        )
        with Answers(output, prompts, retry_failed=retry_failed, force=force) as answers:
            try:
                with pool:
                    try:
                        _answer(pool, prompts, answers, spent, cache is None, quiet)
                    finally:
                        facts = _facts(pool, prompts, answers, spent)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_stopped(prompts, answers, spent, cache or own)) from None
    whole = answers.written == len(prompts)
    if cluster and cache is None:
        # It serves this output alone, and has its cache open.
        pool.shutdown()  # type: ignore[attr-defined]
    if whole and cache is None:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{own}{suffix}").unlink(missing_ok=True)
    if whole and not answers.failed and spent is not None:
        spent.remove()
    show(facts, _summary(facts, output), format)
    if facts["calls"]["capped"] and spent is not None:
        raise BudgetExceeded(
            f"--max-cost {max_cost:g} is reached: {facts['spent']}, and the next call may exceed "
            f"it; {answers.written:,} of {len(prompts):,} prompts have a response in {output}, "
            f"raise --max-cost and run again to resume"
        )
    if not whole:
        raise BudgetExceeded(
            f"{answers.written:,} of {len(prompts):,} prompts have a response in {output}, then "
            f"{facts['stopped'] or 'the calls were cancelled'}"
        )
    if facts["failed"] and error_budget is None:
        raise BudgetExceeded(
            f"{facts['failed']:,} of {len(prompts):,} calls failed and are marked in {output}; "
            f"run again with --retry-failed, or allow some with --error-budget"
        )


@contextmanager
def _stopped_by_ctrl_c(pool: "Pool") -> Iterator[threading.Event]:
    """Ctrl-C cancels the open calls instead of interrupting what is being written.

    Others within seconds are not heard, nor any once the block has ended after one: the process
    then says what was kept, and ends.
    """
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before, since = signal.getsignal(signal.SIGINT), 0.0

    def press(number: int, frame: Any) -> None:
        nonlocal since
        if not stopped.is_set():
            since = time.monotonic()
            stopped.set()
            pool.cancel()
        elif time.monotonic() - since > PATIENCE_S:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if stopped.is_set() else before)


def _known(output: Path, prompts: "list[Prompt]", force: bool) -> "list[Line]":
    """What an earlier run wrote; an output of something else is refused before anything is done."""
    from batchwright.calls.promptfile import read_answers

    try:
        return read_answers(output, prompts)
    except Mismatch:
        if not force:
            raise
        return []


def _open(
    endpoints: "list[Endpoint]", batch_size: str, settings: dict[str, Any], cluster: bool
) -> "Pool":
    from batchwright.calls import Pool

    limit: Any = batch_size
    if batch_size != "auto":
        if not batch_size.isdecimal():
            raise ConfigError(f"--batch-size must be a number or auto, got {batch_size}")
        at_least(1, batch_size=int(batch_size))
        limit = int(batch_size)
    if not cluster:
        return Pool(*endpoints, limit=limit, **settings)
    from batchwright.integrations.ray import RayPool

    for name in ("ledger", "events"):
        settings.pop(name)
    return RayPool(*endpoints, limit=limit, **settings)


def _check_ray(given: dict[str, Any]) -> None:
    """Refuse what a pool in another process cannot write down before each call is sent."""
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} does not go with --on ray; leave out one of them")


def _budget(share: float | None) -> Any:
    from batchwright.calls import ErrorBudget

    return None if share is None else ErrorBudget(share, window=1000)


def _prices(
    prompts: "list[Prompt]",
    price_in: float | None,
    price_out: float | None,
    max_cost: float | None,
) -> dict[str, tuple[float, float]] | None:
    if price_in is None and price_out is None:
        if max_cost is not None:
            raise ConfigError(
                "--max-cost needs prices; give --price-in and --price-out for a million tokens"
            )
        return None
    if price_in is None or price_out is None:
        raise ConfigError("--price-in and --price-out go together; give 0 for what is free")
    for flag, value in (("price-in", price_in), ("price-out", price_out), ("max-cost", max_cost)):
        if value is not None and not value >= 0:
            raise ConfigError(f"--{flag} must be at least 0, got {value}")
    return {prompt.request.model: (price_in, price_out) for prompt in prompts}


def _answer(
    pool: "Pool",
    prompts: "list[Prompt]",
    answers: "Answers",
    spent: "Spent | None",
    own_cache: bool,
    quiet: bool,
) -> None:
    """Make the missing calls and write their outcomes as they complete."""
    missing = answers.missing

    def write(place: int, outcome: "Outcome") -> None:
        prompt = prompts[missing[place]]
        if spent is not None:
            spent.add(prompt, outcome, own_cache=own_cache)
        answers.add(missing[place], outcome)

    with _stopped_by_ctrl_c(pool) as stopped, progress_bar("calls", quiet) as progress:
        requests = (prompts[index].request for index in missing)
        wanted = itertools.takewhile(lambda _: not stopped.is_set(), requests)
        with pool.stream(wanted) as stream:
            for done, (place, outcome) in enumerate(stream, start=1):
                write(place, outcome)
                if progress is not None:
                    progress(done, len(missing))
        if stopped.is_set():
            raise KeyboardInterrupt


def _stopped(
    prompts: "list[Prompt]", answers: "Answers", spent: "Spent | None", cache: Path
) -> str:
    """What Ctrl-C leaves, and how to resume."""
    money = "" if spent is None else f", {_money(spent)}"
    return (
        f"{answers.written:,} of {len(prompts):,} responses are in {answers.path}, and those that "
        f"came back out of order in {cache}{money}; run the same command again to resume"
    )


def _facts(
    pool: "Pool", prompts: "list[Prompt]", answers: "Answers", spent: "Spent | None"
) -> dict[str, Any]:
    stats = pool.stats()
    kinds = stats.pop("failed_by_kind")
    if "caller" in stats:
        # The pool of a cluster counts the calls of others too.
        kinds = stats["caller"]["failed_by_kind"]
    stopped = kinds.pop("cancelled", 0)
    return {
        "prompts": len(prompts),
        "written": answers.written,
        "earlier": answers.known,
        "failed": sum(kinds.values()),
        "stopped": f"{stopped:,} calls were stopped" if stopped else None,
        "cost": None if spent is None else spent.total,
        "cost_earlier": None if spent is None else spent.earlier,
        "spent": None if spent is None else _money(spent),
        "calls": stats,
    }


def _summary(facts: dict[str, Any], output: Path) -> str:
    from batchwright.report.text import seconds

    made = facts["calls"]
    lines = [
        f"{facts['written']:,} of {facts['prompts']:,} responses in {output} "
        f"({facts['earlier']:,} from an earlier run, {facts['failed']:,} failed)",
        f"{made['sent']:,} tries, {made['hits']:,} cache hits, {made['shared']:,} shared, "
        f"{made['retries']:,} retries, {made['hedges']:,} hedged, {made['rejects']:,} rejected",
        f"latency p50 {seconds(made['p50_s'])}, p95 {seconds(made['p95_s'])}; "
        f"tokens {made['prompt_tokens']:,} prompt, {made['completion_tokens']:,} completion",
    ]
    if facts["cost"] is not None:
        lines.append(facts["spent"])
    lines += [f"{one['endpoint']}: limit {one['limit']:,}" for one in made["endpoints"]]
    return "\n".join(lines)


def _money(spent: "Spent") -> str:
    """What was paid, and what may have been."""
    text = f"{spent.total:.6g} spent"
    if spent.earlier:
        text += f" ({spent.earlier:.6g} in earlier runs)"
    if spent.unsettled:
        most = spent.unsettled_cost
        bound = f"at most {most:.6g} more" if most < inf else "an unknown sum"
        text += f" and {bound} for {spent.unsettled:,} tries whose response never came"
    return text


def _left(max_cost: float, spent: "Spent", prompts: "list[Prompt]") -> float:
    """What a run may spend under a cap over all runs; no call without a bound fits under one."""
    if spent.unsettled_cost == inf:
        raise ConfigError(
            f"--max-cost cannot hold: an earlier run left {spent.unsettled:,} tries unanswered, "
            f"some without --max-tokens, so that what they cost is not known; remove {spent.path} "
            f"to count from the responses alone"
        )
    unbounded = sum(spent.most_cost(prompt) == inf for prompt in prompts)
    if unbounded:
        raise ConfigError(
            f"--max-cost needs a bound for every call, and {unbounded:,} of {len(prompts):,} "
            f"prompts have none; set --max-tokens or --model-max-tokens (for images, stored "
            f"conversations and tools of the server there is none)"
        )
    return max(0.0, max_cost - spent.earlier - spent.unsettled_cost)


def _cached(
    path: Path, endpoints: "list[Endpoint]"
) -> "Callable[[Sequence[Prompt]], list[Done | None]]":
    """Looks up what a run that was killed has in its own cache."""
    from batchwright.calls.cache import Cache
    from batchwright.calls.endpoints import scope_of

    def look(prompts: "Sequence[Prompt]") -> "list[Done | None]":
        scope = scope_of(endpoints)
        keys = [prompt.request.scoped(scope).key for prompt in prompts]
        with Cache(path, mode="replay") as cache:
            found = cache.get_many(keys)
        return [found.get(key) for key in keys]

    return look


def _limits(
    prompts: "list[Prompt]", endpoints: "list[Endpoint]", given: int | None
) -> "dict[str, ModelLimit]":
    """How long responses get at most, by model, where requests do not say it.

    Only a model about which every endpoint says something is among them.
    """
    import asyncio

    from batchwright.calls.engine.stats import most_completion
    from batchwright.calls.wire.discovery import ModelLimit, model_limit

    models = {p.request.model for p in prompts if most_completion(p.request) is None}
    if given is not None:
        return {model: ModelLimit(given, "--model-max-tokens") for model in models}

    async def ask() -> dict[str, ModelLimit]:
        found = {}
        for model in models:
            said = [await model_limit(endpoint, model) for endpoint in endpoints]
            known = [one for one in said if one is not None]
            if len(known) == len(said):
                found[model] = max(known)
        return found

    return asyncio.run(ask()) if models else {}


def _predict(
    prompts: "list[Prompt]",
    known: "list[Line]",
    cache: Path,
    endpoints: "list[Endpoint]",
    prices: dict[str, tuple[float, float]] | None,
    retry_failed: bool,
    format: str,
    limits: "dict[str, ModelLimit]",
    batch_api: bool,
) -> None:
    """What a run would do, without any call and with nothing opened for writing."""
    from batchwright.calls.cache import Cache
    from batchwright.calls.endpoints import scope_of
    from batchwright.calls.engine.stats import Stats, estimate_usage, most_usage

    again = [i for i, (_, row) in enumerate(known) if retry_failed and "error" in row]
    missing = [*again, *range(len(known), len(prompts))]
    scope = scope_of(endpoints)
    scoped = [prompts[index].request.scoped(scope) for index in missing]
    requests = {request.key: request for request in scoped}
    hits = 0
    if cache.exists():
        with Cache(cache, mode="replay") as cached:
            found = cached.get_many(list(requests))
            hits = len(found)
            requests = {key: one for key, one in requests.items() if key not in found}
    about = sum(estimate_usage(one).prompt_tokens for one in requests.values())
    known_most = {model: limit.tokens for model, limit in limits.items()}
    found_bounds = [(one, most_usage(one, known_most.get(one.model))) for one in requests.values()]
    bounds = [(one, usage) for one, usage in found_bounds if usage is not None]
    unbounded = len(requests) - len(bounds)
    most = None if unbounded else sum(usage.completion_tokens for _, usage in bounds)
    cost = None
    if prices is not None and not unbounded:
        cost = sum(Stats(prices).price(one, usage) for one, usage in bounds)
    data = {
        "prompts": len(prompts),
        "answered": len(prompts) - len(missing),
        "cache_hits": hits,
        "calls": len(requests),
        "prompt_tokens": about,
        "completion_tokens_most": most,
        "unbounded_calls": unbounded,
        "model_max_tokens": {model: limit._asdict() for model, limit in limits.items()},
        "cost_most": cost,
    }
    text = (
        f"{len(prompts):,} prompts, {data['answered']:,} done already, {hits:,} cached\n"
        f"{len(requests):,} calls to make, about {about:,} prompt tokens and "
        + _bound(most, unbounded, cost, prices is not None)
        + (" (prices of the Batch API)" if batch_api and cost is not None else "")
        + "".join(
            f"\n{model}: at most {limit.tokens:,} completion tokens a response, by {limit.source}"
            for model, limit in sorted(limits.items())
        )
        + "\nno calls were made (--dry-run)"
    )
    show(data, text, format)


def _bound(most: int | None, unbounded: int, cost: float | None, priced: bool) -> str:
    """What a run may take at most, or that nothing bounds it."""
    if most is None:
        why = (
            f"{unbounded:,} have no max_tokens, and the server says no maximum, or hold images; "
            f"set --max-tokens, or --model-max-tokens"
        )
        tokens = f"any number of completion tokens ({why})"
        return tokens + ("\ncost without a bound, for the same reason" if priced else "")
    tokens = f"at most {most:,} completion tokens"
    if cost is None:
        return tokens
    return f"{tokens}\ncost at most {cost:.4f}, if no response is lost and called for again"
