"""The batch script of examples/slurm, under stand-ins for SLURM's two programs on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from batchwright.events import read_events

SCRIPT = Path(__file__).parents[1] / "examples" / "slurm" / "sft.sbatch"
SRUN = """#!/bin/bash
# One task a node, all of them here; a signal reaches every task.
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_STEP_ID=0 SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 \\
        SLURM_NTASKS=$SLURM_JOB_NUM_NODES "$@" &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
code=0
for task in "${tasks[@]}"; do
    wait "$task"
    one=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; one=$?; done
    [ $one -eq 0 ] || code=$one
done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then for _ in $(seq "$SLURM_JOB_NUM_NODES"); do echo 127.0.0.1; done; fi
if [ "$1" = requeue ]; then echo "$2" >> requeued; fi
"""


def submitted(folder: Path, nodes: int, flags: str) -> "subprocess.Popen[str]":
    """The script as `sbatch` starts it on the first node of a job."""
    bins = folder / "bin"
    bins.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = f"{bins}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "RAY_"))}
    slurm = {"JOB_ID": "77", "JOB_NUM_NODES": str(nodes), "JOB_NODELIST": "node[1-2]"}
    return subprocess.Popen(
        ["bash", str(SCRIPT)],
        cwd=folder,
        env={
            **environ,
            **{f"SLURM_{name}": value for name, value in slurm.items()},
            "PATH": path,
            "PORT": str(port),
            "FLAGS": flags,
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    if not (run / "events.jsonl").exists():
        return []
    found = read_events(run / "events.jsonl")
    return [{"kind": e.kind, **e.fields} for e in found if e.kind in kinds]


def test_a_job_on_two_nodes_is_stopped_requeued_and_finished_on_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {n}", "completion": f" answer {n % 7}"} for n in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (
        "--model tiny --data train.jsonl --pack --pack-max-len 128 --token-budget 128 "
        "--step-size 2 --epochs 40 --schedule constant"
    )
    run = tmp_path / "runs" / "job-77"
    job = submitted(tmp_path, 2, flags)
    try:
        end = time.monotonic() + 300
        while not events(run, "step") and job.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        # SLURM sends it to the script alone, some time before the limit.
        os.kill(job.pid, signal.SIGTERM)
        out, err = job.communicate(timeout=300)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert (tmp_path / "requeued").read_text() == "77\n", out + err[-3000:]
    assert [e["world"] for e in events(run, "start")] == [2]
    stop = events(run, "stop")[-1]
    assert (stop["why"], stop["by"]) == ("stopped", "SIGTERM")
    assert job.returncode != 0

    again = submitted(tmp_path, 1, flags)
    out, err = again.communicate(timeout=600)
    assert again.returncode == 0, out + err[-3000:]
    assert (tmp_path / "requeued").read_text() == "77\n"
    (resumed,) = events(run, "resume")
    assert (resumed["world"], resumed["step"]) == (1, stop["step"])
    assert events(run, "stop")[-1]["why"] == "done"
    steps = [e["step"] for e in events(run, "step")]
    assert steps == list(range(1, resumed["steps"] + 1))
