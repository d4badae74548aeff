//! One vector trait, written once for every instruction set, chosen once at run time.
//!
//! A value of a [`Simd`] type is proof that the CPU has the instructions: it can only be made by
//! [`Level::detect`] and friends, so the methods are safe to call. Kernels implement [`Kernel`] and
//! are compiled once per instruction set by [`Level::run`]; all functions they call must be `#[inline(always)]`, so that
//! they are inlined into the function with the target features.

/// Methods that are one expression of intrinsics each.
macro_rules! instructions {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $out:ty = $value:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $out {
            // SAFETY: `self` proves that the instructions exist; these have no other precondition.
            unsafe { $value }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dot;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod rows;

pub use dot::{BLOCK, Dot, DotKernel, to_bf16};
pub use math::{exp, log_sigmoids, sigmoid, softplus};
pub use rows::{dot, map, map_two, scale_add, sum, update};

/// Vectors of f32 of one instruction set.
///
/// NaN handling of `max` and `min`: the second operand is returned when either is NaN.
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector of `LANES` f32.
    type V: Copy;
    /// Four 8-bit integers per lane.
    type Bytes: Copy;
    /// A 32-bit sum of products of 8-bit integers per lane.
    type Ints: Copy;
    /// f32 per vector.
    const LANES: usize;
    /// Whether there are 32 vector registers rather than 16: decides the register tile.
    const MANY_REGISTERS: bool;

    /// All lanes set to `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Reads `LANES` values.
    ///
    /// # Safety
    /// `p` must be valid for reading `LANES` f32; no alignment is needed.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Reads `LANES` pairs of bfloat16 values, one pair per 4-byte word: the lower halves, then the upper halves.
    ///
    /// # Safety
    /// `p` must be valid for reading `LANES` words.
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [Self::V; 2];
    /// Reads `LANES` words of four 8-bit integers each, stored as unsigned with an offset of 128.
    ///
    /// # Safety
    /// `p` must be valid for reading `LANES` words.
    unsafe fn load_bytes(self, p: *const u32) -> Self::Bytes;
    /// Four 8-bit integers, the same in every lane.
    fn splat_bytes(self, x: u32) -> Self::Bytes;
    /// Sums of zero.
    fn zero_ints(self) -> Self::Ints;
    /// `sum + a . b` in every lane, over its four integers, none of which is -128.
    fn dot_bytes(self, a: Self::Bytes, b: Self::Bytes, sum: Self::Ints) -> Self::Ints;
    /// Sums below 2^24 as f32.
    fn ints_to_f32(self, sum: Self::Ints) -> Self::V;
    /// Prefetches a cache line. `p` may be any address.
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
    /// Writes `LANES` values.
    ///
    /// # Safety
    /// `p` must be valid for writing `LANES` f32; no alignment is needed.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger, lane by lane.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller, lane by lane.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Square root.
    fn sqrt(self, a: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for integral `n` in -160..=128, gradually down to zero.
    fn scale_pow2(self, a: Self::V, n: Self::V) -> Self::V;
    /// Sum of the lanes, in a fixed order.
    fn sum(self, a: Self::V) -> f32;
}

/// A computation that is compiled for every instruction set.
pub trait Kernel {
    /// Result.
    type Out;
    /// The computation; implementations must be `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Out;
}

/// The instruction set in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// AVX-512 F, DQ, BW and VL, and which of BF16 and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    /// Arm NEON.
    #[cfg(target_arch = "aarch64")]
    Neon(neon::Neon),
    /// Plain Rust, on any machine.
    Portable(portable::Portable),
}

impl Level {
    /// The best instruction set of this CPU.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Every instruction set this CPU can run, best first; tests go through all of them.
    pub fn available() -> Vec<Self> {
        let mut levels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            levels.extend(avx512::Avx512::detect().map(Level::Avx512));
            levels.extend(avx2::Avx2::detect().map(Level::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        levels.extend(neon::Neon::detect().map(Level::Neon));
        levels.push(Level::Portable(portable::Portable));
        levels
    }

    /// The same vectors without the optional instructions for products of bf16 and 8-bit integers; for tests.
    pub fn plain(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) => Level::Avx512(simd.plain()),
            other => other,
        }
    }

    /// Its name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => "avx2+fma",
            #[cfg(target_arch = "aarch64")]
            Level::Neon(_) => "neon",
            Level::Portable(_) => "portable",
        }
    }

    /// Runs a kernel with this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(simd) => simd.run(kernel),
            #[cfg(target_arch = "aarch64")]
            Level::Neon(simd) => simd.run(kernel),
            Level::Portable(simd) => kernel.run(simd),
        }
    }
}

/// Defines a function that is compiled for every instruction set: `fn name<'k, S>(s, args...)`
/// becomes `name(level, args...)`, with `s: S` the vectors of that level.
macro_rules! simd_fn {
    ($(#[$doc:meta])* $vis:vis fn $name:ident<$life:lifetime, $simd:ident>(
        $s:ident $(, $arg:ident: $ty:ty)* $(,)?
    ) $(-> $out:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name<$life>(level: $crate::simd::Level $(, $arg: $ty)*) $(-> $out)? {
            struct Call<$life> {
                $($arg: $ty,)*
                life: std::marker::PhantomData<&$life ()>,
            }
            impl<$life> $crate::simd::Kernel for Call<$life> {
                type Out = $crate::simd::simd_fn!(@out $($out)?);
                #[inline(always)]
                fn run<$simd: $crate::simd::Simd>(self, $s: $simd) -> Self::Out {
                    let Call { $($arg,)* life: _ } = self;
                    $body
                }
            }
            level.run(Call { $($arg,)* life: std::marker::PhantomData })
        }
    };
    (@out) => { () };
    (@out $out:ty) => { $out };
}
pub(crate) use simd_fn;
