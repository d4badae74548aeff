"""The decode state of a model, as a cache of the library `transformers`."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

# Tokens back to which a layer with shifted keys or values can be cropped.
_CROPPABLE = 64
_RAW = ("raw_keys", "raw_values")


class FoxCacheLayer(DynamicLayer):
    """Keys and values `[B, Hk, N, d]`, log gates `[B, H, N]`, and the last raw projections `[B, n, D]` of shifted keys
    and values: of all tokens while the past is recorded, else of at most 64."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.record_past = False
        self._clear()

    def _clear(self):
        self.keys = self.values = self.log_gates = self.raw_keys = self.raw_values = None
        self.is_initialized = False

    def _tensors(self):
        named = ((name, getattr(self, name)) for name in ("keys", "values", "log_gates", *_RAW))
        return [(name, x) for name, x in named if x is not None]

    def update(self, key_states, value_states, extras=None, *_, **__):
        """Adds new positions; returns all keys and values. `extras` has log gates `[B, H, T]` and raw projections
        `[B, T, D]`, each None where the model has none."""
        extras = extras or {}
        join = lambda old, new, axis: new if old is None or new is None else torch.cat((old, new), axis)
        self.keys, self.values = join(self.keys, key_states, 2), join(self.values, value_states, 2)
        self.log_gates = join(self.log_gates, extras.get("log_gates"), 2)
        for name in _RAW:
            setattr(self, name, join(getattr(self, name), extras.get(name), 1))
        self._forget_raw()
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        return self.keys, self.values

    def set_prefix(self, keys, values, heads: int, raw_width: int):
        """Starts with keys and values that belong to no token: they are not forgotten by themselves."""
        rows, _, length = keys.shape[:3]
        raw = None if raw_width == 0 else keys.new_zeros(rows, 1, raw_width)
        gates = keys.new_zeros(rows, heads, length, dtype=torch.float32)
        self.update(keys, values, {"log_gates": gates, "raw_keys": raw, "raw_values": raw})

    def last_raw(self):
        """The raw projections of keys and values of the last token `[B, D]`, None where there are none."""
        return [None if x is None else x[:, -1] for x in (self.raw_keys, self.raw_values)]

    def activate_past_recording(self):
        """Keeps what `crop` needs until it is called."""
        self.record_past = True

    def _forget_raw(self):
        for name in _RAW:
            x = getattr(self, name)
            if x is not None and not self.record_past and x.shape[1] > _CROPPABLE + 1:
                setattr(self, name, x[:, -_CROPPABLE - 1 :].clone())

    def crop(self, tokens_to_remove: int) -> None:
        """Removes `-tokens_to_remove` tokens from the end; a positive number is the length that remains."""
        length = self.get_seq_length()
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(length - tokens_to_remove, 0)
        if removed >= length:
            return self._clear() if length else None
        if removed:
            for name in _RAW:
                x = getattr(self, name)
                if x is not None and x.shape[1] <= removed:
                    raise ValueError(
                        f"cannot remove {removed} tokens from the cache: shifted keys need the token before, and the "
                        f"last {x.shape[1]} are kept; call activate_past_recording before reading them"
                    )
                if x is not None:
                    setattr(self, name, x[:, :-removed])
            self.keys, self.values = self.keys[:, :, :-removed], self.values[:, :, :-removed]
            self.log_gates = None if self.log_gates is None else self.log_gates[:, :, :-removed]
        recording, self.record_past = self.record_past, False
        self._forget_raw()
        self.record_past = recording

    def reset(self) -> None:
        """Forgets everything."""
        self._clear()

    def reorder_cache(self, beam_idx) -> None:
        """Keeps these sequences, in this order."""
        for name, x in self._tensors():
            setattr(self, name, x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices) -> None:
        """Keeps these sequences."""
        for name, x in self._tensors():
            setattr(self, name, x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence."""
        for name, x in self._tensors():
            setattr(self, name, x.repeat_interleave(repeats, 0))


class FoxStaticLayer(StaticLayer):
    """The same in tensors of a fixed length, for compiled decoding: keys and values `[B, Hk, M, d]`, log gates
    `[B, H, M]`, and the raw projections `[B, 1, D]` of the last token."""

    def __init__(self, max_cache_len: int):
        super().__init__(max_cache_len)
        self.log_gates = self.raw_keys = self.raw_values = None
        # Whether `cumulative_length`, which compiled code may not read, is 0.
        self.empty = True

    def _tensors(self):
        named = (self.keys, self.values, self.log_gates, self.raw_keys, self.raw_values)
        return [x for x in named if x is not None]

    def _allocate(self, keys, values, extras):
        self.dtype, self.device = keys.dtype, keys.device
        self.max_batch_size = keys.shape[0]  # transformers 4.57 compares it before it uses a cache again
        wide = lambda x: x.new_zeros(*x.shape[:2], self.max_cache_len, *x.shape[3:])
        self.keys, self.values = wide(keys), wide(values)
        self.log_gates = None if extras["log_gates"] is None else wide(extras["log_gates"])
        self.raw_keys, self.raw_values = (
            None if extras[name] is None else torch.zeros_like(extras[name][:, -1:]) for name in _RAW
        )
        self.cumulative_length = torch.zeros((), dtype=torch.long, device=self.device)
        if not torch.compiler.is_compiling():
            for x in (*self._tensors(), self.cumulative_length):
                torch._dynamo.mark_static_address(x)
        self.is_initialized = True

    def update(self, key_states, value_states, extras=None, *_, **__):
        """As `FoxCacheLayer.update`; returns the tensors of all places."""
        extras = {**dict.fromkeys(("log_gates", *_RAW)), **(extras or {})}
        if not self.is_initialized:
            self._allocate(key_states, value_states, extras)
        time = key_states.shape[2]
        # A GPU, where reading the length waits, and compiled code only check the first tokens.
        countable = not self.empty and self.device.type == "cpu" and not torch.compiler.is_compiling()
        total = time + (int(self.cumulative_length) if countable else 0)
        if (self.empty or countable) and total > self.max_cache_len:
            raise ValueError(f"{total} tokens do not fit a static cache of {self.max_cache_len}; make a longer one")
        at = self.cumulative_length + torch.arange(time, device=self.device)
        self.cumulative_length.add_(time)
        for held, new in ((self.keys, key_states), (self.values, value_states), (self.log_gates, extras["log_gates"])):
            if held is not None:
                held.index_copy_(2, at, new.to(held.dtype))
        for name in _RAW:
            if extras[name] is not None:
                getattr(self, name).copy_(extras[name][:, -1:])
        self.empty = False
        return self.keys, self.values

    def last_raw(self):
        """The raw projections of keys and values of the last token `[B, D]`, None where there are none."""
        return [None if x is None else x[:, -1] for x in (self.raw_keys, self.raw_values)]

    def get_seq_length(self, *_):
        """How many places are filled: a tensor, or 0 before the first tokens."""
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, *_):
        """The length of a mask, and 0."""
        return self.max_cache_len, 0

    def reset(self) -> None:
        """Forgets everything, in the same memory."""
        for x in (*self._tensors(), *([self.cumulative_length] if self.is_initialized else [])):
            x.zero_()
        self.empty = True

    def reorder_cache(self, beam_idx) -> None:
        """Keeps these sequences, in this order."""
        for x in self._tensors():
            x.copy_(x.index_select(0, beam_idx.to(x.device)))


class FoxCache(DynamicCache):
    """The decode state of a model with this many layers."""

    def __init__(self, layers: int):
        Cache.__init__(self, layers=[FoxCacheLayer() for _ in range(layers)])


def adopt(cache, model, batch: int):
    """The given cache, with layers that hold log gates and raw projections of a batch of this size. One that is empty,
    or that holds keys and values of a prefix, is converted in place; one of another kind is refused."""
    layers, config = len(model.layers), model.config
    given = getattr(cache, "layers", None)
    static = isinstance(cache, StaticCache) and all(type(x) is StaticLayer for x in given)
    static = static and not any(int(x.get_seq_length()) for x in given)
    plain = given is not None and all(_is_fox(x) or type(x) is DynamicLayer for x in given)
    if not isinstance(cache, Cache) or not (static or plain):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} that cannot hold forget gates; use a DynamicCache, an empty "
            "StaticCache, or the model's FoxCache"
        )
    if len(given) > layers or (static and len(given) < layers):
        raise ValueError(f"past_key_values has {len(given)} layers, but the model {layers}; use a new cache")
    if static:
        given[:] = [FoxStaticLayer(x.max_cache_len) for x in given]
    elif len(given) < layers or not all(map(_is_fox, given)):
        given[:] = [_converted(x, config) for x in (*given, *[None] * (layers - len(given)))]
    held = given[0].keys
    if held is not None and held.shape[0] != batch:
        raise ValueError(f"past_key_values has {held.shape[0]} rows, but the input {batch}; use a new cache")
    return cache


def static_places(cache):
    """The number of places of a static cache; None for another one, or none."""
    static = cache is not None and isinstance(cache.layers[0], FoxStaticLayer)
    return cache.layers[0].max_cache_len if static else None


def _is_fox(layer) -> bool:
    return isinstance(layer, (FoxCacheLayer, FoxStaticLayer))


def _converted(layer, config):
    if _is_fox(layer):
        return layer
    made = FoxCacheLayer()
    if layer is not None and layer.get_seq_length() > 0:
        shifts = config.use_k_shift or config.use_v_shift
        made.set_prefix(layer.keys, layer.values, config.num_heads, config.hidden_size if shifts else 0)
    return made
