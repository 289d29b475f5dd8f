"""`batchwright gym info`: the defaults, and what can be played."""

from typing import Any

from batchwright.cli.output import Format, show

__all__ = ["info"]


def info(*, format: Format = "text") -> None:
    """Show the default settings, the transports and modes, and the puzzles by server."""
    from batchwright.report.text import table
    from batchwright.streaming import ReplayBufferConfig
    from batchwright.streaming.gym import GymConfig, GymOutputMode, GymTransport
    from batchwright.streaming.gym.dialects import ARCADE_GAMES, PROTOCOL, VERSION
    from batchwright.streaming.gym.puzzles import PUZZLES

    data: dict[str, Any] = {
        "config": GymConfig().model_dump(mode="json"),
        "buffer": ReplayBufferConfig().model_dump(mode="json"),
        "transports": [one.value for one in GymTransport],
        "output_modes": [one.value for one in GymOutputMode],
        "policies": ["hint", "random", "a model"],
        "servers": {
            f"batchwright gym serve ({PROTOCOL} {VERSION})": list(PUZZLES),
            "chuk-puzzles-gym": list(ARCADE_GAMES),
        },
    }
    settings = [[name, _shown(value)] for name, value in data["config"].items()]
    buffer = [[f"buffer {name}", _shown(value)] for name, value in data["buffer"].items()]
    lists = [[name, ", ".join(data[name])] for name in ("transports", "output_modes", "policies")]
    servers = [[name, ", ".join(games)] for name, games in data["servers"].items()]
    parts = [
        table(["setting", "default"], settings + buffer),
        table(["choice", "values"], lists),
        table(["server", "puzzles"], servers),
    ]
    show(data, "\n\n".join(parts), format)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(str, value))
    return "all" if value is None else str(value)
