//! Cases of attention over pages.

use super::{
    NewKeys, PAGE, Page, PageMut, PageShape, PageTable, PagedKeys, PagedSpec, Slab, page_parts,
    write_pages,
};
use crate::cases::Rng;
use crate::{AttentionWeights, Device, Result, Segment, Segments, Tape, Tensor, Var};

/// A batch of sequences with different lengths, gates and queries.
#[derive(Clone, Debug)]
pub struct PagedCase {
    /// What attention is asked for.
    pub spec: PagedSpec,
    /// The sequences.
    pub sequences: Vec<PagedSequence>,
    /// Queries `[R, H * d]`.
    pub q: Vec<f64>,
    gated: bool,
    /// `[H]`.
    sinks: Option<Vec<f64>>,
}

/// Keys of one sequence of a [`PagedCase`].
#[derive(Clone, Debug)]
pub struct PagedSequence {
    /// `[k_len, H_kv * d]`.
    pub k: Vec<f64>,
    /// `[k_len, H_kv * d]`.
    pub v: Vec<f64>,
    /// Sums of the log gates `[H, k_len]`.
    pub sums: Vec<f64>,
    /// Pages that each key head drops after they were written `[H_kv]`.
    pub dropped: Vec<usize>,
}

impl PagedCase {
    /// A random case, different for every seed.
    pub fn random(seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let head_dim = rng.pick(&[8, 16, 24, 32, 64]);
        let (kv_heads, group) = (rng.between(1, 2), rng.between(1, 2));
        let (heads, gated) = (kv_heads * group, rng.chance(0.8));
        let strength = rng.pick(&[0.001, 0.05, 1.0]);
        let (mut sequences, mut segments, mut row, mut key) = (vec![], vec![], 0, 0);
        for _ in 0..rng.between(1, 3) {
            let k_len = rng.between(1, 300);
            let q_len = rng.pick(&[1, 3, 9, 70]).min(k_len);
            segments.push(Segment { q_start: row, q_len, k_start: key, k_len });
            (row, key) = (row + q_len, key + k_len);
            let mut sums = vec![0.0; heads * k_len];
            for h in 0..heads {
                let mut sum = -1e4;
                for j in 0..k_len {
                    sum -= strength * rng.normal().abs();
                    sums[h * k_len + j] = sum;
                }
            }
            let width = kv_heads * head_dim;
            let (k, v) = (rng.normals(k_len * width), rng.normals(k_len * width));
            sequences.push(PagedSequence { k, v, sums, dropped: vec![0; kv_heads] });
        }
        let kinds = [AttentionWeights::Softmax, AttentionWeights::StickBreaking];
        let spec = PagedSpec {
            weights: rng.pick(&kinds),
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: rng.chance(0.3).then(|| rng.between(1, 150)),
            thresholds: None,
            sinks: None,
            reflected: false,
            segments: Segments::new(segments)?,
        };
        let q = rng.normals(row * heads * head_dim);
        let sinks = random_sinks(&spec, &mut rng);
        Ok(PagedCase { spec, sequences, q, gated, sinks })
    }

    /// A case of [`PagedCase::random`] whose key heads drop different numbers of pages, although their gates forget
    /// next to nothing: a key that is gone and still counted would show.
    pub fn with_dropped_pages(seed: u64) -> Result<Self> {
        let mut rng = Rng::new(seed ^ 0xd509);
        let (kv_heads, group, head_dim) = (3, rng.between(1, 2), rng.pick(&[8, 24, 64]));
        let heads = kv_heads * group;
        let (k_len, q_len) = (rng.between(200, 400), rng.pick(&[1, 3, 9, 70]));
        let sums = (0..heads).flat_map(|_| (0..k_len).map(|j| -1e-3 * j as f64)).collect();
        let (k, v) =
            (rng.normals(k_len * kv_heads * head_dim), rng.normals(k_len * kv_heads * head_dim));
        let dropped = vec![0, (k_len - q_len) / PAGE, 1];
        let kinds = [AttentionWeights::Softmax, AttentionWeights::StickBreaking];
        let segment = Segment { q_start: 0, q_len, k_start: 0, k_len };
        let spec = PagedSpec {
            weights: rng.pick(&kinds),
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: None,
            thresholds: None,
            sinks: None,
            reflected: false,
            segments: Segments::new(vec![segment])?,
        };
        let q = rng.normals(q_len * heads * head_dim);
        let sequences = vec![PagedSequence { k, v, sums, dropped }];
        let sinks = random_sinks(&spec, &mut rng);
        Ok(PagedCase { spec, sequences, q, gated: true, sinks })
    }

    /// What the pages have in common.
    pub fn shape(&self) -> PageShape {
        let PagedSpec { heads, kv_heads, head_dim, .. } = self.spec;
        let group = if self.gated { heads / kv_heads } else { 0 };
        PageShape { kv_heads, head_dim, group, transition: 0 }
    }

    /// Keys and values `[k_len, H_kv * d]` of a sequence and, when it is gated, log gates `[k_len, H]`.
    pub fn tensors(
        &self,
        sequence: &PagedSequence,
        device: &Device,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let (heads, width) = (self.spec.heads, self.spec.kv_heads * self.spec.head_dim);
        let rows = sequence.k.len() / width;
        let tensor = |x: &[f64]| device.from_f64(x, [rows, width]);
        let sum = |t: usize, h: usize| sequence.sums[h * rows + t];
        let gate = |t: usize, h: usize| sum(t, h) - sum(t.saturating_sub(1), h);
        let gates: Vec<f64> = (0..rows).flat_map(|t| (0..heads).map(move |h| gate(t, h))).collect();
        let gates = self.gated.then(|| device.from_f64(&gates, [rows, heads])).transpose()?;
        Ok((tensor(&sequence.k)?, tensor(&sequence.v)?, gates))
    }

    /// The pages of each sequence, appended in two parts, as a cache grows.
    pub fn pages(&self, device: &Device) -> Result<Vec<CasePages>> {
        self.sequences.iter().map(|sequence| self.pages_of(sequence, device)).collect()
    }

    fn pages_of(&self, sequence: &PagedSequence, device: &Device) -> Result<CasePages> {
        let (k, v, gates) = self.tensors(sequence, device)?;
        let mut pages = CasePages::new(self.shape());
        let rows = k.rows();
        for (row, count) in [(0, rows / 3), (rows / 3, rows - rows / 3)] {
            pages.move_last_pages(device)?;
            pages.reserve(count, device)?;
            pages.write_sums(&sequence.sums, row, count);
            let new =
                NewKeys { k: &k, v: &v, transitions: None, log_gates: gates.as_ref(), row, count };
            write_pages(&new, &mut pages, row)?;
        }
        pages.dropped.clone_from(&sequence.dropped);
        Ok(pages)
    }

    /// Attention over such pages `[R, H * d]`.
    pub fn run(
        &self,
        device: &Device,
        pages: &[impl PagedKeys],
        spec: &PagedSpec,
    ) -> Result<Vec<f64>> {
        let width = self.spec.heads * self.spec.head_dim;
        let q = device.from_f64(&self.q, [self.q.len() / width, width])?;
        let keys: Vec<&dyn PagedKeys> = pages.iter().map(|pages| pages as &dyn PagedKeys).collect();
        let spec = self.spec_on(device, spec)?;
        let o = Tape::inference(device).paged_attention(&Var::constant(q), &keys, &spec)?;
        o.value().to_f64()
    }

    /// `spec` with the sinks of this case on a device.
    pub(super) fn spec_on(&self, device: &Device, spec: &PagedSpec) -> Result<PagedSpec> {
        let sinks = self.sinks.as_ref().map(|sinks| device.from_f64(sinks, [sinks.len()]));
        Ok(PagedSpec { sinks: sinks.transpose()?, ..spec.clone() })
    }
}

/// Sinks `[H]` for some of the cases of softmax attention.
fn random_sinks(spec: &PagedSpec, rng: &mut Rng) -> Option<Vec<f64>> {
    let has_sinks = spec.weights == AttentionWeights::Softmax && rng.chance(0.5);
    has_sinks.then(|| rng.normals(spec.heads))
}

/// Unshared pages.
#[derive(Debug)]
pub struct CasePages {
    shape: PageShape,
    slabs: Vec<Slab>,
    /// Slab and place of every page of each head.
    heads: Vec<Vec<(usize, usize)>>,
    /// Pages gone from the front of each head.
    dropped: Vec<usize>,
    seen: usize,
    table: PageTable,
}

impl CasePages {
    pub(crate) fn new(shape: PageShape) -> Self {
        let heads = (0..shape.kv_heads).map(|_| Vec::new()).collect();
        let dropped = vec![0; shape.kv_heads];
        CasePages { shape, slabs: vec![], heads, dropped, seen: 0, table: PageTable::default() }
    }

    /// Makes room for `count` more keys, in one slab whose last page comes first.
    pub(crate) fn reserve(&mut self, count: usize, device: &Device) -> Result<()> {
        self.seen += count;
        let new = self.seen.div_ceil(PAGE) - self.heads[0].len();
        if new == 0 {
            return Ok(());
        }
        let slab = self.new_slab(new * self.heads.len(), device)?;
        let mut places = (0..new * self.heads.len()).rev();
        for own in &mut self.heads {
            own.extend(places.by_ref().take(new).map(|place| (self.slabs.len(), place)));
        }
        self.slabs.push(slab);
        Ok(())
    }

    /// Room for gates and for their sums, whichever a device reads.
    fn new_slab(&self, pages: usize, device: &Device) -> Result<Slab> {
        let mut slab = Slab::new(&self.shape, pages, device)?;
        slab.sums.resize(pages * self.shape.group * PAGE, 0.0);
        Ok(slab)
    }

    /// Copies the last page of every head to another place, as happens to one that was shared before it is written.
    fn move_last_pages(&mut self, device: &Device) -> Result<()> {
        for head in 0..self.heads.len() {
            let Some(&(from, old)) = self.heads[head].last() else { continue };
            let mut slab = self.new_slab(3, device)?;
            let page = Page { slab: &self.slabs[from], place: old };
            match device.backend().caps().paged {
                Some(ops) if ops.slab_pages().is_some_and(|pages| pages > 1) => {
                    ops.copy_page(page, Page { slab: &slab, place: 2 })?;
                }
                _ => slab.copy_page(2, page)?,
            }
            self.heads[head].pop();
            self.heads[head].push((self.slabs.len(), 2));
            self.slabs.push(slab);
        }
        self.table.valid = self.table.valid.min(self.heads[0].len().saturating_sub(1));
        Ok(())
    }

    /// Writes columns `first .. first + count` of `sums: [H, k_len]`.
    fn write_sums(&mut self, sums: &[f64], first: usize, count: usize) {
        let PageShape { kv_heads, group, .. } = self.shape;
        let all = sums.len() / (kv_heads * group).max(1);
        for (h, pages) in self.heads.iter().enumerate() {
            for part in page_parts(first, count) {
                let (slab, place) = pages[part.index];
                for g in 0..group {
                    let own = &sums[(h * group + g) * all + first + part.before..];
                    let slots = &mut self.slabs[slab].sums[(place * group + g) * PAGE..];
                    slots[part.slots.clone()].copy_from_slice(&own[..part.slots.len()]);
                }
            }
        }
    }
}

impl PagedKeys for CasePages {
    fn shape(&self) -> PageShape {
        self.shape
    }

    fn seen(&self) -> usize {
        self.seen
    }

    fn dropped(&self, head: usize) -> usize {
        self.dropped[head]
    }

    fn page(&self, head: usize, index: usize) -> Option<Page<'_>> {
        let &(slab, place) = self.heads[head].get(index).filter(|_| index >= self.dropped[head])?;
        Some(Page { slab: &self.slabs[slab], place })
    }

    fn page_mut(&mut self, head: usize, index: usize) -> Option<PageMut<'_>> {
        let &(slab, place) = self.heads[head].get(index).filter(|_| index >= self.dropped[head])?;
        Some(PageMut { slab: &mut self.slabs[slab], place })
    }

    fn ends(&self) -> &[f64] {
        &[]
    }

    fn table(&self) -> &PageTable {
        &self.table
    }

    fn table_mut(&mut self) -> &mut PageTable {
        &mut self.table
    }
}
