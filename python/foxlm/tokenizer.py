"""Text to token ids and back, by fox: no other library needed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import _core
from ._ids import Ids, sequence


class Tokenizer:
    """A tokenizer: that of a checkpoint folder, or one of "bytes", "gpt2", "json-gpt2" and "synthetic"."""

    def __init__(self, core: _core.Tokenizer):
        self._core = core
        self.name, self.vocab_size, self.bos_id = core.facts()

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a checkpoint folder or of a `tokenizer.json`, or a built-in one by its name.

        Raises:
            ValueError: there is none, or it is one that the package was built without.
        """
        return Tokenizer(_core.Tokenizer.load(os.fsdecode(folder)))

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """The ids of a text, behind the id that begins every sequence."""
        ids = self._core.encode(text)
        return [self.bos_id, *ids] if add_bos else ids

    def decode(self, ids: Ids, after: Sequence[int] = ()) -> str:
        """The text of ids `[T]`, which follow the ids `after`."""
        ids = [] if len(ids) == 0 else sequence(ids, self.vocab_size)
        return self._core.decode(ids, list(after))

    def __repr__(self) -> str:
        return f"Tokenizer({self.name}, {self.vocab_size} ids)"
