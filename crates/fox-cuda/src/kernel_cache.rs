//! Compiled kernels by source, entry and compile-time variant.
//!
//! A short launch takes the GPU less time than the host would need to format its defines and look the kernel up by them.
//! So the key is the value that the defines are made from, and only a miss formats them.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::launch::Kernel;
use crate::{Result, Source};

/// All variants of one entry.
type Variants<V> = Vec<(Box<dyn Any + Send + Sync>, Arc<V>)>;

/// Kernels, each compiled once. All variants of a source have one key type.
pub(crate) struct KernelCache<V = Kernel>(Mutex<HashMap<(Source, &'static str), Variants<V>>>);

impl<V> Default for KernelCache<V> {
    fn default() -> Self {
        KernelCache(Mutex::default())
    }
}

impl<V> KernelCache<V> {
    /// The kernel of this variant; `compile` is called on a miss.
    pub(crate) fn get<K: PartialEq + Send + Sync + 'static>(
        &self,
        source: Source,
        entry: &'static str,
        variant: K,
        compile: impl FnOnce(&K) -> Result<V>,
    ) -> Result<Arc<V>> {
        let mut kernels = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let variants = kernels.entry((source, entry)).or_default();
        let is_same = |known: &(Box<dyn Any + Send + Sync>, Arc<V>)| {
            known.0.downcast_ref::<K>() == Some(&variant)
        };
        if let Some((_, kernel)) = variants.iter().find(|known| is_same(known)) {
            return Ok(Arc::clone(kernel));
        }
        let kernel = Arc::new(compile(&variant)?);
        variants.push((Box::new(variant), Arc::clone(&kernel)));
        Ok(kernel)
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn every_source_entry_and_variant_is_compiled_once() {
        let source = |name| Source { name, text: "", headers: &[], params: &[] };
        let cache = KernelCache::<String>::default();
        let mut compiled = 0;
        let mut get = |name, entry, variant: usize| {
            let compile = |variant: &usize| {
                compiled += 1;
                Ok(format!("{name} {entry} {variant}"))
            };
            cache.get(source(name), entry, variant, compile).unwrap().to_string()
        };
        for _ in 0..2 {
            assert_eq!(get("norm", "forward", 1), "norm forward 1");
            assert_eq!(get("norm", "forward", 2), "norm forward 2");
            assert_eq!(get("norm", "backward", 1), "norm backward 1");
            assert_eq!(get("glu", "forward", 1), "glu forward 1");
        }
        assert_eq!(compiled, 4);
        let fails = |_: &usize| Err(Error::argument("test", "does not compile"));
        assert!(cache.get(source("glu"), "forward", 9, fails).is_err());
        assert!(cache.get(source("glu"), "forward", 9, |_| Ok(String::new())).is_ok());
    }
}
