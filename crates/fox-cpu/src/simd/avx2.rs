//! AVX2 with FMA: 8 lanes, 16 registers.

use std::arch::x86_64::*;

use super::{Kernel, Simd};

/// Proof that the CPU has AVX2 and FMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Avx2(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma")]
        fn inner<K: Kernel>(simd: Avx2, kernel: K) -> K::Out {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where these features were detected.
        unsafe { inner(self, kernel) }
    }
}

// SAFETY, for every block below: a value of `Avx2` proves that the instructions exist, and the
// intrinsics have no other precondition except for the pointers, which the caller answers for.
impl Simd for Avx2 {
    type V = __m256;
    type Bytes = __m256i;
    type Ints = __m256i;
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = false;

    instructions! {
        splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        splat_bytes(x: u32) -> __m256i = _mm256_set1_epi32(x as i32);
        zero_ints() -> __m256i = _mm256_setzero_si256();
        ints_to_f32(sum: __m256i) -> __m256 = _mm256_cvtepi32_ps(sum);
        add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        sqrt(a: __m256) -> __m256 = _mm256_sqrt_ps(a);
        round(a: __m256) -> __m256 =
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [__m256; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let words = _mm256_loadu_si256(p.cast());
            let upper = _mm256_and_si256(words, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)), _mm256_castsi256_ps(upper)]
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u32) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_xor_si256(_mm256_loadu_si256(p.cast()), _mm256_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn dot_bytes(self, a: __m256i, b: __m256i, sum: __m256i) -> __m256i {
        // The instruction takes unsigned times signed and saturates at 16 bits: with |a| <= 127 a pair stays below.
        // SAFETY: see above.
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a hint, which is never an access.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    fn scale_pow2(self, a: __m256, n: __m256) -> __m256 {
        // Two halves, so that each power stays a normal number and the product can be subnormal.
        // SAFETY: see above.
        unsafe {
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
            let rest = _mm256_sub_epi32(n, half);
            let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias));
            let a = _mm256_mul_ps(a, _mm256_castsi256_ps(low));
            _mm256_mul_ps(a, _mm256_castsi256_ps(high))
        }
    }
    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        // SAFETY: see above.
        unsafe {
            let pair = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_add_ps(pair, _mm_movehl_ps(pair, pair));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
        }
    }
}
