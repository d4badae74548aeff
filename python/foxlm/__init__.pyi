"""Types of the public functions; see the functions themselves for shapes and meaning."""

from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .model import Model as Model
from .path_attn import parallel_path_attn as parallel_path_attn
from .tokenizer import Tokenizer as Tokenizer
from .wall_attn import build_wall_kv_cache as build_wall_kv_cache
from .wall_attn import parallel_wall_attn as parallel_wall_attn
from .wall_attn import parallel_wall_attn_decode as parallel_wall_attn_decode

NumpyArray = np.ndarray[Any, Any]
Array = TypeVar("Array", NumpyArray, Tensor)
"""What goes in comes out."""

__version__: str

@overload
def forgetting_attention(
    q: Array,
    k: Array,
    v: Array,
    log_fgate: Array | None = None,
    *,
    head_first: bool = False,
    seq_start: Array | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: Literal["auto"] | float | Array | None = None,
    cu_seqlens: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    log_tolerance: float | None = None,
    return_lse: Literal[False] = False,
    sink_bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Array: ...
@overload
def forgetting_attention(
    q: Array,
    k: Array,
    v: Array,
    log_fgate: Array | None = None,
    *,
    head_first: bool = False,
    seq_start: Array | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: Literal["auto"] | float | Array | None = None,
    cu_seqlens: Array | None = None,
    window: int | None = None,
    causal: bool = True,
    log_tolerance: float | None = None,
    return_lse: Literal[True],
    sink_bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Array, Array]: ...
def forgetting_attention_backward(
    d_out: NumpyArray,
    q: NumpyArray,
    k: NumpyArray,
    v: NumpyArray,
    log_fgate: NumpyArray | None,
    o: NumpyArray,
    lse: NumpyArray,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    seq_start: NumpyArray | None = None,
    cu_seqlens: NumpyArray | None = None,
    log_tolerance: float | None = None,
    adaptive_threshold: Literal["auto"] | float | NumpyArray | None = None,
) -> tuple[NumpyArray, NumpyArray, NumpyArray, NumpyArray | None]: ...
def parallel_forgetting_attn(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Array | None = None,
    head_first: bool = False,
    *,
    sink_bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Array: ...
def parallel_attn(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    scale: float | None = None,
    window_size: int | None = None,
    cu_seqlens: Array | None = None,
    chunk_indices: Tensor | None = None,
    *,
    sink_bias: Tensor | None = None,
) -> Array: ...
def attn_decoding_one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    do_gate_scale: bool = False,
    *,
    sink_bias: Tensor | None = None,
) -> Tensor: ...
def token_shift(x: Tensor, prev_weight: Tensor, curr_weight: Tensor) -> Tensor: ...
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]: ...
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor | None]: ...
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]: ...
def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: Literal[False] = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: Literal[32, 64] = 64,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    *,
    return_intermediate_states: Literal[True],
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: Literal[32, 64] = 64,
) -> tuple[Tensor, Tensor | None, Tensor]: ...
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ...,
    *,
    return_final_states: Literal[False] = False,
    return_varlen_states: Literal[False] = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ...,
    *,
    return_final_states: Literal[True],
    return_varlen_states: Literal[False] = False,
    state_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ...,
    *,
    return_final_states: Literal[False] = False,
    return_varlen_states: Literal[True],
    state_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = ...,
    *,
    return_final_states: Literal[True],
    return_varlen_states: Literal[True],
    state_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def threads() -> int:
    """Number of threads that ops on the CPU use."""

def set_threads(count: int) -> None:
    """Sets the number of threads that ops on the CPU use; 0 for all cores."""

def cuda_memory() -> int:
    """Bytes of scratch memory that are held on GPUs, beside what PyTorch allocates."""
