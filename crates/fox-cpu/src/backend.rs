//! The backend: its memory, and conversions between tensors and slices.

use std::fmt;
use std::sync::Arc;

use fox_tensor::{
    Backend, Caps, DType, Device, DeviceKind, Error, IdRange, Memory, MemoryStats, PeerOps, Result,
    Rope, Shape, Storage, Tensor, check_add, check_copy_columns, check_copy_rows, check_download,
    check_fill, check_ints,
};

use crate::linear::packed::Packed;
use crate::pool::{Buffer, Pool};
use crate::rope::{Table, Tables};
use crate::simd::Level;
use crate::update::add;

/// Options of the backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Number of threads; all cores when absent.
    pub threads: Option<usize>,
    /// Instruction set; the best one when absent.
    pub level: Option<Level>,
    /// Fill allocated memory with NaN, so that tests detect elements that an op did not write.
    pub poison: bool,
}

/// The CPU backend.
pub struct Cpu {
    level: Level,
    pool: Arc<Pool>,
    ropes: Tables,
    /// A private thread pool; `None` is the process-wide one.
    threads: Option<rayon::ThreadPool>,
    /// Transfers to other processes without the group's connections.
    peers: Option<Arc<dyn PeerOps + Send + Sync>>,
}

impl Default for Cpu {
    fn default() -> Self {
        Cpu {
            level: Level::detect(),
            pool: Pool::new(false),
            ropes: Tables::default(),
            threads: None,
            peers: None,
        }
    }
}

impl Cpu {
    /// A backend with these options.
    pub fn new(options: Options) -> Result<Self> {
        let build = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build();
        let threads = options.threads.map(build).transpose().map_err(|error| Error::Device {
            device: "cpu".into(),
            detail: format!("cannot start threads: {error}"),
        })?;
        Ok(Cpu {
            level: options.level.unwrap_or_else(Level::detect),
            pool: Pool::new(options.poison),
            ropes: Tables::default(),
            threads,
            peers: None,
        })
    }

    /// The same backend with this transport between processes or threads, such as shared memory.
    #[must_use]
    pub fn with_peers(self, peers: Arc<dyn PeerOps + Send + Sync>) -> Self {
        Cpu { peers: Some(peers), ..self }
    }

    pub(crate) fn level(&self) -> Level {
        self.level
    }

    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    pub(crate) fn rope(&self, rope: Rope, head_dim: usize, positions: usize) -> Arc<Table> {
        self.ropes.get(rope, head_dim, positions)
    }

    /// The elements of an unpacked tensor.
    pub(crate) fn real<'a>(&self, x: &'a Tensor) -> &'a [f32] {
        self.buffer(x)
    }

    #[allow(clippy::expect_used)]
    pub(crate) fn buffer<'a>(&self, x: &'a Tensor) -> &'a Buffer {
        x.storage()
            .expect("every op validates that its operands are unpacked tensors of this device")
    }

    /// A tensor's storage for writing; copied first when it is shared or borrowed.
    #[allow(clippy::expect_used)]
    pub(crate) fn buffer_mut<'a>(&self, x: &'a mut Tensor) -> Result<&'a mut Buffer> {
        if x.is_shared() || self.buffer(x).is_borrowed() {
            let mut copy = self.pool.take(x.len())?;
            copy.copy_from_slice(self.real(x));
            *x = Tensor::from_storage(Arc::new(copy), x.shape(), x.dtype(), x.device().clone());
        }
        Ok(x.storage_mut().expect("this tensor is of this device and not shared"))
    }

    /// A real tensor with this storage.
    pub(crate) fn tensor(&self, data: Buffer, shape: impl Into<Shape>, device: &Device) -> Tensor {
        Tensor::from_storage(Arc::new(data), shape, DType::F32, device.clone())
    }

    pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        match &self.threads {
            Some(threads) => threads.install(f),
            None => f(),
        }
    }

    /// Lets `f` add to `acc`, or to zeros without it.
    pub(crate) fn accumulate(
        &self,
        acc: Option<Tensor>,
        shape: impl Into<Shape>,
        device: &Device,
        f: impl FnOnce(&mut [f32]) -> Result<()> + Send,
    ) -> Result<Tensor> {
        let mut acc = match acc {
            Some(acc) => acc,
            None => device.zeros(shape, DType::F32)?,
        };
        let sum = self.buffer_mut(&mut acc)?;
        self.run(|| f(sum))?;
        Ok(acc)
    }

    /// A new tensor that `f` writes in full.
    pub(crate) fn produce(
        &self,
        shape: impl Into<Shape>,
        device: &Device,
        f: impl FnOnce(&mut [f32]) + Send,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let mut out = self.pool.take(shape.len())?;
        self.run(|| f(&mut out));
        Ok(self.tensor(out, shape, device))
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({})", self.level.name())
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn caps(&self) -> Caps<'_> {
        let peers = self.peers.as_deref().map(|peers| peers as &dyn PeerOps);
        Caps { packing: Some(self), paged: Some(self), peers, ..Caps::default() }
    }
}

impl Memory for Cpu {
    fn memory(&self) -> MemoryStats {
        self.pool.stats()
    }

    fn reset_peak(&self) {
        self.pool.reset_peak();
    }

    fn alloc(&self, len: usize, _: DType) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(self.pool.take(len)?))
    }

    fn upload(&self, data: &[f32]) -> Result<Arc<dyn Storage>> {
        let mut buffer = self.pool.take(data.len())?;
        buffer.copy_from_slice(data);
        Ok(Arc::new(buffer))
    }

    fn upload_f64(&self, data: &[f64]) -> Result<Arc<dyn Storage>> {
        let mut buffer = self.pool.take(data.len())?;
        buffer.iter_mut().zip(data).for_each(|(b, x)| *b = *x as f32);
        Ok(Arc::new(buffer))
    }

    fn upload_i32(&self, data: &[i32]) -> Result<Arc<dyn Storage>> {
        let mut buffer = self.pool.take(data.len())?;
        buffer.as_i32_mut().copy_from_slice(data);
        Ok(Arc::new(buffer))
    }

    fn download(&self, x: &Tensor, out: &mut [f32]) -> Result<()> {
        check_download(self, x, out.len())?;
        if let Some(packed) = x.storage::<Packed>() {
            self.run(|| packed.unpack(out));
            return Ok(());
        }
        out.copy_from_slice(self.real(x));
        Ok(())
    }

    fn download_f64(&self, x: &Tensor) -> Result<Vec<f64>> {
        let mut values = vec![0.0; x.len()];
        self.download(x, &mut values)?;
        Ok(values.into_iter().map(f64::from).collect())
    }

    fn download_i32(&self, x: &Tensor) -> Result<Vec<i32>> {
        check_ints(self, x)?;
        Ok(self.buffer(x).as_i32().to_vec())
    }

    fn fill(&self, x: &mut Tensor, value: f32) -> Result<()> {
        check_fill(self, x)?;
        if x.dtype() == DType::I32 {
            self.buffer_mut(x)?.as_i32_mut().fill(value as i32);
        } else {
            self.buffer_mut(x)?.fill(value);
        }
        Ok(())
    }

    fn copy_rows(
        &self,
        src: &Tensor,
        src_row: usize,
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        check_copy_rows(self, src, src_row, dst, dst_row, count)?;
        let width = src.cols();
        let from = &self.real(src)[src_row * width..][..count * width];
        self.buffer_mut(dst)?[dst_row * width..][..count * width].copy_from_slice(from);
        Ok(())
    }

    fn copy_columns(
        &self,
        src: &Tensor,
        (row, column): (usize, usize),
        dst: &mut Tensor,
        dst_row: usize,
        count: usize,
    ) -> Result<()> {
        check_copy_columns(self, src, (row, column), dst, dst_row, count)?;
        let (width, d) = (src.cols(), dst.cols());
        let from = self.real(src)[row * width..].chunks(width).take(count);
        let to = self.buffer_mut(dst)?[dst_row * d..].chunks_exact_mut(d);
        to.zip(from).for_each(|(to, from)| to.copy_from_slice(&from[column..column + d]));
        Ok(())
    }

    fn id_out_of_range(&self, ids: &Tensor, range: IdRange) -> Result<Option<i32>> {
        check_ints(self, ids)?;
        Ok(self.buffer(ids).as_i32().iter().copied().find(|&id| !range.allows(id)))
    }

    fn add(&self, mut acc: Tensor, x: &Tensor) -> Result<Tensor> {
        check_add(self, &acc, x)?;
        let (level, x) = (self.level, self.real(x));
        let sum = self.buffer_mut(&mut acc)?;
        self.run(|| add(level, x, sum));
        Ok(acc)
    }
}
