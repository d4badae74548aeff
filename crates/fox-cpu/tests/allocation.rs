//! A steady training step lives on the pool: the system allocator gives only bookkeeping and the packing
//! workspace of the matrix product crate, which frees it at the end of each call.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use fox_cpu::{Options, device_with};
use fox_model::{ForwardOptions, Model, ModelConfig, ParamGroup, ParamSpec};
use fox_tensor::{AdamW, DType, Gradients, ParamId, Segments, Tape};

static BYTES: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call goes to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
#[cfg_attr(
    not(target_arch = "x86_64"),
    ignore = "the product crate sizes its workspace by the caches, which it knows on x86-64 only"
)]
fn steady_step_allocates_from_the_pool() {
    // With one thread: how many tasks have scratch at a time would depend on how busy the machine is.
    let device = device_with(Options { threads: Some(1), ..Options::default() }).unwrap();
    let (batch, seq) = (4, 256);
    let config = ModelConfig::fox_pro(128, 2, 2).with_vocab(256);
    let mut model = Model::init(&config, 0, &device).unwrap();
    let rows = batch * seq;
    let ids: Vec<i32> = (0..rows as i32).map(|i| i * 31 % 256).collect();
    let tokens = device.from_i32(&ids, [rows]).unwrap();
    let weights = device.full([rows], 1.0 / rows as f32).unwrap();
    let segments = Segments::uniform(batch, seq);
    let zeros = |id: usize| {
        let shape = model.params().value(ParamId(id)).shape();
        (device.zeros(shape, DType::F32).unwrap(), device.zeros(shape, DType::F32).unwrap())
    };
    let mut moments: Vec<_> = (0..model.params().len()).map(zeros).collect();

    let mut reserved = 0;
    for step in 1..=4 {
        if step == 4 {
            reserved = device.memory().reserved;
            BYTES.store(0, Ordering::Relaxed);
            LARGEST.store(0, Ordering::Relaxed);
        }
        let mut gradients = Gradients::default();
        let mut tape = Tape::recording(&device);
        let options = ForwardOptions::default();
        model.loss(&mut tape, &tokens, &tokens, &weights, &segments, &options).unwrap();
        tape.backward(&mut gradients).unwrap();
        for (id, gradient) in gradients.iter() {
            let (m, v) = &mut moments[id.0];
            let update = AdamW {
                lr: 1e-3,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                step,
                grad_scale: 1.0,
            };
            let param = model.params_mut().value_mut(id);
            device.backend().adamw(param, gradient, m, v, &update).unwrap();
        }
    }
    let (bytes, largest) = counted();
    let peak = device.memory().peak;
    assert_eq!(device.memory().reserved, reserved, "the pool does not grow");

    // What the matrix products alone take from the system: the crate sizes their workspace by the caches.
    BYTES.store(0, Ordering::Relaxed);
    LARGEST.store(0, Ordering::Relaxed);
    let backend = device.backend();
    let is_product = |spec: &ParamSpec| spec.dims.len() == 2 && spec.group != ParamGroup::Embedding;
    for (_, spec, weight) in model.params().iter().filter(|(_, spec, _)| is_product(spec)) {
        let x = device.full([rows, spec.dims[1]], 1.0).unwrap();
        let y = backend.linear_fwd(&x, weight, None).unwrap();
        backend.linear_bwd_input(&y, weight, None).unwrap();
        backend.linear_bwd_weight(&y, &x, None).unwrap();
    }
    let (workspace, largest_workspace) = counted();
    println!(
        "{bytes} bytes from the system, the largest {largest}; products alone {workspace}, the \
         largest {largest_workspace}; peak of the pool {peak}"
    );
    // The smallest activation of this step has 512 KiB: none of them fits beside the workspace.
    assert!(bytes <= workspace + (256 << 10), "{bytes} bytes, products alone {workspace}");
    assert!(largest <= largest_workspace.max(256 << 10), "an allocation of {largest} bytes");
}

/// Bytes that the system was asked for since they were last set to 0, and the largest allocation.
fn counted() -> (usize, usize) {
    (BYTES.load(Ordering::Relaxed), LARGEST.load(Ordering::Relaxed))
}
