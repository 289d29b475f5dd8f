"""The models and the reward of query mutation by name, as the functions that environments take."""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchwright.calls.endpoints import OLLAMA_NAME, Endpoint, parse_model
from batchwright.calls.outcome import Outcome
from batchwright.calls.pool import Pool
from batchwright.calls.request import chat
from batchwright.calls.simulator.ngrams import hashed_ngrams
from batchwright.calls.wire.discovery import check_model
from batchwright.envs.query_mutation.env import Ask, Rate, Score
from batchwright.envs.questions import Question, load_questions
from batchwright.errors import NoServer
from batchwright.rewards import Contains, Numeric, Response, Rule
from batchwright.rewards.score import ascore_all

__all__ = [
    "DIM",
    "SYSTEM",
    "ask_mutator",
    "ask_target",
    "check_server",
    "find_model",
    "hashed",
    "rate_by",
]

DIM = 256
"""Dimension of the built-in embedder."""
SYSTEM = "Answer the question with the answer alone, in as few words as possible."


def find_model(model: str, role: str, dataset: str) -> tuple[Endpoint, str]:
    """Where a model is, and its name there; `sim` is a simulated one that knows the data set.

    A plain name is a model of the Ollama server of this machine, or of OLLAMA_HOST.
    """
    if model == "sim":
        from batchwright.calls.simulator import Simulator

        server = Simulator(questions=load_questions(dataset, "all"))
        return Endpoint(server.in_process(), name="sim"), f"sim-{role}"
    return parse_model(f"ollama:{model}" if OLLAMA_NAME.fullmatch(model) else model)


async def check_server(endpoint: Endpoint, model: str) -> None:
    """Look for a model at its server; the error about one of Ollama says how to get it."""
    try:
        await check_model(endpoint, model)
    except NoServer as error:
        if endpoint.protocol != "ollama" or "is no Ollama" in str(error):
            raise
        way = (
            f"ollama pull {model} gets it"
            if "has no model" in str(error)
            else "ollama serve starts it, and OLLAMA_HOST holds another address"
        )
        raise NoServer(f"{error}; {way}; URL#{model} is a model of another server") from None


def ask_target(pool: Pool, model: str, max_tokens: int) -> Ask:
    """The target: it answers a wording in few words, always in the same ones."""

    async def ask(prompt: str, seed: int) -> Outcome:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        return await pool.call(chat(model, messages, temperature=0, max_tokens=max_tokens))

    return ask


def ask_mutator(pool: Pool, model: str, temperature: float, max_tokens: int) -> Ask:
    """The mutator: it rewrites as an operator's prompt says, in its own way for each seed."""

    async def ask(prompt: str, seed: int) -> Outcome:
        return await pool.call(
            chat(model, prompt, temperature=temperature, max_tokens=max_tokens, seed=seed)
        )

    return ask


def rate_by(rule: Rule | None = None, pool: Pool | None = None) -> Rate:
    """A score by a rule; None compares numbers by value and other answers as whole words."""

    async def rate(question: Question, wording: str, answer: str) -> Score:
        fitting = rule or (Numeric() if _is_number(question.answer) else Contains())
        response = Response(answer, question.answer, prompt=question.question)
        (reward,) = await ascore_all([response], [fitting], pool)
        if not reward.valid:
            return Score(float("nan"), f"reward_{reward.why}")
        return Score(max(0.0, reward.value))

    return rate


async def hashed(texts: Sequence[str]) -> NDArray[np.float32]:
    """The built-in embedder: hashed n-grams, no model."""
    return hashed_ngrams(texts, DIM)


def _is_number(answer: str) -> bool:
    return re.fullmatch(r"\s*[-+$]?[\d.,/]+\s*%?\s*", answer) is not None
