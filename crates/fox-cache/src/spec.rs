//! Descriptions of decode states, from which caches are built.

use fox_tensor::{AttentionWeights, DType, Device, PAGE, PageShape};

/// The decode state of one layer, per sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum StateSpec {
    /// Keys, values and log gates of all tokens that are not evicted.
    Attention(AttentionStateSpec),
    /// A state whose size does not depend on the number of tokens.
    Recurrent(RecurrentStateSpec),
    /// Closed blocks of keys, and the rows of the tokens after them.
    Blocks(BlockStateSpec),
}

/// The decode state of an attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionStateSpec {
    /// Query heads `H`.
    pub heads: usize,
    /// Key heads `H_kv`.
    pub kv_heads: usize,
    /// Width of a head `d`.
    pub head_dim: usize,
    /// Whether every query head has log gates.
    pub gated: bool,
    /// Whether a key depends on the raw key projection of the token before.
    pub k_shift: bool,
    /// Whether a value depends on the raw value projection of the token before.
    pub v_shift: bool,
    /// Sliding window: the keys that a query sees, its own included.
    pub window: Option<usize>,
    /// How scores become weights.
    pub weights: AttentionWeights,
    /// Values per key and key head of the transition between keys, e.g. a reflection; 0 without.
    pub transition: usize,
    /// A short convolution in front of the transitions.
    pub conv: Option<ConvStateSpec>,
}

/// Sizes of the decode state of a recurrent layer, per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecurrentStateSpec {
    /// The short convolutions.
    pub convs: Vec<ConvStateSpec>,
    /// Elements of the states of all heads.
    pub scan: usize,
}

/// Sizes of the decode state of a layer with closed blocks of [`PAGE`] tokens, per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockStateSpec {
    /// Values of a token that is not in a closed block.
    pub row: usize,
    /// Values of a closed block.
    pub block: usize,
    /// Sliding window: the keys that a query sees, its own included.
    pub window: Option<usize>,
}

/// A short convolution, whose last `taps - 1` inputs are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvStateSpec {
    /// Channels.
    pub channels: usize,
    /// Taps, at least 1.
    pub taps: usize,
}

impl StateSpec {
    /// Values per token.
    pub fn values_per_token(&self) -> usize {
        match self {
            StateSpec::Attention(spec) => {
                let gates = if spec.gated { spec.heads } else { 0 };
                2 * spec.width() + spec.transitions() + gates
            }
            StateSpec::Recurrent(_) => 0,
            StateSpec::Blocks(spec) => spec.block.div_ceil(PAGE),
        }
    }

    /// Values per sequence, independent of its length.
    pub fn values_per_sequence(&self) -> usize {
        match self {
            StateSpec::Attention(spec) => {
                let conv = spec.conv_state().map_or(0, |conv| conv.values());
                spec.shifts() * spec.width() + conv
            }
            StateSpec::Recurrent(spec) => spec.values(),
            StateSpec::Blocks(spec) => PAGE * spec.row,
        }
    }
}

impl AttentionStateSpec {
    /// Width of a row of keys.
    pub fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// What pages of such a layer have in common.
    pub(crate) fn page_shape(&self) -> PageShape {
        let group = if self.gated { self.heads / self.kv_heads } else { 0 };
        let transition = self.transition;
        PageShape { kv_heads: self.kv_heads, head_dim: self.head_dim, group, transition }
    }

    /// Width of a row of transitions.
    pub fn transitions(&self) -> usize {
        self.kv_heads * self.transition
    }

    /// The state of the convolution.
    pub(crate) fn conv_state(&self) -> Option<RecurrentStateSpec> {
        self.conv.map(|conv| RecurrentStateSpec { convs: vec![conv], scan: 0 })
    }

    /// How many of keys and values are shifted.
    fn shifts(&self) -> usize {
        usize::from(self.k_shift) + usize::from(self.v_shift)
    }

    /// Bytes of the last raw projections of one sequence, those of the convolution included.
    pub(crate) fn last_bytes(&self, device: &Device) -> usize {
        let conv = self.conv_state().map_or(0, |conv| conv.bytes());
        self.shifts() * self.width() * device.backend().caps().activation_type.size() + conv
    }
}

impl BlockStateSpec {
    /// Bytes of a closed block at most: some tensors may have a narrower type than f32.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block * DType::F32.size()
    }

    /// Bytes of the rows that are not in closed blocks, of one sequence.
    pub(crate) fn open_bytes(&self) -> usize {
        PAGE * self.row * DType::F32.size()
    }
}

impl RecurrentStateSpec {
    /// Elements in all.
    fn values(&self) -> usize {
        let convs: usize = self.convs.iter().map(|conv| conv.channels * (conv.taps - 1)).sum();
        self.scan + convs
    }

    /// Bytes of one sequence.
    pub(crate) fn bytes(&self) -> usize {
        self.values() * DType::F32.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_count_gates_per_query_head() {
        let spec = AttentionStateSpec {
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            gated: true,
            k_shift: true,
            v_shift: false,
            window: None,
            weights: AttentionWeights::Softmax,
            transition: 0,
            conv: None,
        };
        let plain = AttentionStateSpec { gated: false, k_shift: false, ..spec.clone() };
        let values = |spec: AttentionStateSpec| {
            let spec = StateSpec::Attention(spec);
            (spec.values_per_token(), spec.values_per_sequence())
        };
        assert_eq!(values(spec), (2 * 2 * 8 + 4, 2 * 8));
        assert_eq!(values(plain), (2 * 2 * 8, 0));
    }
}
