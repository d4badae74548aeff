//! The published configurations by name.

use super::ModelConfig;
use crate::mixers::Architecture;

/// A published configuration.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Its name, e.g. `fox-pro-125m`.
    pub name: &'static str,
    architecture: Architecture,
    /// Width, blocks, heads.
    sizes: (usize, usize, usize),
}

impl Preset {
    /// The published models of all families.
    pub fn all() -> Vec<Preset> {
        let presets = |architecture: Architecture| {
            architecture.published.iter().map(move |&(name, width, layers, heads)| Preset {
                name,
                architecture,
                sizes: (width, layers, heads),
            })
        };
        Architecture::all().into_iter().flat_map(presets).collect()
    }

    /// The names of all of them, for messages.
    pub fn names() -> String {
        let names: Vec<&str> = Self::all().iter().map(|preset| preset.name).collect();
        names.join(", ")
    }

    /// The preset of this name; `_` and `-` are alike, and so are capitals and small letters.
    pub fn by_name(name: &str) -> Option<Preset> {
        let wanted = name.to_ascii_lowercase().replace('_', "-");
        Self::all().into_iter().find(|preset| preset.name == wanted)
    }

    /// Its configuration.
    pub fn config(&self) -> ModelConfig {
        let (width, layers, heads) = self.sizes;
        self.architecture.config(width, layers, heads)
    }
}
