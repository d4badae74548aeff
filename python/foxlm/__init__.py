"""Forgetting attention, recurrent scans and FoX language models, computed by fox.

Works on NumPy arrays, and on PyTorch tensors where PyTorch is installed. `import foxlm` does not import PyTorch;
`foxlm.hf` is the Hugging Face model and needs transformers.
"""

from ._attention import forgetting_attention, forgetting_attention_backward
from ._core import __version__, cuda_memory, set_threads, threads
from ._fla_attention import attn_decoding_one_step, parallel_attn, parallel_forgetting_attn, token_shift
from .kda import chunk_kda, fused_kda_gate, fused_recurrent_kda
from .mamba import mamba_chunk_scan_combined
from .model import Model
from .path_attn import parallel_path_attn
from .scans import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_simple_gla,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
)
from .tokenizer import Tokenizer
from .wall_attn import build_wall_kv_cache, parallel_wall_attn, parallel_wall_attn_decode

__all__ = [
    "Model",
    "Tokenizer",
    "attn_decoding_one_step",
    "build_wall_kv_cache",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_simple_gla",
    "cuda_memory",
    "forgetting_attention",
    "forgetting_attention_backward",
    "fused_kda_gate",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_simple_gla",
    "mamba_chunk_scan_combined",
    "parallel_attn",
    "parallel_forgetting_attn",
    "parallel_path_attn",
    "parallel_wall_attn",
    "parallel_wall_attn_decode",
    "set_threads",
    "threads",
    "token_shift",
    "__version__",
]
