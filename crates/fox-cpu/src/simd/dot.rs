//! Sums of products in fewer bits than f32, with the instructions for them where the CPU has them.
//!
//! Weights and activations come in 4-byte words of two bf16 values or four 8-bit integers. One word per column is a
//! step; steps run along the inputs, lanes along the columns, so every sum has one order whatever the vectors are.
//! - bf16: two fused multiply-adds into f32 per word, the upper half first. `vdpbf16ps` does exactly this, apart from
//!   subnormal numbers, which it takes for zero.
//! - int8: exact integer sums of a block of inputs, which are multiplied by the scales of the block and added in f32.

use fox_tensor::INT8_BLOCK;

use super::{Kernel, Level, Simd};

/// Inputs between two rounds of scales; rows of weights and activations are padded to whole blocks.
pub const BLOCK: usize = INT8_BLOCK;

/// Added to a number of at most 2^21, it moves the nearest integer, ties to even, to the lowest bits.
pub const TO_INTEGER: f32 = 12_582_912.0;

/// Arithmetic of one weight format on one instruction set.
pub trait Dot: Copy {
    /// Its vectors of f32.
    type S: Simd;
    /// Weights of `LANES` columns in one step.
    type Weights: Copy;
    /// Activations of one row in one step, in every lane.
    type Splat: Copy;
    /// Sums under way.
    type Sum: Copy;
    /// Inputs of a step.
    const INPUTS: usize;
    /// Words that the activations of a step take.
    const WORDS: usize;
    /// Whether blocks have scales.
    const SCALED: bool;

    /// Its vectors of f32.
    fn simd(self) -> Self::S;
    /// Rounds a block of activations to `out: [BLOCK / INPUTS * WORDS]`; returns their scale, and -128 times their
    /// sum.
    fn pack(self, x: &[f32; BLOCK], out: &mut [u32]) -> (f32, i32);
    /// The sum of a block before its first step.
    fn start(self, total: <Self::S as Simd>::V, offset: i32) -> Self::Sum;
    /// Reads the weights of `LANES` columns.
    ///
    /// # Safety
    /// `p` must be valid for reading `LANES` words.
    unsafe fn load(self, p: *const u32) -> Self::Weights;
    /// Reads the activations of a step.
    ///
    /// # Safety
    /// `p` must be valid for reading `WORDS` words.
    unsafe fn splat(self, p: *const u32) -> Self::Splat;
    /// Adds the products of one step.
    fn add(self, w: Self::Weights, x: Self::Splat, sum: Self::Sum) -> Self::Sum;
    /// Adds the sum of a block, with the scale of the activations and of the weights of `LANES` columns.
    ///
    /// # Safety
    /// With `SCALED`, `w` must be valid for reading `LANES` f32.
    unsafe fn finish(
        self,
        sum: Self::Sum,
        total: <Self::S as Simd>::V,
        x: f32,
        w: *const f32,
    ) -> <Self::S as Simd>::V;
}

/// A computation that is compiled for the arithmetic of every instruction set.
pub trait DotKernel: Sized {
    /// The computation; implementations must be `#[inline(always)]`.
    fn run<D: Dot>(self, dot: D);
}

impl Level {
    /// Runs a kernel with products of bf16.
    #[inline]
    pub fn run_bf16<K: DotKernel>(self, kernel: K) {
        #[cfg(target_arch = "x86_64")]
        let kernel = match self {
            Level::Avx512(simd) => match simd.run_bf16(kernel) {
                Ok(()) => return,
                Err(kernel) => kernel,
            },
            _ => kernel,
        };
        self.run(WithBf16(kernel));
    }

    /// Runs a kernel with products of 8-bit integers.
    #[inline]
    pub fn run_int8<K: DotKernel>(self, kernel: K) {
        #[cfg(target_arch = "x86_64")]
        let kernel = match self {
            Level::Avx512(simd) => match simd.run_int8(kernel) {
                Ok(()) => return,
                Err(kernel) => kernel,
            },
            _ => kernel,
        };
        self.run(WithInt8(kernel));
    }
}

struct WithBf16<K>(K);

impl<K: DotKernel> Kernel for WithBf16<K> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.run(FusedBf16(s));
    }
}

struct WithInt8<K>(K);

impl<K: DotKernel> Kernel for WithInt8<K> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.run(Int8(s));
    }
}

/// Products of bf16 with multiply-adds of f32. Activations are stored as f32 with the upper 16 bits set.
#[derive(Clone, Copy)]
struct FusedBf16<S>(S);

impl<S: Simd> Dot for FusedBf16<S> {
    type S = S;
    type Weights = [S::V; 2];
    type Splat = [S::V; 2];
    type Sum = S::V;
    const INPUTS: usize = 2;
    const WORDS: usize = 2;
    const SCALED: bool = false;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    fn pack(self, x: &[f32; BLOCK], out: &mut [u32]) -> (f32, i32) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = u32::from(to_bf16(*x)) << 16);
        (1.0, 0)
    }
    #[inline(always)]
    fn start(self, total: S::V, _: i32) -> S::V {
        total
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe { self.0.load_bf16_pairs(p) }
    }
    #[inline(always)]
    unsafe fn splat(self, p: *const u32) -> [S::V; 2] {
        let s = self.0;
        // SAFETY: the caller's promise.
        unsafe { [s.splat(f32::from_bits(*p)), s.splat(f32::from_bits(*p.add(1)))] }
    }
    #[inline(always)]
    fn add(self, w: [S::V; 2], x: [S::V; 2], sum: S::V) -> S::V {
        self.0.mul_add(w[0], x[0], self.0.mul_add(w[1], x[1], sum))
    }
    #[inline(always)]
    unsafe fn finish(self, sum: S::V, _: S::V, _: f32, _: *const f32) -> S::V {
        sum
    }
}

/// Products of 8-bit integers.
#[derive(Clone, Copy)]
struct Int8<S>(S);

impl<S: Simd> Dot for Int8<S> {
    type S = S;
    type Weights = S::Bytes;
    type Splat = S::Bytes;
    type Sum = S::Ints;
    const INPUTS: usize = 4;
    const WORDS: usize = 1;
    const SCALED: bool = true;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    fn pack(self, x: &[f32; BLOCK], out: &mut [u32]) -> (f32, i32) {
        quantize(x, out)
    }
    #[inline(always)]
    fn start(self, _: S::V, _: i32) -> S::Ints {
        self.0.zero_ints()
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> S::Bytes {
        // SAFETY: the caller's promise.
        unsafe { self.0.load_bytes(p) }
    }
    #[inline(always)]
    unsafe fn splat(self, p: *const u32) -> S::Bytes {
        // SAFETY: the caller's promise.
        self.0.splat_bytes(unsafe { *p })
    }
    #[inline(always)]
    fn add(self, w: S::Bytes, x: S::Bytes, sum: S::Ints) -> S::Ints {
        self.0.dot_bytes(w, x, sum)
    }
    #[inline(always)]
    unsafe fn finish(self, sum: S::Ints, total: S::V, x: f32, w: *const f32) -> S::V {
        let s = self.0;
        // SAFETY: the caller's promise.
        let scale = s.mul(s.splat(x), unsafe { s.load(w) });
        s.mul_add(s.ints_to_f32(sum), scale, total)
    }
}

/// What takes the largest magnitude of a block to 127; zero for a block of zeros, and for NaN.
#[inline(always)]
pub fn inverse_of(largest: f32) -> f32 {
    if largest > 1e-30 { 127.0 / largest } else { 0.0 }
}

/// Rounds activations to 8 bits, the largest magnitude to 127, four to a word; returns their scale, and -128 times
/// their sum. NaN and infinity make the scale so, and thereby the products.
#[inline(always)]
pub fn quantize(x: &[f32; BLOCK], out: &mut [u32]) -> (f32, i32) {
    // As integers, magnitudes have the same order, and NaN is the largest.
    let largest = x.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
    let largest = f32::from_bits(largest);
    let inverse = inverse_of(largest);
    let mut rounded = [0i8; BLOCK];
    for (rounded, x) in rounded.iter_mut().zip(x) {
        *rounded = (x * inverse + TO_INTEGER).to_bits() as i8;
    }
    let sum: i32 = rounded.iter().map(|x| i32::from(*x)).sum();
    for (out, x) in out.iter_mut().zip(rounded.chunks_exact(4)) {
        *out = u32::from_le_bytes([x[0] as u8, x[1] as u8, x[2] as u8, x[3] as u8]);
    }
    (largest / 127.0, -128 * sum)
}

/// The nearest bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}
