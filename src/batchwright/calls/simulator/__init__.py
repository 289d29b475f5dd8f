"""A model server of known behaviour: a real one on loopback, whose responses cost nothing.

It speaks OpenAI's and Ollama's protocols, has a knee, a latency, rate limits and faults of your
choice, and counts the requests it gets.

    with Simulator(kind="queue", knee=60, latency_s=0.05).running() as url:
        ...                      # OpenAI under url + "/v1", Ollama under url
        url.stats()["finished"]
"""

from batchwright.calls.simulator.behaviour import FAULTS
from batchwright.calls.simulator.process import RunningSimulator, Simulator, running

__all__ = ["FAULTS", "RunningSimulator", "Simulator", "running"]
