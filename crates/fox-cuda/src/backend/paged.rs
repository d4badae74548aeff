//! Keys and values in pages: where they lie, writing new ones, attention of many queries over them.

use fox_tensor::{
    Acp, AttentionInputs, AttentionSpec, AttentionWeights, DType, Device, KeyPages, LayerPages,
    Mask, NewKeys, PagedSpec, Segment, Segments, Tensor,
};

use super::launcher::Variant;
use super::storage::memory;
use super::{Cuda, int};
use crate::{Error, KernelArg, Result, Source};

/// Words of the table for one page of one head: addresses of keys, values and gates.
const WORDS: usize = 3;

#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    table: u64,
    k: u64,
    v: u64,
    gates: u64,
    dropped: u64,
    row: i32,
    first: i32,
    count: i32,
    kv_heads: i32,
    head_dim: i32,
    group: i32,
}

// SAFETY: mirrors the struct of the same name in paged.cu.
unsafe impl KernelArg for Params {}

/// Pages of the fullest head, dropped ones included.
fn page_count(pages: &LayerPages) -> usize {
    let count = |keys: &KeyPages| keys.dropped() + keys.pages().len();
    pages.heads().iter().map(count).max().unwrap_or(0)
}

fn address(x: &Tensor) -> Result<u64> {
    Ok(memory(x)?.data.address())
}

impl Cuda {
    /// Where the table of a layer's pages lies, `[page][kv_heads]` of the kernels' `Page`; brought up to date.
    pub(super) fn page_table(&self, pages: &mut LayerPages, device: &Device) -> Result<u64> {
        let (heads, count) = (pages.heads().len(), page_count(pages));
        let room = pages.table.rows.as_ref().map_or(0, |rows| rows.rows());
        if room < count {
            let shape = [(2 * count).max(16), 2 * WORDS * heads];
            pages.table.rows = Some(self.uninit(shape, DType::I32, device)?);
            pages.table.valid = 0;
        }
        let Some(rows) = &pages.table.rows else { return Ok(0) };
        let (table, first) = (address(rows)?, pages.table.valid);
        let mut words = Vec::with_capacity((count - first.min(count)) * heads * WORDS);
        for index in first..count {
            for keys in pages.heads() {
                let Some(page) = keys.page(index) else {
                    words.extend([0u64; WORDS]);
                    continue;
                };
                let gates = page.gates.as_ref().map_or(Ok(0), address)?;
                words.extend([address(&page.k)?, address(&page.v)?, gates]);
            }
        }
        if !words.is_empty() {
            // SAFETY: the table has room for `count` rows.
            unsafe { self.gpu.write(table + (8 * WORDS * heads * first) as u64, &words)? };
        }
        pages.table.valid = count;
        Ok(table)
    }

    /// New keys, values and gates to the pages of all heads.
    pub(super) fn append_to_pages(
        &self,
        new: &NewKeys<'_>,
        pages: &mut LayerPages,
        len: usize,
    ) -> Result<()> {
        let table = self.page_table(pages, new.k.device())?;
        let Some(keys) = pages.heads().first() else { return Ok(()) };
        let (k, v) = (self.activation(new.k)?, self.activation(new.v)?);
        let gates = new.log_gates.map(|gates| self.real(gates)).transpose()?;
        let params = Params {
            table,
            k: k.address(),
            v: v.address(),
            gates: super::address(&gates),
            dropped: 0,
            row: int(new.row),
            first: int(len),
            count: int(new.count),
            kv_heads: int(pages.heads().len()),
            head_dim: int(keys.head_dim()),
            group: int(keys.group()),
        };
        self.launch_paged("write_pages", &params)
    }

    /// Gathers the pages in rows, in one launch for each sequence, and attends to those.
    pub(super) fn attend_pages(
        &self,
        q: &Tensor,
        keys: &[&LayerPages],
        spec: &PagedSpec,
    ) -> Result<Tensor> {
        let first =
            |pages: &LayerPages| pages.heads().iter().map(KeyPages::first).min().unwrap_or(0);
        let mut segments = Vec::new();
        let (mut sources, mut rows) = (Vec::new(), 0);
        for (s, pages) in spec.segments.as_slice().iter().zip(keys).filter(|(s, _)| s.q_len > 0) {
            let first = first(pages);
            let k_len = s.k_len - first;
            segments.push(Segment { k_start: rows, k_len, ..*s });
            sources.push((*pages, first, k_len, rows));
            rows += k_len;
        }
        let (device, width) = (q.device(), spec.kv_heads * spec.head_dim);
        let (k, k_at) = self.output([rows, width], self.activations(), device)?;
        let (v, v_at) = self.output([rows, width], self.activations(), device)?;
        let gated = sources.iter().any(|(pages, ..)| pages.heads().iter().any(|h| h.group() > 0));
        let gates =
            gated.then(|| self.output([rows, spec.heads], DType::F32, device)).transpose()?;
        for (pages, first, count, row) in sources {
            let Some(table) =
                pages.table.rows.as_ref().filter(|_| pages.table.valid == page_count(pages))
            else {
                return Err(Error::argument(
                    "paged_attention",
                    "pages that this device has not written",
                ));
            };
            let dropped: Vec<i32> = pages.heads().iter().map(|keys| int(keys.dropped())).collect();
            let dropped = self.gpu.upload(&dropped)?;
            let params = Params {
                table: address(table)?,
                k: k_at,
                v: v_at,
                gates: gates.as_ref().map_or(0, |(_, at)| *at),
                dropped: dropped.address(),
                row: int(row),
                first: int(first),
                count: int(count),
                kv_heads: int(spec.kv_heads),
                head_dim: int(spec.head_dim),
                group: int(if gated { spec.heads / spec.kv_heads } else { 0 }),
            };
            self.launch_paged("gather_pages", &params)?;
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
        };
        let log_gates = gates.as_ref().map(|(gates, _)| gates);
        let inputs = AttentionInputs { q, k: &k, v: &v, log_gates };
        Ok(match spec.weights {
            AttentionWeights::Softmax => self.attend(&inputs, &plain)?,
            // Rows that a head has dropped are older than all it sees: what they take of a stick misses no one.
            AttentionWeights::StickBreaking => self.break_sticks(&inputs, &plain)?,
        }
        .o)
    }

    fn launch_paged(&self, entry: &'static str, params: &Params) -> Result<()> {
        let variant = Variant::plain(self.activations(), params.head_dim as usize);
        let pieces =
            (params.count * params.kv_heads) as usize * params.head_dim as usize / variant.vec;
        let blocks = pieces.div_ceil(256).min(self.gpu.processors() as usize * 16);
        let kernel = self.variant_kernel(Source::PAGED, entry, variant)?;
        let shapes =
            || format!("{} keys of {} heads of {}", params.count, params.kv_heads, params.head_dim);
        // SAFETY: parameters as declared in paged.cu; the table's pages and the rows have the sizes named.
        unsafe { kernel.launch([blocks as u32, 1, 1], 256).arg(params).run(shapes) }
    }
}
