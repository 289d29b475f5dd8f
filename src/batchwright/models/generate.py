"""Inference with transformers models: batched completions and embeddings."""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from batchwright import rng
from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.errors import BadFile, BatchwrightError, ConfigError, MissingFile, need, one_line
from batchwright.files import parse_json, read_regular
from batchwright.models import registry as models
from batchwright.models.folder import pretrained, refuse_adapter, tokenizer_in
from batchwright.models.request import ModelRequest
from batchwright.models.tiny import tiny

if TYPE_CHECKING:
    import torch

__all__ = ["Embedder", "Generator", "load"]

Answers = list[Mapping[str, Any] | str | Exception]

MAX_TOKENS = 512
"""Default of a completion; one that reaches it has the finish reason `length`."""

ROWS = 64
"""Texts embedded in one batch; more take memory and are no faster."""

PRINTABLE = range(33, 127)
"""The bytes `tiny` may generate: a random model would mostly give newlines and broken UTF-8."""

SETTINGS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def load(name: str | Path) -> "Generator | Embedder":
    """The model called `name`: `tiny`, `minilm`, or a folder as `save_pretrained` writes it."""
    torch = need("torch", extra="local")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, folder = str(name), Path(name)
    if text == "tiny":
        return Generator(tiny().to(device), load_tokenizer("bytes"), text, allowed=PRINTABLE)
    if text in models.EMBEDDERS:
        if models.find(text).path is None:
            raise MissingFile(f"{text} is not downloaded yet; run: batchwright models get {text}")
        folder = models.find(text).folder
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        names = ", ".join([*models.REGISTRY, *models.EMBEDDERS, "tiny"])
        raise MissingFile(
            f"no model at {folder}; name {names}, a GGUF file, or a folder with config.json, "
            f"tokenizer and weights"
        )
    if (folder / "modules.json").is_file():
        return Embedder(folder, text, device)
    tokenizer = tokenizer_in(folder, folder)
    model = pretrained(folder, dtype=torch.float32 if device == "cpu" else "auto")
    return Generator(model.to(device), tokenizer, text)


@dataclass(slots=True)
class _Row:
    """One completion in progress."""

    request: ModelRequest
    prompt: Sequence[int]
    limit: int
    temperature: float
    top_p: float
    top_k: int
    stops: tuple[str, ...]
    sampler: "np.random.Generator | None"
    """None for greedy decoding."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


class Generator:
    """A language model that completes a batch of chat or completion requests together.

    Rows are padded on the left and leave the batch as soon as they end. Each has its own
    temperature, limits, stop strings and random stream from its seed, so a completion does not
    depend on which requests share the batch, up to the rounding of larger matrix products.
    Unknown settings are refused, not ignored.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, name: str, allowed: Sequence[int] | None = None
    ) -> None:
        self.name = name
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._context: int = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        ends = model.generation_config.eos_token_id
        self._ends = {tokenizer.eos_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # A model may have more ids than its tokenizer has tokens.
        ids = range(tokenizer.vocab_size) if allowed is None else [*allowed, *self._ends]
        weight = model.get_output_embeddings().weight
        self._bias = weight.new_full((len(weight),), -math.inf)
        self._bias[list(ids)] = 0.0

    def __call__(self, requests: Sequence[ModelRequest]) -> Answers:
        rows: list[_Row | BatchwrightError] = []
        for request in requests:
            try:
                rows.append(self._row(request))
            except BatchwrightError as error:
                rows.append(error)
        live = [row for row in rows if isinstance(row, _Row)]
        if live:
            self._generate(live)
        return [_answer(row) if isinstance(row, _Row) else row for row in rows]

    def close(self) -> None:
        """Free the memory."""
        self._model = None

    def _row(self, request: ModelRequest) -> _Row:
        body = request.body
        if request.kind == "embed":
            raise ConfigError(f"{self.name} has no embeddings; use local:minilm")
        if request.kind == "respond":
            raise ConfigError(f"{self.name} has no Responses API; send a chat request")
        # `stream=False` and the like ask for the default.
        given = {name: v for name, v in body.items() if v is not None and v is not False}
        known = {"model", "messages", "prompt", "user", "n", *SETTINGS}
        if (other := sorted(set(given) - known)) or given.get("n", 1) != 1:
            seen = other[0] if other else f"n={given['n']}"
            raise ConfigError(
                f"{self.name} does not support {seen}; supported: {', '.join(SETTINGS)}"
            )
        encode = self._tokenizer.encode_batch
        if request.kind == "chat":
            text = self._tokenizer.chat.render(body["messages"], add_generation_prompt=True)
            prompt = encode([text], special=False)[0]
        else:
            if not isinstance(body["prompt"], str):
                raise ConfigError(f"{self.name} completes one text; give prompt as a string")
            prompt = encode([body["prompt"]], special=True)[0]
        room = self._context - len(prompt)
        if room < 1 or not len(prompt):
            raise ConfigError(
                f"the prompt has {len(prompt):,} tokens, {self.name} takes 1 to "
                f"{self._context - 1:,}; change the prompt"
            )
        limit = given.get("max_completion_tokens", given.get("max_tokens", MAX_TOKENS))
        temperature = _number(body, "temperature", 1.0, least=0.0)
        seed = given.get("seed")
        if seed is None:
            # The same draw of the same request gives the same completion; without a draw, each
            # is new.
            drawn = int.from_bytes(request.key[:8], "little")
            seed = secrets.randbits(63) if request.draw is None else drawn
        stop = given.get("stop", [])
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(one, str) and one for one in stops):
            raise ConfigError("stop must be a string or a list of strings, none of them empty")
        if not isinstance(limit, int) or limit < 1 or not isinstance(seed, int):
            raise ConfigError("max_tokens and seed must be integers, max_tokens at least 1")
        return _Row(
            request=request,
            prompt=prompt,
            limit=min(limit, room),
            temperature=temperature,
            top_p=_number(body, "top_p", 1.0, least=0.0),
            top_k=int(_number(body, "top_k", 0, least=0)),
            stops=stops,
            sampler=rng.stream(seed, "sample") if temperature > 0 else None,
        )

    def _generate(self, rows: list[_Row]) -> None:
        import torch

        device = self._model.device
        width = max(len(row.prompt) for row in rows)
        ids_BT = np.full((len(rows), width), self._tokenizer.pad_id, np.int64)
        mask_BT = np.zeros((len(rows), width), np.int64)
        for number, row in enumerate(rows):
            ids_BT[number, width - len(row.prompt) :] = row.prompt
            mask_BT[number, width - len(row.prompt) :] = 1
        ids = torch.from_numpy(ids_BT).to(device)
        mask = torch.from_numpy(mask_BT).to(device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = None
        with torch.inference_mode():
            while rows:
                out = self._model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                chosen = _choose((out.logits[:, -1] + self._bias).double(), rows)
                live = [n for n, row in enumerate(rows) if not self._ended(row, chosen[n])]
                if len(live) < len(rows):
                    rows = [rows[n] for n in live]
                    if not rows:
                        break
                    keep = torch.tensor(live, device=device)
                    cache.batch_select_indices(keep)
                    mask = mask[keep]
                ids = torch.tensor([[row.ids[-1]] for row in rows], device=device)
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
                positions = mask.sum(1, keepdim=True) - 1

    def _ended(self, row: _Row, id: int) -> bool:
        """Whether this token ends the row; if so, its text and finish reason are set."""
        row.ids.append(id)
        end = id in self._ends
        if end or len(row.ids) >= row.limit:
            row.finish = "stop" if end else "length"
        if row.finish or row.stops:
            row.text = self._tokenizer.decode(row.ids[:-1] if end else row.ids)
        cuts = [place for stop in row.stops if (place := row.text.find(stop)) >= 0]
        if cuts:
            row.text, row.finish = row.text[: min(cuts)], "stop"
        return row.finish is not None


def _choose(logits_BV: "torch.Tensor", rows: Sequence[_Row]) -> list[int]:
    """The next token of each row: the most likely, or one sampled with the row's own generator."""
    import torch

    chosen: list[int] = logits_BV.argmax(1).tolist()
    sampling = [n for n, row in enumerate(rows) if row.sampler is not None]
    if not sampling:
        return chosen
    sampled = [rows[n] for n in sampling]
    column = logits_BV.new_tensor
    temperature = column([[row.temperature] for row in sampled])
    probs = (logits_BV[sampling] / temperature).softmax(1)
    if any(row.top_p < 1 or row.top_k for row in sampled):
        top_p = column([[row.top_p] for row in sampled])
        top_k = column([[row.top_k or probs.shape[1]] for row in sampled])
        descending, order = probs.sort(dim=1, descending=True, stable=True)
        before = descending.cumsum(1) - descending
        kept = (before < top_p) & (torch.arange(probs.shape[1], device=probs.device) < top_k)
        kept[:, 0] = True
        probs = probs * torch.zeros_like(kept).scatter(1, order, kept)
    # In the order of the ids: sorted by probability, two tokens close to a tie could swap.
    cumulative = probs.cumsum(1)
    points = column([[row.sampler.random()] for row in sampled if row.sampler])
    picks = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    for n, pick in zip(sampling, picks[:, 0].tolist(), strict=True):
        chosen[n] = min(pick, probs.shape[1] - 1)
    return chosen


def _answer(row: _Row) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": row.finish}
    chat = row.request.kind == "chat"
    if chat:
        choice["message"] = {"role": "assistant", "content": row.text}
    else:
        choice["text"] = row.text
    return {
        "object": "chat.completion" if chat else "text_completion",
        "model": row.request.model,
        "choices": [choice],
        "usage": _usage(len(row.prompt), len(row.ids)),
    }


def _usage(prompt: int, completion: int = 0) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


def _number(body: Mapping[str, Any], name: str, default: float, least: float) -> float:
    value = default if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ConfigError(f"{name} must be a number of at least {least:g}, got {value!r}")
    return float(value)


class Embedder:
    """A sentence embedder: mean pooling, normalised if its folder says so.

    A text longer than the model's limit is truncated, as sentence-transformers does; the usage
    counts the tokens that were read.
    """

    def __init__(self, folder: Path, name: str, device: str = "cpu") -> None:
        self.name = name
        pooling = _json(folder / "1_Pooling" / "config.json")
        if not pooling.get("pooling_mode_mean_tokens"):
            raise ConfigError(f"{folder} does not use mean pooling, the only one supported")
        parts = _json(folder / "modules.json")
        self._unit = any(part["type"].endswith("Normalize") for part in parts)
        self._tokenizer = load_tokenizer(folder.absolute())
        self._model = pretrained(folder, "AutoModel").to(device).eval()
        self._longest = int(_json(folder / "sentence_bert_config.json")["max_seq_length"])

    def __call__(self, requests: Sequence[ModelRequest]) -> Answers:
        refusals = [self._refusal(request) for request in requests]
        texts = [
            [] if refused else _texts(request)
            for request, refused in zip(requests, refusals, strict=True)
        ]
        rows = self._embed([text for several in texts for text in several])
        answers: Answers = []
        for request, refused, several in zip(requests, refusals, texts, strict=True):
            mine = [next(rows) for _ in several]
            answers.append(refused or _embedding(request, mine))
        return answers

    def close(self) -> None:
        """Free the memory."""
        self._model = None

    def _refusal(self, request: ModelRequest) -> ConfigError | None:
        if request.kind != "embed":
            return ConfigError(f"{self.name} only computes embeddings; use local:smollm2 for text")
        if not all(isinstance(text, str) for text in _texts(request)):
            return ConfigError("input must be a string or a list of strings")
        asked = {"encoding_format": "float", **request.body}
        if asked["encoding_format"] != "float" or "dimensions" in asked:
            return ConfigError(
                f"{self.name} supports encoding_format='float' and no dimensions only"
            )
        return None

    def _embed(self, texts: Sequence[str]) -> Iterator[tuple[list[float], int]]:
        """A vector and the number of tokens for each text, in order."""
        import torch

        encoded = self._tokenizer.encode_batch(texts, special=True)
        # The last special token must end a truncated text as well.
        cut = [
            ids if len(ids) <= self._longest else [*ids[: self._longest - 1], ids[-1]]
            for ids in encoded
        ]
        # Sorted by length, so that there is little padding.
        order = sorted(range(len(cut)), key=lambda n: len(cut[n]))
        vectors: dict[int, list[float]] = {}
        for start in range(0, len(order), ROWS):
            rows = order[start : start + ROWS]
            ids = np.full((len(rows), len(cut[rows[-1]])), self._tokenizer.pad_id, np.int64)
            mask = np.zeros_like(ids)
            for number, row in enumerate(rows):
                ids[number, : len(cut[row])] = cut[row]
                mask[number, : len(cut[row])] = 1
            device = self._model.device
            shown = torch.from_numpy(mask).to(device)
            with torch.inference_mode():
                out = self._model(input_ids=torch.from_numpy(ids).to(device), attention_mask=shown)
                states_BTD = out.last_hidden_state.float() * shown[:, :, None]
                mean_BD = states_BTD.sum(1) / shown.sum(1, keepdim=True)
                if self._unit:
                    mean_BD = torch.nn.functional.normalize(mean_BD, dim=1)
            vectors.update(zip(rows, mean_BD.tolist(), strict=True))
        return ((vectors[n], len(cut[n])) for n in range(len(cut)))


def _texts(request: ModelRequest) -> list[Any]:
    given = request.body.get("input")
    return list(given) if isinstance(given, list | tuple) else [given]


def _embedding(request: ModelRequest, rows: Sequence[tuple[list[float], int]]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, (vector, _) in enumerate(rows)
    ]
    usage = _usage(sum(tokens for _, tokens in rows))
    return {"object": "list", "model": request.model, "data": data, "usage": usage}


def _json(path: Path) -> Any:
    try:
        return parse_json(read_regular(path))
    except (FileNotFoundError, ValueError) as error:
        raise BadFile(f"{path} cannot be read: {one_line(error)}; get the model again") from None
