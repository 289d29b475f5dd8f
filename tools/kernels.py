"""Write src/batchwright/ahead.txt: the kernels that Python calls, and with which argument types.

    .venv/bin/python tools/kernels.py

Runs the commands and examples of kernels.txt, each in a process of its own, and keeps what they
called. To be run when a kernel is added, renamed or called with other types; needs what
`make setup` installs.
"""

import json
import os
import runpy
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

import batchwright.jit as jit
from batchwright.ahead import PACKAGE, spelled

EXAMPLES = Path(__file__).parents[1] / "examples"
LARGE = 60_000
"""Rows for which no command does without kernels."""

COMMANDS = Path(__file__).with_suffix(".txt")

GYM = """
from pathlib import Path

from batchwright.batching.packing.bins import pack_lengths
from batchwright.envs import CartPole, ProverEnv, check_env
from batchwright.logic import load_graph, parse_rules
from batchwright.rl import PPO, PPOConfig, policy_for
from batchwright.rl.kernels import greedy
from batchwright.rng import stream

import numpy as np

print(check_env(CartPole(16), make=CartPole))
env = CartPole(16)
PPO(env, policy_for(env), PPOConfig(total_steps=4096, num_steps=16)).learn()
graph = load_graph("family")
env = ProverEnv(graph.facts, parse_rules(Path("family/rules.txt"), graph.vocab), graph.train, 16)
env.reset()
env.step(env.random_actions())
rows, allowed = np.zeros((4, 3), np.float32), np.ones((4, 3), np.bool_)
greedy(rows, allowed, np.zeros(4, np.int64), np.zeros(4, np.float32))
hard = np.clip(stream(1, "hard").normal(737, 164, 60_000), 1, 2048).astype(np.int32)
pack_lengths(hard, 2048, "optimal")
"""


def main() -> None:
    # Once for all commands: each is a fork of this process.
    for library in ("numba", "torch", "transformers", "batchwright.cli.app"):
        import_module(library)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        os.chdir(folder)
        out = folder / "called.txt"
        failed = [line for line in COMMANDS.read_text().splitlines() if not done(line, out)]
        called = sorted(set(out.read_text().splitlines()))
    if failed:
        sys.exit(f"{len(failed)} commands failed, {failed[0]} first; ahead.txt stays as it is")
    (PACKAGE / "ahead.txt").write_text("".join(f"{line}\n" for line in called))
    print(f"{len(called)} kernels with their types")


def done(line: str, out: Path) -> bool:
    """Run a command or an example in a fork, its output left out; whether it went well."""
    print(line, flush=True)
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    with Path("output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
    code = 1
    try:
        record(out, line.replace("EXAMPLES", str(EXAMPLES)).split())
        code = 0
    except SystemExit as ended:
        code = int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def prepare(folder: Path) -> None:
    """The files that the commands read."""
    import numpy as np

    from batchwright.data import load_tokenizer
    from batchwright.data.lengths import LengthCache
    from batchwright.rng import stream

    lengths = np.clip(stream(1, "kernels").lognormal(4, 0.9, LARGE), 2, 3000).astype(int).tolist()
    ids = [f"row-{n:06d}" for n in range(LARGE)]
    tokenizer = load_tokenizer("bytes").fingerprint
    with LengthCache.create(folder / "others.jsonl", tokenizer_hash=tokenizer) as cache:
        cache.extend([f"other-{n:06d}" for n in range(LARGE)], lengths)
    with (folder / "rows.jsonl").open("w") as rows:
        for number, (row, length) in enumerate(zip(ids, lengths, strict=True)):
            more = {"level": number % 97 / 97, "group": number // 3, "cost": number % 7}
            rows.write(json.dumps({"id": row, "text": "x" * (length - 1), **more}) + "\n")
    shipped = PACKAGE / "shipped" / "family"
    (folder / "family").mkdir()
    for path in shipped.iterdir():
        (folder / "family" / path.name).write_bytes(path.read_bytes())
    (folder / "gym.py").write_text(GYM)


def record(out: Path, words: list[str]) -> None:
    """Run a command or a script in this process, and append the kernels it called to `out`."""
    called: dict[int, jit._Kernel] = {}
    plain = jit._Kernel.__call__

    def call(self: jit._Kernel, *args: object) -> object:
        if not jit._interpreting.get():
            called[id(self)] = self
        return plain(self, *args)

    jit._Kernel.__call__ = call  # type: ignore[method-assign]
    try:
        if words[0].endswith(".py"):
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv = ["batchwright", *words]
            import_module("batchwright.cli.app").main()
    finally:
        with out.open("a") as file:
            for found in called.values():
                function = found.py_func
                for types in found.dispatcher.signatures:  # type: ignore[attr-defined]
                    file.write(f"{function.__module__}.{function.__name__} {spelled(types)}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]), sys.argv[2:])
    else:
        main()
