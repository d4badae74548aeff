//! Arm NEON: 4 lanes, 32 registers.

use std::arch::aarch64::*;

use super::{Kernel, Simd};

/// Proof that the CPU has NEON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "neon")]
        fn inner<K: Kernel>(simd: Neon, kernel: K) -> K::Out {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where NEON was detected.
        unsafe { inner(self, kernel) }
    }
}

// SAFETY, for every block below: a value of `Neon` proves that the instructions exist, and the
// intrinsics have no other precondition except for the pointers, which the caller answers for.
impl Simd for Neon {
    type V = float32x4_t;
    type Bytes = int8x16_t;
    /// Two lanes of sums for every lane, which are added at the end.
    type Ints = [int32x4_t; 2];
    const LANES: usize = 4;
    const MANY_REGISTERS: bool = true;

    instructions! {
        splat(x: f32) -> float32x4_t = vdupq_n_f32(x);
        splat_bytes(x: u32) -> int8x16_t = vreinterpretq_s8_u32(vdupq_n_u32(x));
        zero_ints() -> [int32x4_t; 2] = [vdupq_n_s32(0); 2];
        ints_to_f32(sum: [int32x4_t; 2]) -> float32x4_t = vcvtq_f32_s32(vpaddq_s32(sum[0], sum[1]));
        add(a: float32x4_t, b: float32x4_t) -> float32x4_t = vaddq_f32(a, b);
        sub(a: float32x4_t, b: float32x4_t) -> float32x4_t = vsubq_f32(a, b);
        mul(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        div(a: float32x4_t, b: float32x4_t) -> float32x4_t = vdivq_f32(a, b);
        // A compare and select, because vmaxq returns NaN where either operand is NaN.
        max(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcgtq_f32(a, b), a, b);
        min(a: float32x4_t, b: float32x4_t) -> float32x4_t = vbslq_f32(vcltq_f32(a, b), a, b);
        mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        sqrt(a: float32x4_t) -> float32x4_t = vsqrtq_f32(a);
        round(a: float32x4_t) -> float32x4_t = vrndnq_f32(a);
        sum(a: float32x4_t) -> f32 = vaddvq_f32(a);
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        // SAFETY: the caller's promise.
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [float32x4_t; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let words = vld1q_u32(p);
            let upper = vandq_u32(words, vdupq_n_u32(0xffff_0000));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(words)), vreinterpretq_f32_u32(upper)]
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u32) -> int8x16_t {
        // SAFETY: the caller's promise.
        unsafe { veorq_s8(vreinterpretq_s8_u32(vld1q_u32(p)), vdupq_n_s8(-128)) }
    }
    #[inline(always)]
    fn dot_bytes(self, a: int8x16_t, b: int8x16_t, sum: [int32x4_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: see above.
        unsafe {
            [
                vpadalq_s16(sum[0], vmull_s8(vget_low_s8(a), vget_low_s8(b))),
                vpadalq_s16(sum[1], vmull_high_s8(a, b)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: float32x4_t) {
        // SAFETY: the caller's promise.
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    fn scale_pow2(self, a: float32x4_t, n: float32x4_t) -> float32x4_t {
        // Two halves, so that each power stays a normal number and the product can be subnormal.
        // SAFETY: see above.
        unsafe {
            let n = vcvtnq_s32_f32(n);
            let half = vshrq_n_s32::<1>(n);
            let bias = vdupq_n_s32(127);
            let low = vshlq_n_s32::<23>(vaddq_s32(half, bias));
            let high = vshlq_n_s32::<23>(vaddq_s32(vsubq_s32(n, half), bias));
            vmulq_f32(vmulq_f32(a, vreinterpretq_f32_s32(low)), vreinterpretq_f32_s32(high))
        }
    }
}
