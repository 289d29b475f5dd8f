"""How to reach a gym server, which puzzles to ask it for, and how long to wait for it."""

from enum import StrEnum

from pydantic import Field, model_validator

from batchwright.streaming.sample import StreamSettings

__all__ = ["GymConfig", "GymOutputMode", "GymTransport"]


class GymTransport(StrEnum):
    """What carries the lines."""

    TELNET = "telnet"
    """TCP with telnet negotiation, which is stripped."""
    TCP = "tcp"
    """Plain lines over TCP."""
    WEBSOCKET = "websocket"
    """Messages at ws://host:port/ws."""


class GymOutputMode(StrEnum):
    """How an observation is written into a prompt; on the wire it is always JSON."""

    NORMAL = "normal"
    """The board as the server draws it."""
    AGENT = "agent"
    """The board between marked lines."""
    JSON = "json"
    """The whole observation."""


class GymConfig(StreamSettings):
    """A gym server, what to play there and all deadlines, in seconds.

    >>> GymConfig().port, GymConfig(transport="tcp").transport.value
    (8023, 'tcp')
    """

    host: str = Field(default="localhost", min_length=1)
    port: int = Field(default=8023, ge=1, le=65535)
    transport: GymTransport = GymTransport.TELNET
    output_mode: GymOutputMode = GymOutputMode.JSON
    connect_timeout: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """For the connection and the server's greeting."""
    read_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """For the whole reply to a command, however slowly it drips in."""
    episode_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    puzzle_types: tuple[str, ...] | None = None
    """The puzzles to play; None: all that both the server and this client know."""
    difficulty_range: tuple[float, float] = (0.0, 1.0)
    max_steps: int = Field(default=200, ge=1)
    """An episode that is not solved after so many actions has failed."""
    max_retries: int = Field(default=3, ge=0)
    """Failures in a row on one connection before the stream gives up."""
    retry_delay: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Wait before the first retry; doubles with each failure in a row, up to a minute."""

    @model_validator(mode="after")
    def _possible(self) -> "GymConfig":
        low, high = self.difficulty_range
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"difficulty_range must ascend within 0 to 1, got ({low}, {high})")
        if self.puzzle_types is not None and not self.puzzle_types:
            raise ValueError("puzzle_types is empty; name a puzzle, or give None for all")
        return self

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
