"""Rows in the order of a plan, read and tokenised one by one: JSONL, compressed, Parquet, datasets.

The same rows of GSM8K stand in every file, and every file is read in the same random order, as a
run without a token store does; ours unpacks what is compressed or in row groups once. CPU time,
opening and unpacking included.
"""

import gzip
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from batchwright.data.ids import Ids
from batchwright.data.reader import PlanRows
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from common import Report, arguments, data_folder

ROWS = 20_000


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report("rows", args)
    path = data_folder() / "text" / "gsm8k_train.jsonl"
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        report.not_measured("GSM8K", f"no {path.name}; set BATCHWRIGHT_DATA")
        rows = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}."} for n in range(1000)]
    count = 100 if args.smoke else 2_000 if args.quick else ROWS
    rows = (rows * (1 + count // len(rows)))[:count]
    order = random.Random(0).sample(range(count), count)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        os.environ["BATCHWRIGHT_TOKENS"] = str(Path(name) / "tokens")
        for kind, make in sources(Path(name), rows).items():
            try:
                data = make()
            except ImportError as error:
                report.not_measured(kind, str(error))
                continue
            # The best of three: other processes only ever add to it.
            found[kind] = min(seconds(data, order) for _ in range(1 if args.smoke else 3))
    plain = found["JSONL"]
    report.table(
        f"{count:,} rows in the order of a plan",
        ("", "s", "us/row", "x JSONL"),
        [[kind, s, 1e6 * s / count, s / plain] for kind, s in found.items()],
    )
    report.target("any source, x JSONL", max(found.values()) / plain, most=1.5)
    report.close()


def sources(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Callable[[], Any]]:
    lines = "".join(json.dumps(row) + "\n" for row in rows)

    def jsonl() -> Path:
        (folder / "rows.jsonl").write_text(lines)
        return folder / "rows.jsonl"

    def packed() -> Path:
        with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
            file.write(lines)
        return folder / "rows.jsonl.gz"

    def parquet(group: int) -> Path:
        import pyarrow
        import pyarrow.parquet

        path = folder / f"{group}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
        return path

    def dataset() -> Any:
        import datasets

        return datasets.Dataset.from_list(rows)

    groups = (1_000, 5_000, len(rows))
    return {
        "JSONL": jsonl,
        "JSONL, gzip": packed,
        **{f"Parquet, groups of {g:,}": lambda g=g: parquet(g) for g in groups},  # type: ignore[misc]
        "datasets.Dataset": dataset,
    }


def seconds(data: Any, order: list[int]) -> float:
    tokenizer = load_tokenizer("gpt2")
    began = time.process_time()
    rows = PlanRows([open_source(data)], Ids.numbered(len(order)), (), tokenizer)
    tokens = sum(len(rows.sample(item)) for item in order)
    assert tokens > np.int64(0)
    return time.process_time() - began


if __name__ == "__main__":
    main()
