//! Per-token loss of whole models.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::PathBuf;

use fox_data::MemoryDataset;
use fox_eval::Subject;
use fox_eval::loss::{LossOptions, evaluate_loss};
use fox_model::{Model, ModelConfig, Pruning, SafetensorsFile};

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn options(length: usize, documents: u64) -> LossOptions {
    LossOptions { length, documents, pruning: Pruning::Off }
}

fn tiny() -> Model {
    let mut config = ModelConfig::fox_pro(32, 1, 2);
    config.vocab_size = 64;
    config.mlp.intermediate_size = Some(48);
    Model::init(&config, 1, &fox_cpu::device()).unwrap()
}

fn subject(model: &Model) -> Subject<'_> {
    Subject { name: "tiny", model, training_length: Some(16) }
}

fn documents(count: u32, len: u32) -> MemoryDataset {
    let document = |d: u32| (0..len).map(|i| (i * 7 + d * 13 + i * i * d) % 64).collect();
    MemoryDataset::new((0..count).map(document).collect(), 64, 0, "test")
}

/// The dumps' losses at positions 1.. are those of a document that starts with the second token, when
/// the first plays the part of the start marker.
#[test]
fn the_loss_of_a_dump_is_the_dumps_loss() {
    for name in ["fox_pro", "fox_llama", "transformer_pro"] {
        let mut file = SafetensorsFile::open(&dump(name).join("io.safetensors")).unwrap();
        let (ids, labels) = (file.read_i32("input_ids").unwrap(), file.read_i32("labels").unwrap());
        let losses = file.read_f32("loss").unwrap();
        let model = Model::from_checkpoint(&dump(name), &fox_cpu::device()).unwrap();
        let time = ids.len() / 2;
        for row in 0..2 {
            let part = row * time..(row + 1) * time;
            assert_eq!(ids[part.clone()][1..], labels[part.clone()][..time - 1]);
            let document = labels[part.clone()].iter().map(|id| *id as u32).collect();
            let data = MemoryDataset::new(vec![document], 64, ids[part.start] as u32, "dump");
            let sums =
                evaluate_loss(&subject(&model), &data, &options(time, 1), None, |_| ()).unwrap();
            for (got, want) in sums.mean().iter().zip(&losses[part]) {
                let error = (got - f64::from(*want)).abs() / f64::from(want.abs()).max(1.0);
                assert!(error < 1e-5, "{name}: {got} {want}");
            }
        }
    }
}

#[test]
fn a_stopped_evaluation_ends_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (tiny(), documents(10, 40));
    let (subject, at) = (subject(&model), |name: &str| folder.path().join(name));
    let run = |documents, name: &str| {
        evaluate_loss(&subject, &data, &options(40, documents), Some(&at(name)), |_| ()).unwrap()
    };
    let whole = run(10, "whole");
    let mut told = Vec::new();
    run(4, "parts");
    let file = at("parts");
    let parts =
        evaluate_loss(&subject, &data, &options(40, 10), Some(&file), |n| told.push(n)).unwrap();
    // Batches differ, so the losses may differ in their last bits; the sums of each are exact.
    for (a, b) in whole.mean().iter().zip(parts.mean()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
    assert_eq!(told.last(), Some(&10));
    let again = run(10, "parts");
    assert_eq!(again, parts);

    let other = evaluate_loss(&subject, &data, &options(39, 10), Some(&file), |_| ());
    let said = other.unwrap_err().to_string();
    assert!(said.contains("holds another evaluation"), "{said}");
}

#[test]
fn short_documents_are_passed_over_and_counted() {
    let data = MemoryDataset::new(
        vec![vec![1; 30], vec![2; 50], vec![], vec![3; 40], vec![4; 45]],
        64,
        0,
        "test",
    );
    let model = tiny();
    let sums = evaluate_loss(&subject(&model), &data, &options(40, 9), None, |_| ()).unwrap();
    assert_eq!((sums.documents, sums.skipped), (3, 2));
}

#[test]
fn bad_input_gets_one_sentence() {
    let model = tiny();
    let said = |data: &MemoryDataset, length| {
        let result = evaluate_loss(&subject(&model), data, &options(length, 1), None, |_| ());
        result.unwrap_err().to_string()
    };
    let empty = MemoryDataset::new(vec![vec![]], 64, 0, "test");
    assert_eq!(said(&empty, 8), "every document of the data is empty");
    assert_eq!(
        said(&documents(2, 5), 8),
        "no document has 8 tokens (the longest has 5); use a shorter length"
    );
    let large = MemoryDataset::new(vec![vec![1; 9]], 65, 0, "test");
    assert_eq!(
        said(&large, 8),
        "the model tiny has 64 token ids, but the data has 65; evaluate it with the tokenizer it was trained with"
    );
    assert!(said(&documents(2, 9), 0).contains("above 0"));
}
