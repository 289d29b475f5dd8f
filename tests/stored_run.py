"""A run directory with something in every panel, written by the package's own writers."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.data import load_tokenizer, open_source
from batchwright.data.tokens import make_store
from batchwright.events import EventLog
from batchwright.sealed import write_sealed_json

HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>\u2028'\"&amp;"
if "BATCHWRIGHT_SCREENSHOTS" in os.environ:
    HOSTILE = "please try again"  # Pictures of the documentation show ordinary words.


def stored_run(folder: Path, *, steps: int = 40, ranks: int = 4, layout: Any = "packed") -> Path:
    """Fine-tuning on `ranks` ranks that also calls a judge and rewrites questions."""
    draw = random.Random(0)
    folder.mkdir(parents=True)
    rows = [
        {"id": f"s{k}", "text": "word " * int(3 + draw.expovariate(1 / 14)) + HOSTILE[: k % 9]}
        for k in range(160)
    ]
    data = folder.with_name(f"{folder.name}.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    store, _ = make_store(open_source(data), load_tokenizer("bytes"))
    store.link(folder / "tokens")
    config = BatchingConfig(
        layout=layout, token_budget=1024, overflow_max=1024, pack_max_length=512
    )
    BatchPlanBuilder(store.lengths, config).build(2).save(folder / "plan")
    (folder / "config.toml").write_text('model = "tiny"\nseed = 7\n')
    stamp = {"format": 3, "batchwright": "0.1.0", "python": "3.11", "seed": 7, "commit": "abc"}
    write_sealed_json(folder / "stamp.json", stamp)
    with EventLog(folder / "events.jsonl") as log:
        log.write("start", step=0, steps=steps, world=ranks)
        write_steps(log, 1, steps, ranks, draw)
        log.write("stop", step=steps, why="done")
    write_rollouts(folder / "rollouts", draw)
    return folder


def write_steps(log: EventLog, first: int, last: int, ranks: int, draw: random.Random) -> None:
    for step in range(first, last + 1):
        # As if half a second had passed.
        log._start -= 0.5
        loads = [256 * draw.randint(2, 4) for _ in range(ranks)]
        padded = sum(loads)
        log.write(
            "step",
            step=step,
            loss=4 * math.exp(-step / 20) + draw.random() / 10,
            grad_norm=1 + draw.random(),
            tokens=padded - draw.randint(5, 60),
            padded=padded,
            seconds=0.5 + draw.random() / 10,
            data_wait_s=draw.random() / 50,
            tokens_per_s=padded / 0.5,
            rank_padded=loads,
            rank_data_wait_s=[draw.random() / 50 for _ in loads],
        )
        log._start -= 0.1
        sent = draw.randint(20, 40)
        if step % 10 == 0:
            log.write("eval", step=step, loss=4 * math.exp(-step / 25))
            log.write("limit", endpoint="judge", **{"from": 8, "to": 6, "why": f"429 {HOSTILE}"})
        log.write(
            "calls",
            window_s=1.0,
            sent=sent,
            hit=step % 7,
            dedup=1,
            retry=step % 3,
            failed=int(step % 20 == 0),
            done=sent + step % 7,
            p50=0.1 + draw.random() / 10,
            p95=0.3,
            p99=0.5,
            limit=8,
            busy_s=5 + draw.random(),
            room_s=8.0,
            failed_by={"timeout": 1} if step % 20 == 0 else {},
            errors={HOSTILE: 1} if step % 20 == 0 else {},
            in_flight=draw.randint(4, 8),
            cost=step / 100,
        )


def write_rollouts(folder: Path, draw: random.Random) -> None:
    folder.mkdir()
    for number in (1, 2):
        turns = [
            {
                "env": env,
                "episode": number,
                "step": step,
                "question": f"question {env} {HOSTILE if env == 0 else ''}",
                "operator": "rephrase",
                "wording": f"wording {HOSTILE}",
                "answer": "42",
                "score": 0.5,
                "gain": None if env == 3 else round(draw.uniform(-0.1, 0.5), 3),
                "why": "timeout" if env == 3 else "",
            }
            for env in range(6)
            for step in (1, 2)
        ]
        lines = "".join(json.dumps(turn) + "\n" for turn in turns)
        (folder / f"{number:06d}.jsonl").write_text(lines, "utf-8")


def proof_run(folder: Path) -> Path:
    """What a prover leaves: one proof, and an episode that ended with a goal left."""
    (folder / "rollouts").mkdir(parents=True)
    with EventLog(folder / "events.jsonl") as log:
        log.write("start", round=0, rounds=1)
        log.write("eval", round=0, mrr=0.5, proved=0.5, right=0.5)
        log.write("stop", round=1, why="done")

    def line(episode: int, proved: bool, last: str) -> str:
        leaves = [("parent(anna, bo)", "fact"), (f"parent(bo, {HOSTILE})", last)]
        children = [{"goal": goal, "by": by, "children": []} for goal, by in leaves]
        return json.dumps(
            {
                "env": episode,
                "episode": episode,
                "step": 1,
                "question": "grandparent(anna, X)",
                "proved": proved,
                "right": proved,
                "expected": "cy",
                "reward": 1.0 if proved else -1.0,
                "depth": 3 if proved else 2,
                "why": "" if proved else "stuck",
                "proof": {"goal": "grandparent(anna, cy)", "by": "rule gp", "children": children},
            }
        )

    text = line(0, True, "fact") + "\n" + line(1, False, "open") + "\n"
    (folder / "rollouts" / "000000.jsonl").write_text(text, "utf-8")
    return folder


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of one kind, read without the package: an independent witness."""
    lines = (folder / "events.jsonl").read_text("utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def column(rows: list[dict[str, Any]], name: str) -> float:
    return float(np.sum([row[name] for row in rows]))
