//! Options of the recurrent baselines.

/// DeltaNet, and Gated DeltaNet when its state decays.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaConfig {
    /// Heads of queries and keys.
    pub heads: usize,
    /// Heads of values, each with a state; head `h` reads keys `h / (value_heads / heads)`.
    pub value_heads: usize,
    /// Width of a query and of a key `dk`.
    pub key_dim: usize,
    /// Width of a value `dv`.
    pub value_dim: usize,
    /// Taps of the short convolutions.
    pub conv_size: usize,
    /// Whether the output is gated by `silu(x Wg^T)`.
    pub output_gate: bool,
    /// Whether writes reach twice as far, so that a state may be turned around.
    pub negative_eigenvalues: bool,
    /// Whether the state decays, by Mamba-2's rule: Gated DeltaNet.
    pub decay: bool,
}

/// HGRN2.
#[derive(Clone, Debug, PartialEq)]
pub struct Hgrn2Config {
    /// Heads `H`.
    pub heads: usize,
    /// Width of a query and of a key `e`.
    pub expand_ratio: usize,
    /// Lower bounds of the forget gates.
    pub lower_bounds: LowerBounds,
    /// Epsilon of the output norm.
    pub output_norm_eps: f64,
}

/// What becomes of the table `model.lower_bounds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LowerBounds {
    /// There is none.
    None,
    /// It is stored, but without effect: the official checkpoints.
    Stored,
    /// Gates rise from layer to layer: flash-linear-attention.
    Used,
}

/// Mamba-2. Blocks have no MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    /// Heads `H`; `H * head_dim` is the inner width `E`.
    pub heads: usize,
    /// Width of a value.
    pub head_dim: usize,
    /// Width of a query and of a key `N`.
    pub state_size: usize,
    /// Heads of queries and keys `G`.
    pub groups: usize,
    /// Taps of the short convolution.
    pub conv_size: usize,
    /// Smallest and largest time step.
    pub time_step_limit: (f64, f64),
    /// Range of the initial time steps, and a floor under them.
    pub time_step_init: (f64, f64, f64),
    /// Whether the output is normalised before it is gated.
    pub norm_before_gate: bool,
}

impl Mamba2Config {
    /// The inner width `E`.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: values, keys and queries.
    pub fn conv_width(&self) -> usize {
        self.inner() + 2 * self.groups * self.state_size
    }
}

/// Sizes of the decode state of a recurrent layer, per sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecurrentShape {
    /// Channels and taps of each short convolution.
    pub convs: Vec<(usize, usize)>,
    /// Elements of the states of all heads.
    pub scan: usize,
}

impl RecurrentShape {
    /// Elements in all.
    pub fn len(&self) -> usize {
        self.scan + self.convs.iter().map(|(width, taps)| width * (taps - 1)).sum::<usize>()
    }
}

impl DeltaConfig {
    /// DeltaNet with square states, as published.
    pub fn delta_net(heads: usize, head_dim: usize) -> Self {
        DeltaConfig {
            heads,
            value_heads: heads,
            key_dim: head_dim,
            value_dim: head_dim,
            conv_size: 4,
            output_gate: false,
            negative_eigenvalues: false,
            decay: false,
        }
    }

    /// Gated DeltaNet with values twice as wide as keys and an output gate, as published.
    pub fn gated(heads: usize, head_dim: usize) -> Self {
        DeltaConfig {
            value_dim: 2 * head_dim,
            output_gate: true,
            decay: true,
            ..Self::delta_net(heads, head_dim)
        }
    }

    pub(crate) fn shape(&self) -> RecurrentShape {
        let (keys, values) = (self.heads * self.key_dim, self.value_heads * self.value_dim);
        RecurrentShape {
            convs: [keys, keys, values].map(|width| (width, self.conv_size)).to_vec(),
            scan: self.value_heads * self.key_dim * self.value_dim,
        }
    }
}

impl Hgrn2Config {
    pub(crate) fn shape(&self, hidden_size: usize) -> RecurrentShape {
        RecurrentShape { convs: Vec::new(), scan: self.expand_ratio * hidden_size }
    }
}

impl Mamba2Config {
    pub(crate) fn shape(&self) -> RecurrentShape {
        RecurrentShape {
            convs: vec![(self.conv_width(), self.conv_size)],
            scan: self.inner() * self.state_size,
        }
    }
}
