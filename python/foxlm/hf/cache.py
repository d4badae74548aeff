"""What a model remembers of the tokens it has read."""

from __future__ import annotations

import torch


class FoxLayerCache:
    """What one layer remembers: keys, values `[B, N, Hk, d]`, log gates `[B, N, H]`, the last raw projections `[B,
    D]`."""

    def __init__(self):
        self.keys = self.values = self.log_gates = self.raw_key = self.raw_value = None

    def append(self, keys, values, log_gates):
        """Adds new positions; returns all."""
        join = lambda old, new: new if old is None or new is None else torch.cat((old, new), 1)
        self.keys, self.values = join(self.keys, keys), join(self.values, values)
        self.log_gates = join(self.log_gates, log_gates)
        return self.keys, self.values, self.log_gates

    def select(self, rows):
        """Keeps these sequences, in this order."""
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else x.index_select(0, rows.to(x.device)))


class FoxCache:
    """The decode state of a model. `generate` gets one from the model and hands it back."""

    is_compileable = False

    def __init__(self, layers: int):
        self.layers = [FoxLayerCache() for _ in range(layers)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that are remembered."""
        keys = self.layers[layer_idx].keys
        return 0 if keys is None else keys.shape[1]

    def get_max_cache_shape(self, *_):
        """No limit."""
        return None

    def reorder_cache(self, beam_idx):
        """For beam search."""
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices):
        """Keeps these sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int):
        """Repeats every sequence."""
        rows = self.layers[0].keys.shape[0]
        self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))
