"""Language models, run by fox's own engine: no PyTorch needed."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence

import numpy as np

from . import _core
from ._arrays import describe_numpy, is_tensor


def _flat(ids) -> np.ndarray:
    if is_tensor(ids):
        ids = ids.cpu().numpy()
    ids = np.asarray(ids)
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids are {ids.dtype}; they must be integers")
    return ids.astype(np.int64)


def _sequence(ids) -> list[int]:
    ids = _flat(ids)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"ids have shape {list(ids.shape)}; they must be one sequence of at least one id")
    return ids.tolist()


def _count(name: str, value, most: int = 2**63 - 1, least: int = 0) -> int:
    """An integer from `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; it must be from {least} to {most}")
    return number


class Model:
    """A model of any family that fox knows: FoX, Transformer, DeltaNet, HGRN2, Mamba-2 and others."""

    def __init__(self, core: _core.Model):
        self._core = core
        self.vocab_size, self.hidden_size, self.num_layers, self.num_parameters = core.sizes()

    @staticmethod
    def load(
        folder: str | os.PathLike, device: str = "auto", dtype: str | None = None, cache_bytes: int = 1 << 30
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
        cache_bytes = _count("cache_bytes", cache_bytes, least=1)
        return Model(_core.Model.load(os.fsdecode(folder), device, names[dtype], cache_bytes))

    def logits(self, ids) -> np.ndarray:
        """Logits after every token of one sequence: ids `[T]` to float32 `[T, V]`."""
        ids = _sequence(ids)
        out = np.empty((1, len(ids), self.vocab_size), np.float32)
        self._core.logits(ids, describe_numpy(out))
        return out[0]

    def logprobs(self, ids) -> np.ndarray:
        """Log-probability of every token given those before it: ids `[T]` or `[B, T]` to `[T - 1]` or `[B, T - 1]`."""
        ids = _flat(ids)
        if ids.ndim not in (1, 2) or ids.size == 0 or ids.shape[-1] < 2:
            raise ValueError(f"ids have shape {list(ids.shape)}; they must be [T] or [B, T] with at least two tokens")
        rows = ids.reshape(-1, ids.shape[-1])
        found = self._core.logprobs(rows[:, :-1].ravel().tolist(), rows[:, 1:].ravel().tolist(), rows.shape[1] - 1)
        return np.asarray(found, np.float32).reshape(*ids.shape[:-1], ids.shape[-1] - 1)

    def loss(self, ids) -> float:
        """Mean cross-entropy of the tokens from the second on, in nats."""
        return float(-self.logprobs(ids).astype(np.float64).mean())

    def stream(
        self,
        ids,
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
            ids: the prompt `[T]`, at least one token.
            max_tokens: tokens to generate, at most.
            temperature: 0 takes the likeliest token.
            top_k, top_p, min_p: filters; 0, 1 and 0 keep all tokens.
            repetition_penalty: 1 changes nothing.
            seed: the same seed gives the same tokens.
            stop_ids: ids that end the answer; they are not part of it.
        """
        max_tokens, top_k = _count("max_tokens", max_tokens), _count("top_k", top_k)
        seed = _count("seed", seed, 2**64 - 1)
        stop_ids = [_count("an id of stop_ids", id, 2**31 - 1, -(2**31)) for id in stop_ids]
        return self._core.generate(
            _sequence(ids), max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop_ids
        )

    def generate(self, ids, max_tokens: int = 64, **options) -> list[int]:
        """The tokens that `stream` gives, all at once, without the prompt."""
        return [token for token, _ in self.stream(ids, max_tokens, **options)]

    def gates(self, ids) -> list[np.ndarray | None]:
        """Forget gates of every layer: `[H, T]` from 0 to 1, None for a layer without."""
        layers = self._core.log_gates(_sequence(ids))
        return [None if x is None else np.exp(np.asarray(x[1], np.float32).reshape(-1, x[0]).T) for x in layers]

    def attention(self, ids, layer: int) -> np.ndarray:
        """Attention weights of a layer: `[H, T, T]`, row `i` over the keys that query `i` sees, adding up to 1."""
        ids, layer = _sequence(ids), _count("layer", layer)
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
