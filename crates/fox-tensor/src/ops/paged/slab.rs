//! Memory of pages.
//!
//! Where memory is slow to get, pages are taken many at a time: a slab has room for them one after the other, and a
//! page is a place in it. Elsewhere a slab is a single page.

use super::PAGE;
use crate::{Backend, DType, Device, Result, Tensor};

/// What the pages of a layer have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head `d`.
    pub head_dim: usize,
    /// Query heads with gates of their own that read one key head; 0 when nothing is forgotten.
    pub group: usize,
}

impl PageShape {
    /// Bytes of one page of one head on a device.
    pub fn page_bytes(&self, backend: &dyn Backend) -> usize {
        let caps = backend.caps();
        let gate = if caps.gates_in_pages() { DType::F32.size() } else { size_of::<f64>() };
        PAGE * (2 * self.head_dim * caps.activation_type.size() + self.group * gate)
    }
}

/// Room for pages of single heads.
#[derive(Debug)]
pub struct Slab {
    /// `[pages * PAGE, d]`.
    pub k: Tensor,
    /// `[pages * PAGE, d]`.
    pub v: Tensor,
    /// Log gates `[pages * group, PAGE]`, where the device reads them here.
    pub gates: Option<Tensor>,
    /// Sums of the log gates up to and including each key, `[pages * group, PAGE]` for the query heads that read the
    /// key head; empty when nothing is forgotten, and where the device reads `gates`. On the host, in f64: differences
    /// stay accurate after millions of tokens.
    pub sums: Vec<f64>,
}

impl Slab {
    /// Room for `pages` pages, which are empty.
    pub fn new(shape: &PageShape, pages: usize, device: &Device) -> Result<Self> {
        let caps = device.backend().caps();
        let kernels = caps.gates_in_pages();
        let room = |rows: usize, width: usize, dtype: DType| match kernels {
            true => device.uninit([rows, width], dtype),
            // Whole pages are read: what is not written yet must be a number.
            false => device.zeros([rows, width], dtype),
        };
        let gates = pages * shape.group;
        Ok(Slab {
            k: room(pages * PAGE, shape.head_dim, caps.activation_type)?,
            v: room(pages * PAGE, shape.head_dim, caps.activation_type)?,
            gates: (kernels && gates > 0).then(|| room(gates, PAGE, DType::F32)).transpose()?,
            sums: vec![0.0; if kernels { 0 } else { gates * PAGE }],
        })
    }

    /// Writes all of another page to a place of this slab.
    pub fn copy_page(&mut self, place: usize, from: Page<'_>) -> Result<()> {
        let device = self.k.device().clone();
        let (backend, row) = (device.backend(), place * PAGE);
        backend.copy_rows(&from.slab.k, from.row(), &mut self.k, row, PAGE)?;
        backend.copy_rows(&from.slab.v, from.row(), &mut self.v, row, PAGE)?;
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

/// Room for [`PAGE`] keys of one head: a place in a slab.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// Where it lies.
    pub slab: &'a Slab,
    /// Number of pages before it.
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

/// A page that nobody else holds, for writing on the host's behalf.
#[derive(Debug)]
pub struct PageMut<'a> {
    /// Where it lies.
    pub slab: &'a mut Slab,
    /// Number of pages before it.
    pub place: usize,
}
