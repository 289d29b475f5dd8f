"""What a summary suggests to do, in words: plain functions, one thing each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchwright.report.text import percent, seconds

__all__ = ["Advice", "advise"]

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding with its figures, and what to change."""

    panel: str
    seen: str
    do: str


def advise(summary: Summary) -> list[dict[str, str]]:
    """What the rules find, in their order; an empty list if nothing stands out."""
    return [asdict(found) for rule in RULES for found in rule(summary)]


def _ended_early(summary: Summary) -> Iterator[Advice]:
    if summary["state"]["name"] in ("crashed", "stopped") and summary["kind"] not in (
        "calls",
        "gym",
    ):
        at = summary["progress"]
        of = f" of {at['of']:,}" if at["of"] else ""
        yield Advice(
            "steps",
            f"The run ended at {at['unit']} {at['at'] or 0:,}{of}.",
            "Resume it with --resume and its folder.",
        )


def _padding(summary: Summary) -> Iterator[Advice]:
    """Another layout computes far fewer tokens for the same samples."""
    plan = summary["plan"]
    if not plan or not plan["layouts"]:
        return
    best = max(plan["layouts"], key=lambda row: row["efficiency"])
    if plan["efficiency"] < 0.9 and best["efficiency"] > plan["efficiency"] + 0.03:
        yield Advice(
            "plan",
            f"The plan has {percent(1 - plan['efficiency'])} padding; {best['layout']} would have "
            f"{'about ' if best['about'] else ''}{percent(1 - best['efficiency'])}.",
            f"Plan with --layout {best['layout']}.",
        )


def _skipped(summary: Summary) -> Iterator[Advice]:
    plan = summary["plan"]
    if plan and plan["skipped"]:
        yield Advice(
            "plan",
            f"{plan['skipped']:,} of {plan['samples']:,} samples are in no batch.",
            "See why with `batchwright data batchplan info`; choose --overflow truncate or split, "
            "or a larger budget.",
        )


def _data_wait(summary: Summary) -> Iterator[Advice]:
    totals = (summary["steps"] or {}).get("totals", {})
    if not totals.get("seconds") or "data_wait_s" not in totals:
        return
    share = totals["data_wait_s"] / totals["seconds"]
    if share > 0.05:
        yield Advice(
            "ranks",
            f"The trainer waited for data {percent(share)} of the time "
            f"({seconds(totals['data_wait_s'])}).",
            "Tokenise beforehand with `batchwright data lengths build`, or use a faster disk.",
        )


def _rank_balance(summary: Summary) -> Iterator[Advice]:
    steps = summary["steps"]
    if not steps or len(steps["ranks"]) < 2:
        return
    most = sum(v or 0 for v in steps["rank_busiest"])
    loads = {rank["rank"]: sum(v or 0 for v in rank["padded"]) for rank in steps["ranks"]}
    share = 1 - sum(loads.values()) / len(loads) / most if most else 0.0
    if share > 0.05:
        rank = max(loads, key=lambda rank: loads[rank])
        yield Advice(
            "ranks",
            f"Ranks are idle {percent(share)} of a step on average, as the most loaded one has "
            f"more tokens; rank {rank} has the most of all.",
            "Use more microbatches per step (--step-size): there is more to balance with.",
        )


def _calls_failing(summary: Summary) -> Iterator[Advice]:
    totals = (summary["calls"] or {}).get("totals", {})
    ended = totals.get("done", 0) + totals.get("failed", 0)
    if ended and totals.get("failed", 0) / ended > 0.02:
        kinds = ", ".join(list(summary["calls"]["failed_by"])[:3])
        yield Advice(
            "calls",
            f"{percent(totals['failed'] / ended)} of the calls failed"
            f"{': ' + kinds if kinds else ''}; failed calls never enter the loss.",
            _against(summary["calls"]["failed_by"]),
        )


def _against(kinds: Mapping[str, int]) -> str:
    """What helps against the most frequent kind of failure."""
    most = max(kinds, key=lambda kind: kinds[kind], default="")
    return {
        "unreachable": "Check that the server runs and that its address is right.",
        "http_4xx": "The server refuses the requests: check the model's name, the key and what is "
        "sent.",
        "truncated": "Allow longer responses (max_tokens).",
        "empty": "Look at the prompts that got an empty response.",
        "bad_body": "Check what the server answers: it is not what its protocol says.",
        "rate_limited": "Give the server's rate limit as --rpm or --tpm.",
    }.get(most, "Raise the deadline or the tries, or lower the limit.")


def _rejected(summary: Summary) -> Iterator[Advice]:
    calls = summary["calls"]
    cuts = sum(n for why, n in (calls or {}).get("reasons", {}).items() if "429" in why)
    if calls and cuts >= 5 and cuts > calls["limit_changes"] / 4:
        yield Advice(
            "calls",
            f"The server rejected calls often: {cuts:,} of {calls['limit_changes']:,} changes of "
            f"the limit were cuts after 429.",
            "Give its rate limit as --rpm or --tpm, so that calls wait here and not there.",
        )


def _slots_empty(summary: Summary) -> Iterator[Advice]:
    totals = (summary["calls"] or {}).get("totals", {})
    if totals.get("room_s", 0) < 10 or totals.get("sent", 0) < 100:
        return
    share = totals["busy_s"] / totals["room_s"]
    if share < 0.5:
        yield Advice(
            "calls",
            f"Call slots were {percent(1 - share)} empty: the server could have taken more.",
            "Run more environments (--num-processes), or score more samples at once.",
        )


def _invalid_turns(summary: Summary) -> Iterator[Advice]:
    rollouts = summary["rollouts"]
    if rollouts and rollouts["invalid"] / rollouts["turns"] > 0.05:
        why = next(iter(rollouts["reasons"]), "")
        yield Advice(
            "rollouts",
            f"{percent(rollouts['invalid'] / rollouts['turns'])} of the turns are invalid, most of "
            f"them because of {why}; they are not learnt from.",
            "See the calls panel for what failed.",
        )


def _policy_moves(summary: Summary) -> Iterator[Advice]:
    newest = (summary["steps"] or {}).get("newest", {})
    kl = newest.get("losses/approx_kl")
    if kl is not None and kl > 0.05:
        yield Advice(
            "steps",
            f"The policy moved far in the last update (approximate KL {kl:.3f}).",
            "Lower --lr, or use fewer epochs per rollout.",
        )


def _loss_rises(summary: Summary) -> Iterator[Advice]:
    steps = summary["steps"]
    loss = [v for v in (steps or {}).get("mean", {}).get("loss", []) if v is not None]
    tenth = len(loss) // 10
    if steps and tenth >= 2:
        first, last = sum(loss[:tenth]) / tenth, sum(loss[-tenth:]) / tenth
        if last > 1.1 * first > 0:
            yield Advice(
                "steps",
                f"The loss rose from {first:.3g} to {last:.3g} (first and last tenth).",
                "Lower --lr, or warm up longer (--warmup-steps).",
            )


def _overfits(summary: Summary) -> Iterator[Advice]:
    evals = summary["evals"]
    loss = [v for v in (evals or {}).get("mean", {}).get("loss", []) if v is not None]
    if len(loss) >= 3 and loss[-1] > 1.05 * min(loss):
        yield Advice(
            "steps",
            f"The loss on held-out samples rose again, from {min(loss):.3g} to {loss[-1]:.3g}.",
            "Train fewer epochs, or on more data.",
        )


RULES: tuple[Callable[[Summary], Iterator[Advice]], ...] = (
    *(_ended_early, _padding, _skipped, _data_wait, _rank_balance, _calls_failing, _rejected),
    *(_slots_empty, _invalid_turns, _policy_moves, _loss_rises, _overfits),
)
