//! The families of mixers that files can name: [`BUILT_IN`] and registered ones.

use std::fmt;
use std::sync::{PoisonError, RwLock};

use super::{BUILT_IN, FileFormat};
use crate::config::ModelConfig;
use crate::{Error, Result};

/// A family of mixers: the file formats it is stored in, and the architectures that are built by name.
///
/// Formats may also be for a configuration that has others already: that is how a layout is added from
/// outside.
#[derive(Clone, Copy)]
pub struct MixerFamily {
    /// Name in messages, e.g. `attention`.
    pub name: &'static str,
    /// Its file formats, the one to prefer for storing first. At least one.
    pub formats: &'static [&'static dyn FileFormat],
    /// Models that are built by name.
    pub architectures: &'static [Architecture],
}

/// A kind of model that is built from three sizes.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// Its name, e.g. `fox-pro`.
    pub name: &'static str,
    /// Builds a model of a width, a number of blocks and a number of heads.
    pub build: fn(usize, usize, usize) -> ModelConfig,
    /// Published models: name, width, blocks, heads.
    pub published: &'static [(&'static str, usize, usize, usize)],
}

static REGISTERED: RwLock<Vec<&'static MixerFamily>> = RwLock::new(Vec::new());

/// Adds a family from outside of this crate, so that its models can be read, trained, stored and named. A
/// family that is registered already stays as it is.
///
/// # Errors
/// A family without a file format, or with a `model_type` or an architecture that another one has.
pub fn register(family: &'static MixerFamily) -> Result<()> {
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if BUILT_IN.iter().chain(registered.iter()).any(|known| std::ptr::eq(*known, family)) {
        return Ok(());
    }
    if family.formats.is_empty() {
        return Err(Error::Argument(format!(
            "the mixers of {} have no file format; give the family at least one",
            family.name
        )));
    }
    for known in BUILT_IN.iter().chain(registered.iter()) {
        if let Some(name) = common_name(family, known) {
            return Err(Error::Argument(format!(
                "`{name}` of {} is a name that {} has already; choose another",
                family.name, known.name
            )));
        }
    }
    registered.push(family);
    Ok(())
}

/// All families, the built-in ones first.
pub fn families() -> Vec<&'static MixerFamily> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    BUILT_IN.iter().chain(registered.iter()).copied().collect()
}

/// A `model_type` or an architecture that two families have.
fn common_name(a: &MixerFamily, b: &MixerFamily) -> Option<&'static str> {
    let types = |family: &MixerFamily| family.formats.iter().map(|f| f.model_type()).collect();
    let architectures =
        |family: &MixerFamily| family.architectures.iter().map(|a| a.name).collect();
    let common = |a: Vec<&'static str>, b: Vec<&str>| a.into_iter().find(|name| b.contains(name));
    common(types(a), types(b)).or_else(|| common(architectures(a), architectures(b)))
}

impl Architecture {
    /// All architectures of all families.
    pub fn all() -> Vec<Architecture> {
        families().iter().flat_map(|family| family.architectures).copied().collect()
    }

    /// A model of this width, number of blocks and number of heads.
    pub fn config(&self, width: usize, layers: usize, heads: usize) -> ModelConfig {
        (self.build)(width, layers, heads)
    }

    /// The architecture of this name.
    pub fn by_name(name: &str) -> Option<Architecture> {
        Self::all().into_iter().find(|architecture| architecture.name == name)
    }
}

impl fmt::Debug for MixerFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MixerFamily").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_names_are_unique() {
        for (i, family) in BUILT_IN.iter().enumerate() {
            for other in &BUILT_IN[..i] {
                assert_eq!(common_name(family, other), None);
            }
        }
    }

    #[test]
    fn registering_twice_is_idempotent_and_names_are_unique() {
        static EMPTY: MixerFamily =
            MixerFamily { name: "nothing", formats: &[], architectures: &[] };
        let error = register(&EMPTY).unwrap_err().to_string();
        assert_eq!(
            error,
            "the mixers of nothing have no file format; give the family at least one"
        );
        static TWIN: MixerFamily = MixerFamily { name: "twin", ..*BUILT_IN[1] };
        let error = register(&TWIN).unwrap_err().to_string();
        assert_eq!(
            error,
            "`delta_net-project_fox` of twin is a name that the delta rule has already; choose another"
        );
        register(BUILT_IN[0]).unwrap();
        assert_eq!(families().len(), BUILT_IN.len());
    }
}
