"""A model server of known behaviour: a real one on loopback, whose answers cost nothing.

It speaks OpenAI's and Ollama's protocols, has a knee, a latency, rate limits and faults of your
choice, and counts what was asked of it.

    with Simulator(kind="queue", knee=60, latency_s=0.05).running() as url:
        ...                      # OpenAI under url + "/v1", Ollama under url
        url.stats()["finished"]
"""

from batchwright.calls.simulator.behaviour import FAULTS, Simulator
from batchwright.calls.simulator.process import RunningSimulator, running

__all__ = ["FAULTS", "RunningSimulator", "Simulator", "running"]
