//! Keys and values in pages: where they lie, writing new ones, attention of many queries over them.

use fox_tensor::{
    Acp, AttentionInputs, AttentionSpec, AttentionWeights, DType, Device, Mask, NewKeys, PAGE,
    PageShape, PagedKeys, PagedSpec, Segment, Segments, Slab, Tensor,
};

use super::{Page, PagedParams};
use crate::backend::Cuda;
use crate::backend::storage::memory;
use crate::params::{self, Param, int};
use crate::{Buffer, Error, Result};

/// Bytes of the table for one page of one head.
const PAGE_BYTES: usize = size_of::<<Page as Param>::Device>();

fn address(x: &Tensor) -> Result<u64> {
    Ok(memory(x)?.data.address())
}

/// Bytes that a page takes of each of keys, values and gates.
fn page_sizes(slab: &Slab) -> [usize; 3] {
    let size = |x: &Tensor| x.len() * x.dtype().size() / (slab.k.rows() / PAGE);
    [size(&slab.k), size(&slab.v), slab.gates.as_ref().map_or(0, size)]
}

/// Where keys, values and gates of a page lie; 0 without gates.
fn addresses(page: fox_tensor::Page<'_>, sizes: [usize; 3]) -> Result<[u64; 3]> {
    let slab = page.slab;
    let bases = [address(&slab.k)?, address(&slab.v)?, slab.gates.as_ref().map_or(Ok(0), address)?];
    Ok([0, 1, 2].map(|n| bases[n] + (page.place * sizes[n]) as u64))
}

impl Cuda {
    /// Copies a page to another place.
    pub(super) fn copy_one_page(
        &self,
        from: fox_tensor::Page<'_>,
        to: fox_tensor::Page<'_>,
    ) -> Result<()> {
        let sizes = page_sizes(to.slab);
        let (from, to) = (addresses(from, sizes)?, addresses(to, sizes)?);
        for (n, bytes) in sizes.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0) {
            // SAFETY: pages of one shape have these sizes, and lie inside their slabs.
            unsafe { self.gpu.copy(to[n], from[n], bytes)? };
        }
        Ok(())
    }

    /// Where the table of a layer's pages lies, `[page][kv_heads]` of the kernels' `Page`; brought up to date.
    pub(crate) fn page_table(&self, keys: &mut dyn PagedKeys, device: &Device) -> Result<u64> {
        // SAFETY: the range lies inside the table.
        self.page_table_by(keys, device, |at, rows| unsafe { self.gpu.write(at, rows) })
    }

    /// The same; `write` brings rows of the table to an address inside it.
    pub(crate) fn page_table_by(
        &self,
        keys: &mut dyn PagedKeys,
        device: &Device,
        write: impl FnOnce(u64, &[u8]) -> Result<()>,
    ) -> Result<u64> {
        let (heads, count) = (keys.shape().kv_heads, keys.page_count());
        let room = keys.table().rows.as_ref().map_or(0, |rows| rows.rows());
        if room < count {
            let shape = [(2 * count).max(16), PAGE_BYTES / DType::I32.size() * heads];
            let (table, rows) = (keys.table_mut(), self.uninit(shape, DType::I32, device)?);
            if let Some(old) = table.rows.as_ref().filter(|_| table.valid > 0) {
                let bytes = PAGE_BYTES * heads * table.valid;
                // SAFETY: both have room for the rows that are up to date.
                unsafe { self.gpu.copy(address(&rows)?, address(old)?, bytes)? };
            }
            table.rows = Some(rows);
        }
        let Some(rows) = &keys.table().rows else { return Ok(0) };
        let (table, first) = (address(rows)?, keys.table().valid);
        let mut new = Vec::with_capacity((count - first.min(count)) * heads);
        // Pages of a layer have one shape.
        let mut sizes = None;
        for index in first..count {
            for head in 0..heads {
                let Some(page) = keys.page(head, index) else {
                    new.push(Page::default());
                    continue;
                };
                let sizes = *sizes.get_or_insert_with(|| page_sizes(page.slab));
                let [k, v, gates] = addresses(page, sizes)?;
                new.push(Page { k: k.into(), v: v.into(), gates: gates.into() });
            }
        }
        if !new.is_empty() {
            let rows = params::rows("the table of pages", &new)?;
            write(table + (PAGE_BYTES * heads * first) as u64, bytemuck::cast_slice(&rows))?;
        }
        keys.table_mut().valid = count;
        Ok(table)
    }

    /// New keys, values and gates to the pages of all heads.
    pub(crate) fn append_to_pages(
        &self,
        new: &NewKeys<'_>,
        keys: &mut dyn PagedKeys,
        first: usize,
    ) -> Result<()> {
        let table = self.page_table(keys, new.k.device())?;
        let PageShape { kv_heads, head_dim, group } = keys.shape();
        let (k, v) = (self.activation(new.k)?, self.activation(new.v)?);
        let gates = new.log_gates.map(|gates| self.real(gates)).transpose()?;
        let params = PagedParams {
            table: table.into(),
            k: k.address().into(),
            v: v.address().into(),
            gates: crate::backend::address(&gates).into(),
            dropped: 0.into(),
            row: new.row,
            first,
            count: new.count,
            kv_heads,
            head_dim,
            group,
        };
        self.launch_paged("write_pages", params)
    }

    /// Gathers the pages in rows, in one launch for each sequence, and attends to those.
    pub(crate) fn attend_pages(
        &self,
        q: &Tensor,
        keys: &[&dyn PagedKeys],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
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
        for (keys, first, count, row) in sources {
            let table = keys.table();
            let Some(table) = table.rows.as_ref().filter(|_| table.valid == keys.page_count())
            else {
                return Err(Error::argument(
                    "paged_attention",
                    "pages that this device has not written",
                ));
            };
            let dropped = |head: usize| int("gather_pages", "dropped", keys.dropped(head));
            let dropped: Vec<i32> = (0..spec.kv_heads).map(dropped).collect::<Result<_>>()?;
            let any = dropped.iter().any(|pages| *pages > 0);
            let dropped = any.then(|| self.gpu.upload(&dropped)).transpose()?;
            let params = PagedParams {
                table: address(table)?.into(),
                k: k_at.into(),
                v: v_at.into(),
                gates: gates.as_ref().map_or(0, |(_, at)| *at).into(),
                dropped: dropped.as_ref().map_or(0, Buffer::address).into(),
                row,
                first,
                count,
                kv_heads: spec.kv_heads,
                head_dim: spec.head_dim,
                group: if gated { spec.heads / spec.kv_heads } else { 0 },
            };
            self.launch_paged("gather_pages", params)?;
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
        let inputs = AttentionInputs { q, k: &k, v: &v, log_gates };
        Ok(match spec.weights {
            AttentionWeights::Softmax => self.attend(&inputs, &plain)?,
            // Rows that a head has dropped are older than all it sees: what they take of a stick misses no one.
            AttentionWeights::StickBreaking => self.stick_breaking_forward(&inputs, &plain)?,
        }
        .o)
    }
}
