//! What L(i) costs beyond a forward pass, and how much memory it takes.
//!
//! `cargo bench -p fox-eval --bench loss_cost -- [VOCAB] [LONG]`
//!
//! Alternates the evaluation of L(i) with a forward pass to the logits of the same tokens, so that a loaded
//! machine slows both; prints the median ratio, the peak memory with few and with many documents, and that of
//! one document of LONG tokens beside what its logits alone would take.

use std::time::Instant;

use fox_data::{Dataset, MemoryDataset};
use fox_eval::Subject;
use fox_eval::loss::{LossOptions, evaluate_loss};
use fox_model::{ForwardOptions, Model, ModelConfig, Pruning};
use fox_tensor::{Device, Segments, Tape};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const LENGTH: usize = 2048;
const ROUNDS: usize = 7;

fn main() -> Outcome<()> {
    let mut numbers =
        std::env::args().skip(1).filter(|word| word != "--bench").map(|text| text.parse::<usize>());
    let vocab = numbers.next().transpose()?.unwrap_or(8192);
    let long = numbers.next().transpose()?.unwrap_or(65536);
    let device = fox_cpu::device();
    let config = ModelConfig::fox_pro(256, 4, 4).with_vocab(vocab);
    let model = Model::init(&config, 1, &device)?;
    println!(
        "fox-pro {} x {}, vocabulary {vocab}, {device}",
        config.num_layers, config.hidden_size
    );
    ratio(&model)?;
    for documents in [2, 16] {
        let peak = peak_of(&model, LENGTH, documents)?;
        println!("{documents:>3} documents of {LENGTH}: peak {:.0} MiB", mebibytes(peak));
    }
    let peak = peak_of(&model, long, 1)?;
    let logits = 4 * long * vocab;
    println!(
        "  1 document of {long}: peak {:.0} MiB; its logits alone would take {:.0} MiB",
        mebibytes(peak),
        mebibytes(logits)
    );
    Ok(())
}

fn mebibytes(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn documents(count: usize, length: usize, vocab: usize) -> MemoryDataset {
    let id = |d: usize, i: usize| ((i * 7919 + d * 104_729 + i * i % 613) % vocab) as u32;
    let document = |d| (0..length).map(|i| id(d, i)).collect();
    MemoryDataset::new((0..count).map(document).collect(), vocab, 0, "made up")
}

fn evaluate(model: &Model, data: &dyn Dataset, length: usize, documents: u64) -> Outcome<()> {
    let subject = Subject { name: "m", model, training_length: None };
    let options = LossOptions { length, documents, pruning: Pruning::Off, mask_every: 8 };
    evaluate_loss(&subject, data, &options, None, |_| ())?;
    Ok(())
}

/// Time of L(i) over two documents against a forward pass to the logits of the same tokens, in the batches
/// and chunks of rows that the evaluation uses.
fn ratio(model: &Model) -> Outcome<()> {
    let data = documents(2, LENGTH, model.config().vocab_size);
    let mut ids = vec![0_u32; 2 * LENGTH];
    for (d, part) in ids.chunks_mut(LENGTH).enumerate() {
        data.read(d as u64, 0, part)?;
    }
    let ids: Vec<i32> = ids.into_iter().map(|id| id as i32).collect();
    let mut ratios = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        forward(model, &ids)?;
        let plain = start.elapsed().as_secs_f64();
        let start = Instant::now();
        evaluate(model, &data, LENGTH, 2)?;
        let loss = start.elapsed().as_secs_f64();
        // The first round warms up.
        if round > 0 {
            println!("forward {:7.1} ms, L(i) {:7.1} ms", 1e3 * plain, 1e3 * loss);
            ratios.push(loss / plain);
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!("L(i) / forward: median {:.3} of {ROUNDS}", ratios[ROUNDS / 2]);
    Ok(())
}

fn forward(model: &Model, ids: &[i32]) -> Outcome<()> {
    let device = model.device();
    let inputs = device.from_i32(ids, [ids.len()])?;
    let mut tape = Tape::inference(device);
    let segments = Segments::uniform(ids.len() / LENGTH, LENGTH);
    let options = ForwardOptions { pruning: Pruning::Off, ..ForwardOptions::default() };
    let hidden = model.forward(&mut tape, &inputs, &segments, None, &options)?;
    model.logits(&mut tape, &hidden.states)?;
    Ok(())
}

/// Bytes of device memory that an evaluation needs beyond the model's own.
fn peak_of(model: &Model, length: usize, count: usize) -> Outcome<usize> {
    let device: &Device = model.device();
    let before = device.memory().in_use;
    device.reset_peak();
    evaluate(model, &documents(count, length, model.config().vocab_size), length, count as u64)?;
    Ok(device.memory().peak - before)
}
