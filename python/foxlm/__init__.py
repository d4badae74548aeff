"""Forgetting attention, recurrent scans and FoX language models, computed by fox.

Works on NumPy arrays, and on PyTorch tensors where PyTorch is installed. `import foxlm` does not import PyTorch;
`foxlm.hf` is the Hugging Face model and needs transformers.
"""

from ._attention import forgetting_attention, forgetting_attention_backward, parallel_forgetting_attn
from ._core import __version__, cuda_memory, set_threads, threads
from .model import Model
from .scans import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_simple_gla,
    mamba_chunk_scan_combined,
)

__all__ = [
    "Model",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_simple_gla",
    "cuda_memory",
    "forgetting_attention",
    "forgetting_attention_backward",
    "mamba_chunk_scan_combined",
    "parallel_forgetting_attn",
    "set_threads",
    "threads",
    "__version__",
]
