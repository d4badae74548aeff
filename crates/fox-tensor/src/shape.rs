//! Shapes of up to four dimensions, stored inline, and element types.

use std::fmt;

/// The extents of a tensor, outermost first: at most four, stored inline. The product of all nonzero extents fits a
/// `usize`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; 4],
    rank: u8,
}

impl Shape {
    /// The extents as a slice.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank as usize]
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Number of elements (1 for a scalar).
    pub fn len(&self) -> usize {
        self.dims().iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of elements, or `None` when the product of the nonzero extents does not fit a `usize`. For shapes
    /// read from files.
    pub(crate) fn checked_len(dims: &[usize]) -> Option<usize> {
        let product = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d.max(1)))?;
        Some(if dims.contains(&0) { 0 } else { product })
    }
}

impl From<&[usize]> for Shape {
    /// # Panics
    /// There are more than four dimensions, or more elements than a `usize` counts. Shapes from files are checked by
    /// the reader.
    fn from(dims: &[usize]) -> Self {
        assert!(dims.len() <= 4, "a tensor has at most 4 dimensions, not {}", dims.len());
        assert!(Shape::checked_len(dims).is_some(), "the shape {dims:?} is too large");
        let mut shape = Shape { dims: [1; 4], rank: dims.len() as u8 };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape::from(&dims[..])
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// Element type of a tensor as the program sees it. A backend may compute wider: the oracle keeps
/// every real number in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16: activations and weight copies on a GPU.
    Bf16,
    /// 32-bit signed integer: token ids and labels.
    I32,
}

impl DType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
        })
    }
}
