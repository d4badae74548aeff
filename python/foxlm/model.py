"""Language models, run by fox's own engine: no PyTorch needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np

from . import _core
from ._arrays import describe_numpy
from ._ids import IdBatch, Ids, count, flat, sequence
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Floats = np.ndarray[Any, np.dtype[np.float32]]


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen; see `Model.stream`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop_ids: Sequence[int]


class Model:
    """A model of any family that fox knows: FoX, Transformer, DeltaNet, HGRN2, Mamba-2 and others."""

    def __init__(self, core: _core.Model, folder: str | os.PathLike[str]):
        self._core, self.folder = core, folder
        self._tokenizer: Tokenizer | None = None
        self.vocab_size, self.hidden_size, self.num_layers, self.num_parameters = core.sizes()

    @staticmethod
    def load(
        folder: str | os.PathLike[str], device: str = "auto", dtype: str | None = None, cache_bytes: int = 1 << 30
    ) -> Model:
        """Reads a checkpoint folder (config.json and safetensors).

        Args:
            folder: of the official FoX repository, of flash-linear-attention, of Hugging Face (LLaMA, Mistral, Qwen),
                or written by fox.
            device: "cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one.
            dtype: "float32", or on a GPU "bfloat16", which is the default there.
            cache_bytes: the most that the caches of running generations may take together.
        """
        if device == "auto":
            device = "cuda" if _core.Model.has_gpu() else "cpu"
        names = {"float32": "f32", "bfloat16": "bf16", None: "f32" if device == "cpu" else "bf16"}
        if dtype not in names:
            raise ValueError(f"dtype is {dtype}; use float32 or bfloat16")
        cache_bytes = count("cache_bytes", cache_bytes, least=1)
        return Model(_core.Model.load(os.fsdecode(folder), device, names[dtype], cache_bytes), folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint, read when it is first used."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self.folder)
        return self._tokenizer

    def _prompt(self, prompt: str | Ids) -> list[int]:
        return sequence(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, self.vocab_size)

    def logits(self, ids: Ids) -> Floats:
        """Logits after every token of one sequence: ids `[T]` to float32 `[T, V]`."""
        ids = sequence(ids, self.vocab_size)
        out = np.empty((1, len(ids), self.vocab_size), np.float32)
        self._core.logits(ids, describe_numpy(out))
        return out[0]

    def logprobs(self, ids: Ids | IdBatch) -> Floats:
        """Log-probability of every token given those before it: ids `[T]` or `[B, T]` to `[T - 1]` or `[B, T - 1]`."""
        ids = flat(ids, self.vocab_size)
        if ids.ndim not in (1, 2) or ids.size == 0 or ids.shape[-1] < 2:
            raise ValueError(f"ids have shape {list(ids.shape)}; they must be [T] or [B, T] with at least two tokens")
        rows = ids.reshape(-1, ids.shape[-1])
        found = self._core.logprobs(rows[:, :-1].ravel().tolist(), rows[:, 1:].ravel().tolist(), rows.shape[1] - 1)
        return np.asarray(found, np.float32).reshape(*ids.shape[:-1], ids.shape[-1] - 1)

    def loss(self, ids: Ids | IdBatch) -> float:
        """Mean cross-entropy of the tokens from the second on, in nats."""
        return float(-self.logprobs(ids).astype(np.float64).mean())

    def stream(
        self,
        prompt: str | Ids,
        max_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Iterator[tuple[int, float]]:
        """Tokens as they are generated: pairs of an id and its log-probability. Dropping the iterator ends the work.

        Args:
            prompt: a text, or ids `[T]`, at least one token.
            max_tokens: tokens to generate, at most.
            temperature: 0 takes the likeliest token.
            top_k, top_p, min_p: filters; 0, 1 and 0 keep all tokens.
            repetition_penalty: 1 changes nothing.
            seed: the same seed gives the same tokens.
            stop_ids: ids that end the answer; they are not part of it.
        """
        max_tokens, top_k = count("max_tokens", max_tokens), count("top_k", top_k)
        seed = count("seed", seed, 2**64 - 1)
        stop_ids = [count("an id of stop_ids", id, 2**31 - 1, -(2**31)) for id in stop_ids]
        return self._core.generate(
            self._prompt(prompt), max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop_ids
        )

    @overload
    def generate(self, prompt: str, max_tokens: int = 64, **options: Unpack[SamplingOptions]) -> str: ...
    @overload
    def generate(self, prompt: Ids, max_tokens: int = 64, **options: Unpack[SamplingOptions]) -> list[int]: ...
    def generate(
        self, prompt: str | Ids, max_tokens: int = 64, **options: Unpack[SamplingOptions]
    ) -> str | list[int]:
        """What `stream` gives, all at once, without the prompt: a text for a text, ids for ids."""
        (answer,) = self._answers([prompt], max_tokens, options)
        return answer

    @overload
    def generate_batch(
        self, prompts: Iterable[str], max_tokens: int = 64, **options: Unpack[SamplingOptions]
    ) -> list[str]: ...
    @overload
    def generate_batch(
        self, prompts: Iterable[Ids], max_tokens: int = 64, **options: Unpack[SamplingOptions]
    ) -> list[list[int]]: ...
    def generate_batch(
        self, prompts: Iterable[str] | Iterable[Ids], max_tokens: int = 64, **options: Unpack[SamplingOptions]
    ) -> list[str] | list[list[int]]:
        """As `generate` for several prompts of any lengths, which are computed together; each answer is the one that
        its prompt gets alone."""
        if isinstance(prompts, str):
            raise TypeError("prompts is a str; it must be a list of prompts")
        return self._answers(prompts, max_tokens, options)

    def _answers(self, prompts: Any, max_tokens: int, options: SamplingOptions) -> Any:
        # All are submitted before the first answer is read.
        given = [(isinstance(prompt, str), self._prompt(prompt)) for prompt in prompts]
        running = [self.stream(ids, max_tokens, **options) for _, ids in given]
        answers = [[token for token, _ in tokens] for tokens in running]
        return [
            self.tokenizer.decode(answer, after=ids) if text else answer for (text, ids), answer in zip(given, answers)
        ]

    def gates(self, ids: Ids) -> list[Floats | None]:
        """Forget gates of every layer: `[H, T]` from 0 to 1, None for a layer without."""
        layers = self._core.log_gates(sequence(ids, self.vocab_size))
        return [None if x is None else np.exp(np.asarray(x[1], np.float32).reshape(-1, x[0]).T) for x in layers]

    def attention(self, ids: Ids, layer: int) -> Floats:
        """Attention weights of a layer: `[H, T, T]`, row `i` over the keys that query `i` sees, adding up to 1."""
        ids, layer = sequence(ids, self.vocab_size), count("layer", layer)
        q, k, log_gates, (heads, kv_heads, dim, scale, window) = self._core.attention_operands(ids, layer)
        n = len(ids)
        q = np.asarray(q, np.float32).reshape(n, heads, dim).transpose(1, 0, 2)
        k = np.asarray(k, np.float32).reshape(n, kv_heads, dim).transpose(1, 2, 0)
        s = scale * (q @ np.repeat(k, heads // kv_heads, 0))
        if log_gates is not None:
            c = np.cumsum(np.asarray(log_gates, np.float64).reshape(n, heads).T, 1)
            s = s + (c[:, :, None] - c[:, None]).astype(np.float32)
        i, j = np.arange(n)[:, None], np.arange(n)[None]
        seen = (j <= i) & (i - j < (window or n))
        s = np.where(seen, s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def __repr__(self) -> str:
        return f"Model({self.num_parameters:,} parameters, {self.num_layers} layers, vocabulary {self.vocab_size})"
