//! AVX-512: 16 lanes, 32 registers.

use std::arch::x86_64::*;

use super::dot::{BLOCK, Dot, DotKernel, TO_INTEGER, inverse_of};
use super::{Kernel, Simd};

/// Proof that the CPU has AVX-512 F, DQ, BW and VL, and BF16 and VNNI where they are set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512 {
    bf16: bool,
    vnni: bool,
}

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma"))
        .then(|| Avx512 {
            bf16: is_x86_feature_detected!("avx512bf16"),
            vnni: is_x86_feature_detected!("avx512vnni"),
        })
    }

    /// Without BF16 and VNNI.
    pub(super) fn plain(self) -> Self {
        Avx512 { bf16: false, vnni: false }
    }

    /// Runs a kernel of bf16 products with the BF16 instructions; gives it back where they are missing.
    #[inline]
    pub(super) fn run_bf16<K: DotKernel>(self, kernel: K) -> Result<(), K> {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma")]
        fn inner<K: DotKernel>(dot: Bf16, kernel: K) {
            kernel.run(dot);
        }
        if !self.bf16 {
            return Err(kernel);
        }
        // SAFETY: these features were detected.
        unsafe { inner(Bf16(self), kernel) };
        Ok(())
    }

    /// Runs a kernel of 8-bit products with the VNNI instructions; gives it back where they are missing.
    #[inline]
    pub(super) fn run_int8<K: DotKernel>(self, kernel: K) -> Result<(), K> {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma")]
        fn inner<K: DotKernel>(dot: Vnni, kernel: K) {
            kernel.run(dot);
        }
        if !self.vnni {
            return Err(kernel);
        }
        // SAFETY: these features were detected.
        unsafe { inner(Vnni(self), kernel) };
        Ok(())
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
        fn inner<K: Kernel>(simd: Avx512, kernel: K) -> K::Out {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where these features were detected.
        unsafe { inner(self, kernel) }
    }
}

// SAFETY, for every block below: a value of `Avx512` proves that the instructions exist, and the
// intrinsics have no other precondition except for the pointers, which the caller answers for.
impl Simd for Avx512 {
    type V = __m512;
    type Bytes = __m512i;
    type Ints = __m512i;
    const LANES: usize = 16;
    const MANY_REGISTERS: bool = true;

    instructions! {
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        splat_bytes(x: u32) -> __m512i = _mm512_set1_epi32(x as i32);
        zero_ints() -> __m512i = _mm512_setzero_si512();
        ints_to_f32(sum: __m512i) -> __m512 = _mm512_cvtepi32_ps(sum);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        sqrt(a: __m512) -> __m512 = _mm512_sqrt_ps(a);
        round(a: __m512) -> __m512 =
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        scale_pow2(a: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(a, n);
        sum(a: __m512) -> f32 = _mm512_reduce_add_ps(a);
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const u32) -> [__m512; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let words = _mm512_loadu_si512(p.cast());
            let upper = _mm512_and_si512(words, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(upper)]
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi8(-128)) }
    }
    #[inline(always)]
    fn dot_bytes(self, a: __m512i, b: __m512i, sum: __m512i) -> __m512i {
        // As with AVX2: |a| times b with the sign of a.
        // SAFETY: see above.
        unsafe {
            let negative = _mm512_movepi8_mask(a);
            let b = _mm512_mask_sub_epi8(b, negative, _mm512_setzero_si512(), b);
            let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(a), b);
            _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        // SAFETY: a hint, which is never an access.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(p, v) }
    }
}

/// Products of bf16 with `vdpbf16ps`.
#[derive(Clone, Copy)]
struct Bf16(Avx512);

// SAFETY, for every block below: a `Bf16` exists only inside `run_bf16`, where the instructions were detected.
impl Dot for Bf16 {
    type S = Avx512;
    type Weights = __m512bh;
    type Splat = __m512bh;
    type Sum = __m512;
    const INPUTS: usize = 2;
    const WORDS: usize = 1;
    const SCALED: bool = false;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn pack(self, x: &[f32; BLOCK], out: &mut [u32]) -> (f32, i32) {
        assert_eq!(out.len(), BLOCK / 2);
        for (x, out) in x.chunks_exact(32).zip(out.chunks_exact_mut(16)) {
            // SAFETY: see above; 32 values are read, and as many of half the size written.
            unsafe {
                let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr()));
                let pairs = _mm512_cvtne2ps_pbh(high, low);
                out.as_mut_ptr().cast::<__m512bh>().write_unaligned(pairs);
            }
        }
        (1.0, 0)
    }
    #[inline(always)]
    fn start(self, total: __m512, _: i32) -> __m512 {
        total
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> __m512bh {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<__m512bh>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn splat(self, p: *const u32) -> __m512bh {
        // SAFETY: the caller's promise; both types are 512 bits without structure.
        unsafe { std::mem::transmute(_mm512_set1_epi32(*p as i32)) }
    }
    #[inline(always)]
    fn add(self, w: __m512bh, x: __m512bh, sum: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_dpbf16_ps(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn finish(self, sum: __m512, _: __m512, _: f32, _: *const f32) -> __m512 {
        sum
    }
}

/// Products of 8-bit integers with `vpdpbusd`.
#[derive(Clone, Copy)]
struct Vnni(Avx512);

// SAFETY, for every block below: a `Vnni` exists only inside `run_int8`, where the instructions were detected.
impl Dot for Vnni {
    type S = Avx512;
    type Weights = __m512i;
    type Splat = __m512i;
    type Sum = __m512i;
    const INPUTS: usize = 4;
    const WORDS: usize = 1;
    const SCALED: bool = true;

    #[inline(always)]
    fn simd(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn pack(self, x: &[f32; BLOCK], out: &mut [u32]) -> (f32, i32) {
        assert_eq!(out.len(), BLOCK / 4);
        // As `dot::quantize`, operation by operation.
        // SAFETY: see above; 64 values are read, and as many bytes written.
        unsafe {
            let load = |i: usize| _mm512_loadu_ps(x[16 * i..].as_ptr());
            let x = [load(0), load(1), load(2), load(3)];
            let magnitude = |x: __m512| _mm512_castps_si512(_mm512_abs_ps(x));
            let low = _mm512_max_epu32(magnitude(x[0]), magnitude(x[1]));
            let high = _mm512_max_epu32(magnitude(x[2]), magnitude(x[3]));
            let largest = f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(low, high)));
            let (inverse, to_integer) =
                (_mm512_set1_ps(inverse_of(largest)), _mm512_set1_ps(TO_INTEGER));
            let mut sum = _mm_setzero_si128();
            for (x, out) in x.into_iter().zip(out.chunks_exact_mut(4)) {
                let bits =
                    _mm512_castps_si512(_mm512_add_ps(_mm512_mul_ps(x, inverse), to_integer));
                let bytes = _mm512_cvtepi32_epi8(bits);
                sum = _mm_dpbusd_epi32(sum, _mm_set1_epi8(1), bytes);
                out.as_mut_ptr().cast::<__m128i>().write_unaligned(bytes);
            }
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b01_00_11_10>(sum));
            let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b10_11_00_01>(sum));
            (largest / 127.0, -128 * _mm_cvtsi128_si32(sum))
        }
    }
    #[inline(always)]
    fn start(self, _: __m512, offset: i32) -> __m512i {
        // The weights are unsigned, 128 too large; the offset takes it back.
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(offset) }
    }
    #[inline(always)]
    unsafe fn load(self, p: *const u32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn splat(self, p: *const u32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32(*p as i32) }
    }
    #[inline(always)]
    fn add(self, w: __m512i, x: __m512i, sum: __m512i) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_dpbusd_epi32(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn finish(self, sum: __m512i, total: __m512, x: f32, w: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let scale = _mm512_mul_ps(_mm512_set1_ps(x), _mm512_loadu_ps(w));
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, total)
        }
    }
}
