"""Draw the pictures of docs/explain.md: elastic resume, the limit, validity, and ranks.

    python tools/explain.py            draw them
    python tools/explain.py --check    write nothing; exit with 1 if one differs

What is drawn is what the package does: shards of a plan, a limit at a simulated server, advantages
of a group, ranks of one query. All coordinates are integers, so the files are the same everywhere.
"""

import sys
from pathlib import Path

import numpy as np

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.calls.limit import AutoLimit
from batchwright.logic.facts import Facts
from batchwright.logic.rank.ranking import rank
from batchwright.logic.vocab import Vocab
from batchwright.rewards import group_advantages

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
WIDTH = 880
INK, FAINT = "#888888", '#888888" fill-opacity="0.25'
"""Mid grey: seen on a light page and on a dark one."""
RANKS = ("#4878a8", "#c8502d", "#5f9e6e")
GOOD, BAD = "#4878a8", "#c8502d"


def main() -> None:
    pictures = {"resume": resume, "limit": limit, "validity": validity, "ranks": ranks}
    for name, draw in pictures.items():
        path, drawn = ASSETS / f"{name}.svg", draw()
        if "--check" not in sys.argv:
            path.write_text(drawn, "utf-8")
        elif drawn != path.read_text("utf-8"):
            sys.exit(f"{path.name} differs from what the package gives; run {sys.argv[0]}")


def resume() -> str:
    """Microbatches of each step, coloured by rank: two ranks, stopped, then three."""
    stop, size = 5, 26
    lengths = np.random.default_rng(0).integers(10, 400, 620)
    config = BatchingConfig(layout="packed", token_budget=2048, step_size=6)
    plan = BatchPlanBuilder(lengths, config).build()
    parts, drawn, seen = [], [], 0
    steps = plan.num_steps(0)
    for world, first, last in ((2, 0, stop), (3, stop, steps)):
        for owner in range(world):
            shard = list(plan.shard(owner, world).iter_steps())[first:last]
            for number, step in enumerate(shard, first):
                for batch in (batch for batch in step.microbatches if batch.weight):
                    row = batch.index - number * config.step_size
                    x = 60 + number * (size + 8) + (40 if first else 0)
                    drawn.append(rect(x, 54 + row * (size // 2 + 4), size, size // 2, RANKS[owner]))
                    parts.append(batch.index)
                    seen += len(batch.samples)
    if sorted(parts) != list(range(plan.num_microbatches(0))) or seen != len(lengths):
        sys.exit("a microbatch is computed twice or never")
    middle = 60 + stop * (size + 8) + 16
    right = 60 + steps * (size + 8) + 60
    lines = [
        text(60, 20, "two ranks", bold=True),
        text(60, 40, f"steps 0 to {stop - 1}"),
        text(middle + 24, 20, "three ranks", bold=True),
        text(middle + 24, 40, f"steps {stop} to {steps - 1}"),
        line(middle, 8, middle, 160, dashed=True),
        text(middle, 176, "stopped, resumed", anchor="middle"),
        *drawn,
        *(part for k in range(3) for part in key(right, 60 + 22 * k, RANKS[k], f"rank {k}")),
        text(right, 140, f"{len(parts)} microbatches, {seen} samples,"),
        text(right, 158, "each computed once"),
    ]
    return svg("Microbatches of an epoch that began on two ranks and ended on three", 186, lines)


class Watched:
    """A limit that notes when calls end and what it allows then."""

    def __init__(self) -> None:
        self._own = AutoLimit(start=4)
        self.seen: list[tuple[float, int]] = []

    @property
    def limit(self) -> int:
        return self._own.limit

    @property
    def pause_until(self) -> float:
        return self._own.pause_until

    def on_done(self, now: float, seconds: float, in_flight: int, ok: bool) -> None:
        self._own.on_done(now, seconds, in_flight, ok)
        self.seen.append((now, self.limit))

    def on_reject(self, now: float, in_flight: int, retry_after_s: float | None) -> None:
        self._own.on_reject(now, in_flight, retry_after_s)


def limit() -> str:
    """The limit and the goodput at a server that thrashes above a knee that moves."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from limit_world import World, run

    world = World("thrash", (32, 64, 20), calls=12_000)
    watched = Watched()
    seconds = run(world, watched).seconds  # type: ignore[arg-type]
    left, wide, tall, base = 60, 780, 110, (140, 290)
    times = np.array([now for now, _ in watched.seen])
    marks = [(now, world.knee(k)) for k, (now, _) in enumerate(watched.seen, 1)]
    most = 1.15 * max(max(a for _, a in watched.seen), max(world.knees))

    def x(now: float) -> int:
        return left + int(now / seconds * wide)

    def y(value: float, panel: int, top: float) -> int:
        return base[panel] - int(value / top * tall)

    bins = np.linspace(0, seconds, 91)
    goodput = np.histogram(times, bins)[0] / np.diff(bins)
    # A call takes a second on average, so a knee is also the goodput that it allows.
    best = 1.15 * max(float(goodput.max()), float(max(world.knees)))
    middles = [(float(b), float(g)) for b, g in zip(bins[1:], goodput, strict=True)]
    lines = [
        text(left, 18, "limit", bold=True, colour=GOOD),
        text(left + 42, 18, "and the knee of the server (dashed), calls at once"),
        path([(x(t), y(v, 0, most)) for t, v in stairs(marks)], INK, dashed=True),
        path([(x(t), y(v, 0, most)) for t, v in stairs(watched.seen)], GOOD),
        text(left, 168, "goodput", bold=True, colour=BAD),
        text(left + 66, 168, "and the most that the knee allows (dashed), responses per second"),
        path([(x(t), y(v, 1, best)) for t, v in stairs(marks)], INK, dashed=True),
        path([(x(t), y(v, 1, best)) for t, v in middles], BAD),
        text(left + wide, 310, f"{seconds:.0f} simulated seconds", anchor="end"),
    ]
    for panel, top in ((0, most), (1, best)):
        lines.append(line(left, base[panel], left + wide, base[panel]))
        lines += [
            text(left - 8, y(value, panel, top) + 4, str(value), anchor="end")
            for value in (0, *sorted(world.knees))
        ]
    return svg(
        "The limit follows the knee of a server, and goodput stays near its best", 320, lines
    )


def stairs(points: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """The corners of a line that changes in steps."""
    found: list[tuple[float, float]] = []
    for now, value in points:
        if not found:
            found.append((0.0, value))
        elif value != found[-1][1]:
            found += [(now, found[-1][1]), (now, value)]
    return [*found, (points[-1][0], points[-1][1])]


def validity() -> str:
    """Advantages of a group whose judge failed twice: scored 0, and left out."""
    rewards = np.array([0.9, 0.35, 0.6, 0.8, 0.45, 0.3, 0.7, 0.4])
    failed = np.array([False, False, False, True, False, False, True, False])
    group = np.zeros(len(rewards), np.int64)
    truth, _ = group_advantages(rewards, group)
    zero, _ = group_advantages(np.where(failed, 0.0, rewards), group)
    out, _ = group_advantages(rewards, group, ~failed)
    lines = []
    for panel, (title, values) in enumerate(
        (("failures scored 0", zero), ("failures left out", out))
    ):
        x, base = 40 + panel * 440, 110
        wrong = (values * truth < 0).sum()
        lines.append(text(x, 18, title, bold=True))
        told = f"{wrong} of {len(values)} advantages have the wrong sign"
        lines.append(text(x, 36, told))
        for k, value in enumerate(values):
            at, high = x + k * 48, int(abs(value) * 32)
            if failed[k] and panel:
                lines.append(text(at + 15, base - 6, "out", anchor="middle"))
            else:
                colour = BAD if value * truth[k] < 0 else GOOD
                lines.append(rect(at, base - high if value > 0 else base, 30, high, colour))
            # What a judge that answered would have said.
            mark = base - int(truth[k] * 32)
            lines.append(line(at - 3, mark, at + 33, mark, dashed=True))
            said = "failed" if failed[k] else f"{rewards[k]:.2f}"
            lines.append(text(at + 15, 196, said, anchor="middle"))
        lines.append(line(x - 6, base, x + 8 * 48, base))
    for part in (
        key(40, 224, GOOD, "advantage"),
        key(180, 224, BAD, "advantage with the wrong sign"),
        [
            line(450, 219, 474, 219, dashed=True),
            text(482, 224, "had the judge answered every call"),
        ],
    ):
        lines += part
    return svg("Advantages of one group with two failed judge calls", 236, lines)


def ranks() -> str:
    """One query: known answers are removed, and ties get the mean rank."""
    scores = np.array([0.91, 0.86, 0.84, 0.7, 0.7, 0.7, 0.7, 0.55, 0.4, 0.3], np.float32)
    answer, others = 5, (0, 2)
    vocab = Vocab(("query", *(f"e{k}" for k in range(len(scores)))), ("p",))
    known = Facts.of([(0, 0, 1 + k) for k in (answer, *others)], vocab)

    class Fixed:
        def scores(self, given: object, predicates: object, side: object) -> object:
            return np.concatenate([[-1.0], scores])[None].astype(np.float32)

    found = rank(
        Fixed(),  # type: ignore[arg-type]
        np.array([(0, 0, 1 + answer)], np.int32),
        known,
        sides=("tail",),
    )
    greater, ties = int(found.greater[0]), int(found.ties[0])
    lines = [text(40, 18, "p(h, ?): every entity, best score first", bold=True)]
    tied = [k for k in range(len(scores)) if scores[k] == scores[answer]]
    for k, score in enumerate(scores):
        x = 40 + k * 80
        removed, right = k in others, k == answer
        colour = GOOD if right else FAINT
        lines.append(rect(x, 40, 68, 40, colour))
        fill = "#ffffff" if right else INK
        lines.append(text(x + 34, 65, f"{score:.2f}", anchor="middle", colour=fill))
        if removed:
            lines.append(line(x, 80, x + 68, 40))
        named = "the answer" if right else "known" if removed else ""
        lines.append(text(x + 34, 98, named, anchor="middle"))
    low, high = 40 + tied[0] * 80, 40 + tied[-1] * 80 + 68
    lines += [
        line(low, 112, high, 112),
        text((low + high) // 2, 130, f"{len(tied)} with the same score", anchor="middle"),
        text(40, 160, f"Known answers are removed, so {greater} scores above the tie:"),
        text(40, 182, f"optimistic rank {1 + greater}", colour=BAD),
        text(240, 182, f"mean rank {found.middle[0]:g}", bold=True, colour=GOOD),
        text(400, 182, f"pessimistic rank {1 + greater + ties}", colour=BAD),
    ]
    return svg("The rank of an answer among all entities", 194, lines)


def svg(title: str, height: int, lines: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    return "\n".join([head, f"<title>{title}</title>", *lines, "</svg>"]) + "\n"


def rect(x: int, y: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'


def line(x1: int, y1: int, x2: int, y2: int, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}"{dashes}/>'


def path(points: list[tuple[int, int]], colour: str, dashed: bool = False) -> str:
    kept = [p for k, p in enumerate(points) if not k or p != points[k - 1]]
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    corners = " ".join(f"{x},{y}" for x, y in kept)
    return (
        f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
    )


def text(
    x: int, y: int, words: str, *, bold: bool = False, anchor: str = "", colour: str = ""
) -> str:
    given = {
        "text-anchor": anchor,
        "fill": colour,
        "font-weight": "bold" if bold else "",
    }
    more = "".join(f' {name}="{value}"' for name, value in given.items() if value)
    return f'<text x="{x}" y="{y}"{more}>{words}</text>'


def key(x: int, y: int, colour: str, words: str) -> list[str]:
    return [rect(x, y - 10, 12, 12, colour), text(x + 18, y, words)]


if __name__ == "__main__":
    main()
