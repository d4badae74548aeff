//! Kinds of layers in a pattern.

use std::fmt;

/// The kind of a layer, by its name in a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// `fox`: attention with the forget gate that the options name.
    Fox,
    /// `attention`: the same layer with RoPE and without a forget gate.
    Attention,
    /// `window:N`: the same over the last `N` tokens.
    Window(usize),
    /// `path`: PaTH attention, with as many heads.
    Path,
    /// `path-fox`: PaTH attention with forget gates.
    PathFox,
    /// `gated-delta-net`.
    GatedDeltaNet,
    /// `kda`.
    Kda,
    /// `wall`.
    Wall,
    /// `mamba2`.
    Mamba2,
    /// `mamba1`.
    Mamba1,
}

impl LayerKind {
    /// All names, for messages.
    pub const NAMES: &'static str =
        "fox, attention, window:N, path, path-fox, gated-delta-net, kda, wall, mamba2, mamba1";

    /// The kind of this name.
    pub fn parse(name: &str) -> Option<LayerKind> {
        if let Some(length) = name.strip_prefix("window:") {
            return length.parse().ok().map(LayerKind::Window);
        }
        match name {
            "fox" => Some(LayerKind::Fox),
            "attention" => Some(LayerKind::Attention),
            "path" => Some(LayerKind::Path),
            "path-fox" => Some(LayerKind::PathFox),
            "gated-delta-net" => Some(LayerKind::GatedDeltaNet),
            "kda" => Some(LayerKind::Kda),
            "wall" => Some(LayerKind::Wall),
            "mamba2" => Some(LayerKind::Mamba2),
            "mamba1" => Some(LayerKind::Mamba1),
            _ => None,
        }
    }

    /// Whether it is attention of any kind.
    pub fn is_attention(self) -> bool {
        use LayerKind::{Attention, Fox, Path, PathFox, Wall, Window};
        matches!(self, Fox | Attention | Window(_) | Path | PathFox | Wall)
    }
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerKind::Fox => f.write_str("fox"),
            LayerKind::Attention => f.write_str("attention"),
            LayerKind::Window(length) => write!(f, "window:{length}"),
            LayerKind::Path => f.write_str("path"),
            LayerKind::PathFox => f.write_str("path-fox"),
            LayerKind::GatedDeltaNet => f.write_str("gated-delta-net"),
            LayerKind::Kda => f.write_str("kda"),
            LayerKind::Wall => f.write_str("wall"),
            LayerKind::Mamba2 => f.write_str("mamba2"),
            LayerKind::Mamba1 => f.write_str("mamba1"),
        }
    }
}
