"""Forgetting attention, recurrent scans and FoX language models, computed by fox.

Works on NumPy arrays, and on PyTorch tensors where PyTorch is installed. `import foxlm` does not import PyTorch.
"""

from ._attention import forgetting_attention, forgetting_attention_backward, parallel_forgetting_attn
from ._core import __version__, set_threads, threads

__all__ = [
    "forgetting_attention",
    "forgetting_attention_backward",
    "parallel_forgetting_attn",
    "set_threads",
    "threads",
    "__version__",
]
