"""Models in transformers folders: whole batches of answers or vectors, each row its own."""

import json
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
from batchwright.models import registry as models
from batchwright.models.request import ModelRequest
from batchwright.models.tiny import tiny

if TYPE_CHECKING:
    import torch

__all__ = ["Embedder", "Generator", "load"]

Answers = list[Mapping[str, Any] | str | Exception]

MAX_TOKENS = 512
"""Of an answer, if the request names no limit; one that reaches it has the finish `length`."""

ROWS = 64
"""Texts that are embedded together; more of them gain nothing and take memory."""

PRINTABLE = range(33, 127)
"""Of all bytes, `tiny` says these: a random model would mostly say line ends and broken text."""

SETTINGS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def load(name: str | Path) -> "Generator | Embedder":
    """The model called `name`: `tiny`, `minilm`, or a folder as `save_pretrained` writes it."""
    torch = need("torch", extra="local")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, folder = str(name), Path(name)
    if text == "tiny":
        return Generator(tiny().to(device), load_tokenizer("bytes"), text, says=PRINTABLE)
    if text in models.EMBEDDERS:
        if models.find(text).path is None:
            raise MissingFile(f"{text} is not here yet; run: batchwright models get {text}")
        folder = models.find(text).folder
    if not (folder / "config.json").is_file():
        names = ", ".join([*models.REGISTRY, *models.EMBEDDERS, "tiny"])
        raise MissingFile(
            f"no model at {folder}; name {names}, a GGUF file, or a folder that holds "
            f"config.json, tokenizer and weights"
        )
    if (folder / "modules.json").is_file():
        return Embedder(folder, text, device)
    named = folder / "tokenizer_name.txt"
    tokenizer = load_tokenizer(named.read_text().strip() if named.is_file() else folder.absolute())
    dtype = torch.float32 if device == "cpu" else "auto"
    model = _pretrained("AutoModelForCausalLM", folder, dtype=dtype)
    return Generator(model.to(device), tokenizer, text)


@dataclass(slots=True)
class _Row:
    """One answer on its way."""

    request: ModelRequest
    prompt: Sequence[int]
    limit: int
    temperature: float
    top_p: float
    top_k: int
    stops: tuple[str, ...]
    chance: "np.random.Generator | None"
    """None if the likeliest token is taken."""
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


class Generator:
    """A language model that answers a batch of chat or completion requests together.

    Rows are padded on the left and leave the batch as soon as they end. Each has its own
    temperature, limits, stop strings and stream of random numbers from its seed, so an answer
    does not depend on which requests share the batch, as far as the processor's rounding of a
    larger product allows. Settings it does not know are refused, not ignored.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, name: str, says: Sequence[int] | None = None
    ) -> None:
        self.name = name
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._context: int = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        ends = model.generation_config.eos_token_id
        self._ends = {tokenizer.eos_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # A model may have more ids than its tokenizer has words.
        said = range(tokenizer.vocab_size) if says is None else [*says, *self._ends]
        weight = model.get_output_embeddings().weight
        self._bias = weight.new_full((len(weight),), -math.inf)
        self._bias[list(said)] = 0.0

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
        """Give the memory back."""
        self._model = None

    def _row(self, request: ModelRequest) -> _Row:
        body = request.body
        if request.kind == "embed":
            raise ConfigError(f"{self.name} gives no embeddings; use local:minilm")
        # `stream=False` and the like say what is the case anyway.
        given = {name: v for name, v in body.items() if v is not None and v is not False}
        known = {"model", "messages", "prompt", "user", "n", *SETTINGS}
        if (other := sorted(set(given) - known)) or given.get("n", 1) != 1:
            seen = other[0] if other else f"n={given['n']}"
            raise ConfigError(f"{self.name} does not know {seen}; it takes {', '.join(SETTINGS)}")
        encode = self._tokenizer.encode_batch
        if request.kind == "chat":
            text = self._tokenizer.render_chat(body["messages"], add_generation_prompt=True)
            prompt = encode([text], special=False)[0]
        else:
            if not isinstance(body["prompt"], str):
                raise ConfigError(f"{self.name} continues one text; give prompt as a string")
            prompt = encode([body["prompt"]], special=True)[0]
        room = self._context - len(prompt)
        if room < 1 or not len(prompt):
            raise ConfigError(
                f"the prompt has {len(prompt):,} tokens, and {self.name} takes 1 to "
                f"{self._context - 1:,}; change the prompt"
            )
        limit = given.get("max_completion_tokens", given.get("max_tokens", MAX_TOKENS))
        temperature = _number(body, "temperature", 1.0, least=0.0)
        seed = given.get("seed")
        if seed is None:
            # The same draw of the same request is the same answer; otherwise every one is new.
            drawn = int.from_bytes(request.key[:8], "little")
            seed = secrets.randbits(63) if request.draw is None else drawn
        stop = given.get("stop", [])
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(one, str) and one for one in stops):
            raise ConfigError("stop is not understood; give a string or a list of strings")
        if not isinstance(limit, int) or limit < 1 or not isinstance(seed, int):
            raise ConfigError("max_tokens and seed are whole numbers, max_tokens 1 or more")
        return _Row(
            request=request,
            prompt=prompt,
            limit=min(limit, room),
            temperature=temperature,
            top_p=_number(body, "top_p", 1.0, least=0.0),
            top_k=int(_number(body, "top_k", 0, least=0)),
            stops=stops,
            chance=rng.stream(seed, "sample") if temperature > 0 else None,
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
        """Whether the row is whole with this token; if so, its text and its finish are set."""
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
    """The next token of each row: the likeliest, or one drawn with the row's own chance."""
    import torch

    chosen: list[int] = logits_BV.argmax(1).tolist()
    drawing = [n for n, row in enumerate(rows) if row.chance is not None]
    if not drawing:
        return chosen
    drawn = [rows[n] for n in drawing]
    column = logits_BV.new_tensor
    warmth = column([[row.temperature] for row in drawn])
    odds = (logits_BV[drawing] / warmth).softmax(1)
    if any(row.top_p < 1 or row.top_k for row in drawn):
        top_p = column([[row.top_p] for row in drawn])
        top_k = column([[row.top_k or odds.shape[1]] for row in drawn])
        falling, order = odds.sort(dim=1, descending=True, stable=True)
        before = falling.cumsum(1) - falling
        kept = (before < top_p) & (torch.arange(odds.shape[1], device=odds.device) < top_k)
        kept[:, 0] = True
        odds = odds * torch.zeros_like(kept).scatter(1, order, kept)
    # In the order of the ids: sorted by odds, two tokens close to a tie could change places.
    heaps = odds.cumsum(1)
    points = column([[row.chance.random()] for row in drawn if row.chance])
    picks = torch.searchsorted(heaps, points * heaps[:, -1:], right=True)
    for n, pick in zip(drawing, picks[:, 0].tolist(), strict=True):
        chosen[n] = min(pick, odds.shape[1] - 1)
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
        raise ConfigError(f"{name} is not a number of {least:g} or more")
    return float(value)


class Embedder:
    """A sentence embedder: the mean over a text's tokens, of length 1 if its folder says so.

    A text longer than the model was made for is cut there, as sentence-transformers does; the
    usage counts the tokens that were read.
    """

    def __init__(self, folder: Path, name: str, device: str = "cpu") -> None:
        self.name = name
        pooling = _json(folder / "1_Pooling" / "config.json")
        if not pooling.get("pooling_mode_mean_tokens"):
            raise ConfigError(f"{folder} does not pool by the mean, the only way known here")
        parts = _json(folder / "modules.json")
        self._unit = any(part["type"].endswith("Normalize") for part in parts)
        self._tokenizer = load_tokenizer(folder.absolute())
        self._model = _pretrained("AutoModel", folder).to(device).eval()
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
        """Give the memory back."""
        self._model = None

    def _refusal(self, request: ModelRequest) -> ConfigError | None:
        if request.kind != "embed":
            return ConfigError(f"{self.name} gives embeddings only, no text; use local:smollm2")
        if not all(isinstance(text, str) for text in _texts(request)):
            return ConfigError("input is not understood; give a string or a list of strings")
        asked = {"encoding_format": "float", **request.body}
        if asked["encoding_format"] != "float" or "dimensions" in asked:
            return ConfigError(f"{self.name} gives plain numbers in its own dimensions only")
        return None

    def _embed(self, texts: Sequence[str]) -> Iterator[tuple[list[float], int]]:
        """A vector and the number of tokens for each text, in order."""
        import torch

        encoded = self._tokenizer.encode_batch(texts, special=True)
        # What ends every text must end a cut one as well.
        cut = [
            ids if len(ids) <= self._longest else [*ids[: self._longest - 1], ids[-1]]
            for ids in encoded
        ]
        # Texts of one length together, so that little is padding.
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
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadFile(f"{path} cannot be read: {one_line(error)}; get the model again") from None


def _pretrained(kind: str, folder: Path, **settings: Any) -> Any:
    transformers = need("transformers", extra="local")
    logs = transformers.utils.logging
    shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        model, report = getattr(transformers, kind).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **settings,
        )
    except Exception as error:  # the library raises nothing narrower for files it cannot read
        raise BadFile(
            f"{folder} cannot be loaded: {one_line(error)[:300]}; name the folder of another model"
        ) from error
    finally:
        if shown:
            logs.enable_progress_bar()
    # transformers would go on with random numbers in their place; the pooler has no use here.
    missing = [key for key in sorted(report["missing_keys"]) if "pooler." not in key]
    if missing:
        raise BadFile(f"{folder} lacks weights, {missing[0]} first; get the model again")
    return model
