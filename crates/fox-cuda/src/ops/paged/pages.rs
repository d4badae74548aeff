//! The paged KV cache: page tables, writing new keys, attention of many queries.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fox_tensor::{
    Acp, AttentionInputs, AttentionOut, AttentionSpec, AttentionWeights, DType, Mask, NewKeys,
    PAGE, PageShape, PagedKeys, PagedSpec, PathInputs, Segment, Segments, Slab, Tensor,
};

use super::{Page, PagedParams};
use crate::backend::Cuda;
use crate::backend::storage::memory;
use crate::params::{self, Param, int};
use crate::{Buffer, Error, Result};

/// Bytes of a table entry: one page of one head.
const PAGE_BYTES: usize = size_of::<<Page as Param>::Device>();

fn address(x: &Tensor) -> Result<u64> {
    Ok(memory(x)?.data.address())
}

/// The page table of one layer of one sequence, `[page][kv_heads]` entries of the kernels' `Page`. It keeps every slab
/// alive that its entries refer to.
#[derive(Debug)]
pub(crate) struct DeviceTable {
    entries: Buffer<u8>,
    /// Pages that there is room for.
    room: usize,
    shape: PageShape,
    stored: Mutex<StoredPages>,
}

/// What a table refers to.
#[derive(Clone, Debug)]
struct StoredPages {
    /// Pages whose entries are stored.
    count: usize,
    /// Per key head, the first page from which on all entries are held pages.
    first_held: Vec<usize>,
    /// All tensors of every slab, by the address of its keys.
    slabs: HashMap<u64, Vec<Tensor>>,
    /// The slab of the page before; 0 for none.
    last: u64,
}

impl StoredPages {
    /// Keeps a slab alive. Pages of one slab often follow each other; where sequences have come and gone, free pages are
    /// in any order, and each of many thousands is looked up.
    fn keep(&mut self, keys: u64, slab: &Slab) {
        if self.last == keys || self.slabs.contains_key(&keys) {
            self.last = keys;
            return;
        }
        let tensors =
            [Some(&slab.k), Some(&slab.v), slab.gates.as_ref(), slab.transitions.as_ref()];
        self.slabs.insert(keys, tensors.into_iter().flatten().cloned().collect());
        self.last = keys;
    }
}

impl DeviceTable {
    /// The address of the entries.
    pub(crate) fn address(&self) -> u64 {
        self.entries.address()
    }

    fn stored(&self) -> MutexGuard<'_, StoredPages> {
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether pages `from ..` of `head` up to page `to` are stored and held.
    pub(crate) fn holds(&self, head: usize, from: usize, to: usize) -> bool {
        let stored = self.stored();
        to <= stored.count && stored.first_held[head] <= from
    }
}

/// Bytes of the keys, values, gates and transitions of a page.
fn page_sizes(shape: &PageShape, dtype: DType) -> [usize; 4] {
    let rows = PAGE * shape.head_dim * dtype.size();
    let f32s = |width: usize| PAGE * width * DType::F32.size();
    [rows, rows, f32s(shape.group), f32s(shape.transition)]
}

/// Addresses of the keys, values, gates and transitions of a page; 0 where it has none. An error for a page that does not lie inside its
/// slab, or a slab of another shape or type.
fn addresses(page: fox_tensor::Page<'_>, shape: &PageShape, dtype: DType) -> Result<[u64; 4]> {
    let (slab, sizes) = (page.slab, page_sizes(shape, dtype));
    let pages = slab.k.rows() / PAGE;
    let rows = |x: &Tensor| x.dtype() == dtype && x.len() == pages * PAGE * shape.head_dim;
    let optional = |x: &Option<Tensor>, width: usize| match x {
        Some(x) => x.dtype() == DType::F32 && x.len() == pages * PAGE * width,
        None => width == 0,
    };
    let fits = optional(&slab.gates, shape.group) && optional(&slab.transitions, shape.transition);
    if page.place >= pages || !rows(&slab.k) || !rows(&slab.v) || !fits {
        return Err(Error::argument("pages", format!("page {} of {slab:?}", page.place)));
    }
    let optional = |x: &Option<Tensor>| x.as_ref().map_or(Ok(0), address);
    let bases = [
        address(&slab.k)?,
        address(&slab.v)?,
        optional(&slab.gates)?,
        optional(&slab.transitions)?,
    ];
    Ok([0, 1, 2, 3].map(|n| bases[n] + (page.place * sizes[n]) as u64))
}

impl Cuda {
    /// Copies a page of a slab to another one of the same shape.
    pub(super) fn copy_one_page(
        &self,
        from: fox_tensor::Page<'_>,
        to: fox_tensor::Page<'_>,
    ) -> Result<()> {
        let (slab, pages) = (to.slab, to.slab.k.rows() / PAGE);
        let group = slab.gates.as_ref().map_or(0, |gates| gates.len() / (pages * PAGE).max(1));
        let transition = slab.transitions.as_ref().map_or(0, Tensor::cols);
        let shape = PageShape { kv_heads: 1, head_dim: slab.k.cols(), group, transition };
        let dtype = self.activations();
        let (from, to) = (addresses(from, &shape, dtype)?, addresses(to, &shape, dtype)?);
        let sizes = page_sizes(&shape, dtype).into_iter().enumerate();
        for (n, bytes) in sizes.filter(|(_, bytes)| *bytes > 0) {
            // SAFETY: both pages lie inside live slabs of this shape, as `addresses` has checked.
            unsafe { self.gpu.copy(to[n], from[n], bytes)? };
        }
        Ok(())
    }

    /// The page table of a layer, brought up to date.
    fn page_table(&self, keys: &mut dyn PagedKeys) -> Result<Arc<DeviceTable>> {
        // SAFETY: `write` gets a range inside the table.
        self.page_table_by(keys, |at, entries| unsafe { self.gpu.write(at, entries) })
    }

    /// The page table of a layer, brought up to date; `write` stores new entries at an address inside it.
    pub(crate) fn page_table_by(
        &self,
        keys: &mut dyn PagedKeys,
        write: impl FnOnce(u64, &[u8]) -> Result<()>,
    ) -> Result<Arc<DeviceTable>> {
        let (shape, count, dtype) = (keys.shape(), keys.page_count(), self.activations());
        let heads = shape.kv_heads;
        let old = keys.table().state.clone().and_then(|state| state.downcast::<DeviceTable>().ok());
        let old = old.filter(|old| old.shape == shape);
        let table = match &old {
            Some(old) if old.room >= count => Arc::clone(old),
            _ => {
                let room = (2 * count).max(16);
                let entries = self.gpu.alloc(PAGE_BYTES * heads * room)?;
                let mut stored = StoredPages {
                    count: 0,
                    first_held: vec![0; heads],
                    slabs: HashMap::new(),
                    last: 0,
                };
                if let Some(old) = &old {
                    stored = old.stored().clone();
                    let bytes = PAGE_BYTES * heads * stored.count;
                    // SAFETY: both have room for the stored entries.
                    unsafe { self.gpu.copy(entries.address(), old.address(), bytes)? };
                }
                Arc::new(DeviceTable { entries, room, shape, stored: Mutex::new(stored) })
            }
        };
        let mut stored = table.stored();
        let first = keys.table().valid.min(stored.count).min(count);
        let mut new = Vec::with_capacity((count - first) * heads);
        for held in &mut stored.first_held {
            *held = (*held).min(first);
        }
        for index in first..count {
            for head in 0..heads {
                let Some(page) = keys.page(head, index) else {
                    new.push(Page::default());
                    stored.first_held[head] = index + 1;
                    continue;
                };
                let [k, v, gates, transitions] = addresses(page, &shape, dtype)?;
                stored.keep(address(&page.slab.k)?, page.slab);
                new.push(Page {
                    k: k.into(),
                    v: v.into(),
                    gates: gates.into(),
                    transitions: transitions.into(),
                });
            }
        }
        // Until the entries are written, only those before count.
        stored.count = first;
        if !new.is_empty() {
            let rows = params::rows("the page table", &new)?;
            let at = table.address() + (PAGE_BYTES * heads * first) as u64;
            write(at, bytemuck::cast_slice(&rows))?;
        }
        stored.count = count;
        drop(stored);
        keys.table_mut().state = Some(Arc::clone(&table) as Arc<_>);
        keys.table_mut().valid = count;
        Ok(table)
    }

    /// Writes new keys, values and gates to the pages of all heads.
    pub(crate) fn append_to_pages(
        &self,
        new: &NewKeys<'_>,
        keys: &mut dyn PagedKeys,
        first: usize,
    ) -> Result<()> {
        let table = self.page_table(keys)?;
        let PageShape { kv_heads, head_dim, group, transition } = keys.shape();
        let (from, to) = (first / PAGE, (first + new.count).div_ceil(PAGE));
        if (0..kv_heads).any(|head| !table.holds(head, from, to)) {
            return Err(Error::argument("write_pages", "the new keys do not fit into the pages"));
        }
        let (k, v) = (self.activation(new.k)?, self.activation(new.v)?);
        let gates = new.log_gates.map(|gates| self.real(gates)).transpose()?;
        let transitions = new.transitions.map(|x| self.real(x)).transpose()?;
        let params = PagedParams {
            table: table.address().into(),
            k: k.address().into(),
            v: v.address().into(),
            gates: crate::backend::address(&gates).into(),
            transitions: crate::backend::address(&transitions).into(),
            dropped: 0.into(),
            row: new.row,
            first,
            count: new.count,
            kv_heads,
            head_dim,
            group,
            transition,
        };
        // SAFETY: the rows exist, as validated at entry, and the pages of all heads, as checked above.
        unsafe { self.launch_paged("write_pages", params) }
    }

    /// Gathers the pages into rows, in one launch per sequence, and attends to these.
    pub(crate) fn attend_pages(
        &self,
        q: &Tensor,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> Result<AttentionOut> {
        let mut segments = Vec::new();
        let (mut sources, mut rows) = (Vec::new(), 0);
        for (s, keys) in spec.segments.as_slice().iter().zip(keys).filter(|(s, _)| s.q_len > 0) {
            let first = keys.first_of_all();
            let k_len = s.k_len - first;
            segments.push(Segment { k_start: rows, k_len, ..*s });
            sources.push((*keys, first, k_len, rows));
            rows += k_len;
        }
        let (device, width) = (q.device(), spec.kv_heads * spec.head_dim);
        let (k, k_at) = self.output([rows, width], self.activations(), device)?;
        let (v, v_at) = self.output([rows, width], self.activations(), device)?;
        let gated = sources.iter().any(|(keys, ..)| keys.shape().group > 0);
        let gates =
            gated.then(|| self.output([rows, spec.heads], DType::F32, device)).transpose()?;
        let transitions =
            spec.reflected.then(|| self.output([rows, width], DType::F32, device)).transpose()?;
        for (keys, first, count, row) in sources {
            let (state, pages) = (keys.table().state.as_ref(), keys.page_count());
            let table = state.and_then(|state| state.downcast_ref::<DeviceTable>());
            let stored = |table: &&DeviceTable| {
                let holds = |head: usize| table.holds(head, keys.dropped(head), pages);
                table.shape == keys.shape()
                    && keys.table().valid == pages
                    && (first + count) <= pages * PAGE
                    && (0..spec.kv_heads).all(holds)
            };
            let Some(table) = table.filter(stored) else {
                let detail = "pages that this device has not written";
                return Err(Error::argument("paged_attention", detail));
            };
            let dropped = |head: usize| int("gather_pages", "dropped", keys.dropped(head));
            let dropped: Vec<i32> = (0..spec.kv_heads).map(dropped).collect::<Result<_>>()?;
            let any = dropped.iter().any(|pages| *pages > 0);
            let dropped = any.then(|| self.gpu.upload(&dropped)).transpose()?;
            let params = PagedParams {
                table: table.address().into(),
                k: k_at.into(),
                v: v_at.into(),
                gates: gates.as_ref().map_or(0, |(_, at)| *at).into(),
                transitions: transitions.as_ref().map_or(0, |(_, at)| *at).into(),
                dropped: dropped.as_ref().map_or(0, Buffer::address).into(),
                row,
                first,
                count,
                kv_heads: spec.kv_heads,
                head_dim: spec.head_dim,
                group: if gated { spec.heads / spec.kv_heads } else { 0 },
                transition: keys.shape().transition,
            };
            // SAFETY: the outputs have `rows` rows, and the table holds the pages of all heads.
            unsafe { self.launch_paged("gather_pages", params)? };
        }
        let plain = AttentionSpec {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            scale: spec.scale,
            mask: Mask::Causal,
            window: spec.window,
            acp: Acp::Off,
            segments: Segments::new(segments)
                .map_err(|e| Error::argument("paged_attention", e.to_string()))?,
            full_sequence: None,
        };
        let log_gates = gates.as_ref().map(|(gates, _)| gates);
        if let Some((u, _)) = &transitions {
            return self.path_forward(&PathInputs { q, k: &k, v: &v, u, log_gates }, &plain);
        }
        let inputs = AttentionInputs { q, k: &k, v: &v, log_gates };
        match spec.weights {
            AttentionWeights::Softmax => self.attend(&inputs, &plain),
            // Evicted rows are older than all keys of the head: what they would take of the stick affects none of them.
            AttentionWeights::StickBreaking => self.stick_breaking_forward(&inputs, &plain),
        }
    }
}
