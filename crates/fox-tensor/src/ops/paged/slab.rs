//! Memory of pages.
//!
//! On devices whose allocations are slow, a slab holds many pages; elsewhere it is a single page.

use super::PAGE;
use crate::{Backend, DType, Device, Result, Tensor};

/// The shape of the pages of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head `d`.
    pub head_dim: usize,
    /// Gated query heads per key head; 0 without forget gates.
    pub group: usize,
    /// Values per key of the transition between keys, e.g. a reflection; 0 without.
    pub transition: usize,
}

impl PageShape {
    /// Bytes of one page of one head on a device.
    pub fn page_bytes(&self, backend: &dyn Backend) -> usize {
        let caps = backend.caps();
        let gate = if caps.gates_in_pages() { DType::F32.size() } else { size_of::<f64>() };
        let transition = self.transition * DType::F32.size();
        PAGE * (2 * self.head_dim * caps.activation_type.size() + self.group * gate + transition)
    }
}

/// Room for pages of single heads.
#[derive(Debug)]
pub struct Slab {
    /// `[pages * PAGE, d]`.
    pub k: Tensor,
    /// `[pages * PAGE, d]`.
    pub v: Tensor,
    /// Transitions `[pages * PAGE, transition]` in f32, because errors accumulate from key to key.
    pub transitions: Option<Tensor>,
    /// Log gates `[pages * group, PAGE]`, where the device reads them here.
    pub gates: Option<Tensor>,
    /// Sums of the log gates up to and including each key, `[pages * group, PAGE]` for the query heads that read the
    /// key head; empty when nothing is forgotten, and where the device reads `gates`. On the host, in f64: differences
    /// stay accurate after millions of tokens.
    pub sums: Vec<f64>,
}

impl Slab {
    /// Allocates `pages` empty pages.
    pub fn new(shape: &PageShape, pages: usize, device: &Device) -> Result<Self> {
        let caps = device.backend().caps();
        let kernels = caps.gates_in_pages();
        let room = |rows: usize, width: usize, dtype: DType| match kernels {
            true => device.uninit([rows, width], dtype),
            // Whole pages are read: unwritten entries must be finite.
            false => device.zeros([rows, width], dtype),
        };
        let gates = pages * shape.group;
        Ok(Slab {
            k: room(pages * PAGE, shape.head_dim, caps.activation_type)?,
            v: room(pages * PAGE, shape.head_dim, caps.activation_type)?,
            transitions: (shape.transition > 0)
                .then(|| room(pages * PAGE, shape.transition, DType::F32))
                .transpose()?,
            gates: (kernels && gates > 0).then(|| room(gates, PAGE, DType::F32)).transpose()?,
            sums: vec![0.0; if kernels { 0 } else { gates * PAGE }],
        })
    }

    /// Copies another page to page number `place` of this slab.
    pub fn copy_page(&mut self, place: usize, from: Page<'_>) -> Result<()> {
        let device = self.k.device().clone();
        let (backend, row) = (device.backend(), place * PAGE);
        backend.copy_rows(&from.slab.k, from.row(), &mut self.k, row, PAGE)?;
        backend.copy_rows(&from.slab.v, from.row(), &mut self.v, row, PAGE)?;
        if let (Some(own), Some(old)) = (&mut self.transitions, &from.slab.transitions) {
            backend.copy_rows(old, from.row(), own, row, PAGE)?;
        }
        if let (Some(gates), Some(old)) = (&mut self.gates, &from.slab.gates) {
            let group = gates.rows() * PAGE / self.k.rows();
            backend.copy_rows(old, from.place * group, gates, place * group, group)?;
        }
        let sums = self.sums.len() * PAGE / self.k.rows();
        self.sums[place * sums..][..sums]
            .copy_from_slice(&from.slab.sums[from.place * sums..][..sums]);
        Ok(())
    }
}

/// A page of [`PAGE`] keys of one head in a slab.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// The slab.
    pub slab: &'a Slab,
    /// Its number in the slab.
    pub place: usize,
}

impl<'a> Page<'a> {
    /// The first of its rows of keys and values.
    pub fn row(&self) -> usize {
        self.place * PAGE
    }

    /// The sums of gate `g` of a group of `group`, `[PAGE]`; `None` where the slab has none.
    pub fn sums(&self, g: usize, group: usize) -> Option<&'a [f64]> {
        self.slab.sums.get((self.place * group + g) * PAGE..)?.get(..PAGE)
    }
}

/// An unshared page, for writing.
#[derive(Debug)]
pub struct PageMut<'a> {
    /// The slab.
    pub slab: &'a mut Slab,
    /// Its number in the slab.
    pub place: usize,
}
