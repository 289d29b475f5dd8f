"""`batchwright gym run`: episodes in, a replay buffer out."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from batchwright.cli.flags import Address, On, at_least, joined
from batchwright.cli.gym.record import EpisodeRecord
from batchwright.cli.output import Format, Quiet, count_of, progress_bar, say, show
from batchwright.cli.rundir import RunDir, recorded
from batchwright.errors import BatchwrightError, CannotWrite, ConfigError

if TYPE_CHECKING:
    from batchwright.events import EventLog
    from batchwright.streaming import GymEpisodeStream, MockGymStream, ReplayBuffer, StreamSample
    from batchwright.streaming.gym import GymPolicy

__all__ = ["run"]

POLICIES: dict[str, Literal["hint", "random"]] = {"hint": "hint", "random": "random"}
BINS = 5
"""Parts of the difficulty for which the success rate is shown."""
SAVE_EVERY_S = 5.0
"""What a killed run may lose of a folder."""


def run(
    *,
    tokenizer: Annotated[
        str, Parameter(name=["--tokenizer", "-t"], help="gpt2, bytes, or a tokenizer's folder.")
    ],
    host: Annotated[str | None, Parameter(help="Of the gym server (localhost).")] = None,
    port: Annotated[int | None, Parameter(help="Of the gym server (8023).")] = None,
    transport: Annotated[
        Literal["telnet", "tcp", "websocket"] | None,
        Parameter(help="What carries the lines (telnet)."),
    ] = None,
    output_mode: Annotated[
        Literal["normal", "agent", "json"] | None,
        Parameter(help="How prompts show a board: as drawn, between markers, as JSON (json)."),
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            help="New buffer: *.json or *.safetensors, saved at the end, or a folder, saved every "
            "5 seconds; one that is there already is refused.",
        ),
    ] = None,
    buffer_size: Annotated[
        int, Parameter(help="Samples the buffer holds; older ones are evicted.")
    ] = 100_000,
    num_episodes: Annotated[
        int | None, Parameter(help="Episodes to play (default 10, or until --max-samples).")
    ] = None,
    steps_per_episode: Annotated[
        int | None, Parameter(help="Steps of a mock episode (5); most moves on a server (200).")
    ] = None,
    max_samples: Annotated[int | None, Parameter(help="Stop after this many samples.")] = None,
    difficulty_min: Annotated[float, Parameter(help="From 0 to 1.")] = 0.0,
    difficulty_max: Annotated[float, Parameter(help="From 0 to 1.")] = 1.0,
    puzzle: Annotated[
        list[str] | None, Parameter(negative="", help="A puzzle to play, repeatable.")
    ] = None,
    policy: Annotated[
        str | None,
        Parameter(help="hint (default), random, or a model: URL#NAME, ollama:NAME, local:smollm2."),
    ] = None,
    connections: Annotated[int | None, Parameter(help="Episodes played at once (1).")] = None,
    timeout: Annotated[
        float | None, Parameter(help="Seconds for a connection (10), and for each reply (30).")
    ] = None,
    retries: Annotated[
        int | None, Parameter(help="Failures in a row before it gives up (3).")
    ] = None,
    mock: Annotated[
        bool, Parameter(negative="", help="Generated episodes of sums, without a server.")
    ] = False,
    success_rate: Annotated[float | None, Parameter(help="Of mock episodes (0.7).")] = None,
    on: On = "here",
    address: Address = None,
    workers: Annotated[
        int | None, Parameter(help="Actors on the Ray cluster, each with --connections.")
    ] = None,
    run_dir: RunDir = None,
    seed: Annotated[int, Parameter(help="Of puzzles, moves of a random policy and sampling.")] = 42,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Play episodes and keep their samples. Ctrl-C stops and saves what was earned."""
    from batchwright.streaming import GymConfig, MockGymStream, ReplayBuffer, ReplayBufferConfig
    from batchwright.streaming.gym import GymEpisodeStream

    at_least(1, num_episodes=num_episodes, max_samples=max_samples, buffer_size=buffer_size)
    at_least(1, steps_per_episode=steps_per_episode, connections=connections, workers=workers)
    if (on == "ray") != (workers is not None):
        raise ConfigError("--workers, the number of actors, and --on ray go together; give both")
    if on == "ray" and mock:
        raise ConfigError("--mock needs no server and no other machine; leave out --on ray")
    _check_new(output)
    if num_episodes is None and max_samples is None:
        num_episodes = 10
    difficulties = (difficulty_min, difficulty_max)
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=buffer_size, seed=seed))
    settings = {"mock": mock, "host": host, "port": port, "policy": policy, "tokenizer": tokenizer}
    with recorded(run_dir, "gym", settings | {"seed": seed}, episodes=num_episodes) as events:

        def fill(stream: "MockGymStream | GymEpisodeStream") -> None:
            record = None
            if events is not None and run_dir is not None:
                record = EpisodeRecord(events, run_dir, stream.tokenizer)
            _fill(stream, buffer, num_episodes, max_samples, output, record, quiet, format)

        if mock:
            _only("a server", puzzle=puzzle, policy=policy, connections=connections, host=host)
            _only("a server", port=port, transport=transport, output_mode=output_mode)
            _only("a server", timeout=timeout, retries=retries)
            steps = steps_per_episode or 5
            stream: MockGymStream | GymEpisodeStream = MockGymStream(
                tokenizer,
                num_episodes or -(-(max_samples or 1) // steps),
                steps,
                difficulties,
                0.7 if success_rate is None else success_rate,
                seed,
            )
            fill(stream)
            return
        _only("--mock", success_rate=success_rate)
        asked: dict[str, Any] = {
            "host": host,
            "port": port,
            "transport": transport,
            "output_mode": output_mode,
            "connect_timeout": timeout,
            "read_timeout": timeout,
            "puzzle_types": tuple(puzzle) if puzzle else None,
            "max_steps": steps_per_episode,
            "max_retries": retries,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        config = GymConfig(difficulty_range=difficulties, **given)
        if joined(on, address):
            from batchwright.integrations.ray.gym import RayGymStream

            assert workers is not None
            with closing(
                RayGymStream(
                    config,
                    tokenizer,
                    policy or "hint",
                    workers=workers,
                    num_episodes=num_episodes,
                    connections=connections or 1,
                    seed=seed,
                )
            ) as many:
                fill(many)
            return
        with _policy(policy or "hint", events) as player:
            stream = GymEpisodeStream(
                config,
                tokenizer,
                player,
                num_episodes=num_episodes,
                connections=connections or 1,
                seed=seed,
            )
            fill(stream)


def _only(what: str, **given: object) -> None:
    """Refuse flags that would have no effect."""
    for name, value in given.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for {what} only; leave it out")


def _check_new(output: Path | None) -> None:
    """Refuse an output before anything is played for it."""
    if output is None:
        return
    if not output.absolute().parent.is_dir():
        raise CannotWrite(f"the folder {output.parent} of --output is not there; make it first")
    folder = output.is_dir() and output.suffix not in (".json", ".safetensors")
    # A folder with nothing but its lock is what a run that earned nothing leaves.
    if any(path.name != ".lock" for path in output.iterdir()) if folder else output.exists():
        raise CannotWrite(f"--output {output} is already there; name another, or remove it first")


@contextmanager
def _policy(
    text: str, events: "EventLog | None"
) -> "Iterator[GymPolicy | Literal['hint', 'random']]":
    if text in POLICIES:
        yield POLICIES[text]
        return
    from batchwright.calls import Pool
    from batchwright.calls.endpoints import parse_model
    from batchwright.streaming.gym import ModelPolicy

    try:
        endpoint, model = parse_model(text)
    except ConfigError as error:
        raise ConfigError(f"--policy must be hint, random or a model: {error}") from None
    with Pool(endpoint, events=events) as pool:
        yield ModelPolicy(pool, model)


def _fill(
    stream: "MockGymStream | GymEpisodeStream",
    buffer: "ReplayBuffer",
    num_episodes: int | None,
    max_samples: int | None,
    output: Path | None,
    record: EpisodeRecord | None,
    quiet: bool,
    format: str,
) -> None:
    """Take samples until there are enough; whatever ends it, what was earned is saved."""
    stop = _Stop()
    # SIGTERM as Ctrl-C: what was earned is saved as well when the machine shuts down.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    by_difficulty = [[0, 0] for _ in range(BINS)]
    try:
        try:
            with (
                progress_bar("samples" if num_episodes is None else "episodes", quiet) as progress,
                _saved_often(buffer, output) as add,
            ):
                for count, sample in enumerate(stop.between(stream), start=1):
                    add(sample)
                    if record is not None:
                        record.add(sample)
                    if sample.step_index == (sample.total_steps or 0) - 1:
                        part = by_difficulty[min(int((sample.difficulty or 0) * BINS), BINS - 1)]
                        part[0] += 1
                        part[1] += bool(sample.success)
                    if progress is not None:
                        done = count if num_episodes is None else _episodes(stream)["episodes"]
                        progress(done, num_episodes or max_samples or 0, _note(by_difficulty))
                    if count == max_samples:
                        break
        except BaseException:
            if len(buffer):
                _save(stream, buffer, by_difficulty, output, format)
            raise
        _save(stream, buffer, by_difficulty, output, format)
        stop.check()
    except KeyboardInterrupt:
        if stop.number != signal.SIGTERM:
            raise
        say("stopped", err=True)
        # As of a command that SIGTERM ends by itself.
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        if record is not None:
            record.flush()
        for number, handler in before.items():
            # Once stopped, the command ends by itself, with the code of the first signal.
            signal.signal(number, signal.SIG_IGN if stop.number else handler)


class _Stop:
    """Handler of signals: the first one stops the wait for a sample, never a save."""

    number = 0
    _waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            if self._waiting:
                raise KeyboardInterrupt

    def check(self) -> None:
        if self.number:
            raise KeyboardInterrupt

    def between(self, stream: "MockGymStream | GymEpisodeStream") -> "Iterator[StreamSample]":
        """The samples of a stream, until a signal comes."""
        samples = iter(stream)
        while True:
            self._waiting = True
            self.check()
            sample = next(samples, None)
            self._waiting = False
            if sample is None:
                return
            yield sample


@contextmanager
def _saved_often(
    buffer: "ReplayBuffer", output: Path | None
) -> "Iterator[Callable[[StreamSample], None]]":
    """Adds samples to a buffer that is saved every few seconds if it goes to a folder."""
    lock, over = threading.Lock(), threading.Event()
    failed: list[BatchwrightError] = []

    def add(sample: "StreamSample") -> None:
        with lock:
            if failed:
                raise failed[0]
            buffer.add(sample)

    def save(folder: Path) -> None:
        saved = 0
        while not over.wait(SAVE_EVERY_S):
            with lock:
                try:
                    if buffer.total_added != saved:
                        buffer.save(folder)
                        saved = buffer.total_added
                except BatchwrightError as error:
                    failed.append(error)
                    return

    if output is None or output.suffix in (".json", ".safetensors"):
        yield add
        return
    thread = threading.Thread(target=save, args=(output,), daemon=True)
    thread.start()
    try:
        yield add
    finally:
        over.set()
        thread.join()


def _episodes(stream: "MockGymStream | GymEpisodeStream") -> dict[str, int]:
    metrics = stream.metrics
    counts = {"success": metrics.episodes_successful, "failure": metrics.episodes_failed}
    counts |= getattr(stream, "status_counts", {})
    counts = {name: counts.get(name, 0) for name in ("success", "failure", "timeout", "error")}
    return {"episodes": sum(counts.values()), **counts}


def _note(by_difficulty: list[list[int]]) -> str:
    played = sum(episodes for episodes, _ in by_difficulty)
    if not played:
        return ""
    parts = [
        f"{k / BINS:.1f}+ {solved / episodes:.0%}"
        for k, (episodes, solved) in enumerate(by_difficulty)
        if episodes
    ]
    return f"solved {sum(s for _, s in by_difficulty) / played:.0%}: {', '.join(parts)}"


def _save(
    stream: "MockGymStream | GymEpisodeStream",
    buffer: "ReplayBuffer",
    by_difficulty: list[list[int]],
    output: Path | None,
    format: str,
) -> None:
    """Write the buffer and print what it was made of."""
    from batchwright.report.text import percent, table

    if output is not None:
        buffer.save(output)
    counts, metrics = _episodes(stream), stream.metrics
    parts: list[dict[str, Any]] = [
        {"low": k / BINS, "high": (k + 1) / BINS, "episodes": episodes, "solved": solved}
        for k, (episodes, solved) in enumerate(by_difficulty)
        if episodes
    ]
    data: dict[str, Any] = {
        **counts,
        "unscored": getattr(stream, "unscored", 0),
        "lost": getattr(stream, "lost", 0),
        "last_error": getattr(stream, "last_error", "") or None,
        "metrics": metrics.to_dict(),
        "by_difficulty": parts,
        "buffer": {
            "size": len(buffer),
            "max_size": buffer.config.max_size,
            "evicted": buffer.total_evicted,
            "path": None if output is None else str(output),
        },
    }
    reward = "-" if metrics.mean_reward is None else f"{metrics.mean_reward:.3f}"
    lines = [
        f"{count_of(counts['episodes'], 'episode')}: {counts['success']:,} solved, "
        f"{counts['failure']:,} failed, {counts['timeout']:,} timed out, "
        f"{count_of(counts['error'], 'error')}",
        f"{count_of(metrics.samples_produced, 'sample')}, "
        f"{count_of(metrics.total_tokens, 'token')} "
        f"({metrics.loss_tokens:,} with loss), mean reward {reward}",
    ]
    if data["unscored"]:
        lines.append(f"{data['unscored']:,} malformed moves that the server does not score")
    if data["lost"]:
        lines.append(f"{count_of(data['lost'], 'episode')} lost with their actor and played again")
    if data["last_error"]:
        lines.append(f"last error: {data['last_error']}")
    if parts:
        rows = [
            [
                f"{p['low']:.1f} to {p['high']:.1f}",
                p["episodes"],
                percent(p["solved"] / p["episodes"]),
            ]
            for p in parts
        ]
        lines.append(table(["difficulty", "episodes", "solved"], rows))
    where = "not saved (no --output)" if output is None else f"saved to {output}"
    held = count_of(len(buffer), "sample")
    lines.append(f"buffer: {held}, {buffer.total_evicted:,} evicted, {where}")
    show(data, "\n".join(lines), format)
