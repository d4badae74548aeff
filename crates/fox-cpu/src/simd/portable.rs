//! Plain Rust: 8 lanes in an array, for machines without any of the above.

use super::Simd;

/// Needs no instructions in particular.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portable;

#[inline(always)]
fn zip(a: [f32; 8], b: [f32; 8], f: impl Fn(f32, f32) -> f32) -> [f32; 8] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    type V = [f32; 8];
    type Bytes = [[i8; 4]; 8];
    type Ints = [i32; 8];
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; 8] {
        // SAFETY: the caller's promise; an array of f32 needs no more alignment than f32.
        unsafe { p.cast::<[f32; 8]>().read() }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [[f32; 8]; 2] {
        // SAFETY: the caller's promise.
        let words = unsafe { p.cast::<[u32; 8]>().read() };
        [words.map(|w| f32::from_bits(w << 16)), words.map(|w| f32::from_bits(w & 0xffff_0000))]
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u32) -> [[i8; 4]; 8] {
        // SAFETY: the caller's promise.
        let words = unsafe { p.cast::<[u32; 8]>().read() };
        words.map(|w| (w ^ 0x8080_8080).to_le_bytes().map(|b| b as i8))
    }
    #[inline(always)]
    fn splat_bytes(self, x: u32) -> [[i8; 4]; 8] {
        [x.to_le_bytes().map(|b| b as i8); 8]
    }
    #[inline(always)]
    fn zero_ints(self) -> [i32; 8] {
        [0; 8]
    }
    #[inline(always)]
    fn dot_bytes(self, a: [[i8; 4]; 8], b: [[i8; 4]; 8], sum: [i32; 8]) -> [i32; 8] {
        std::array::from_fn(|i| {
            (0..4).fold(sum[i], |sum, n| sum + i32::from(a[i][n]) * i32::from(b[i][n]))
        })
    }
    #[inline(always)]
    fn ints_to_f32(self, sum: [i32; 8]) -> [f32; 8] {
        sum.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: [f32; 8]) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write(v) }
    }
    #[inline(always)]
    fn add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        // Rounded twice: a fused multiply-add without the instruction is a slow library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn sqrt(self, a: [f32; 8]) -> [f32; 8] {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn round(self, a: [f32; 8]) -> [f32; 8] {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn scale_pow2(self, a: [f32; 8], n: [f32; 8]) -> [f32; 8] {
        // Two halves, so that each power stays a normal number and the product can be subnormal.
        std::array::from_fn(|i| {
            let n = n[i] as i32;
            let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
            a[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }
    #[inline(always)]
    fn sum(self, a: [f32; 8]) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
}
