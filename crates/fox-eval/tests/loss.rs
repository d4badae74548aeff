//! Per-token loss of whole models.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::PathBuf;

use common::{broken, fill, says_not_finite};
use fox_data::MemoryDataset;
use fox_eval::Subject;
use fox_eval::loss::{LossOptions, evaluate_loss};
use fox_model::{Model, ModelConfig, Pruning, SafetensorsFile};

fn dump(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn options(length: usize, documents: u64) -> LossOptions {
    LossOptions { length, documents, pruning: Pruning::Off, mask_every: 8 }
}

fn tiny() -> Model {
    let config = ModelConfig::fox_pro(32, 1, 2).with_vocab(64).with_mlp_width(48);
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
fn loss_matches_reference_dump() {
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
fn resume_is_bit_exact() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (tiny(), documents(10, 40));
    let (subject, at) = (subject(&model), |name: &str| folder.path().join(name));
    let run = |documents, name: &str| {
        evaluate_loss(&subject, &data, &options(40, documents), Some(&at(name)), |_| ()).unwrap()
    };
    let whole = run(10, "whole");
    let mut reported = Vec::new();
    run(4, "parts");
    let file = at("parts");
    let parts = evaluate_loss(&subject, &data, &options(40, 10), Some(&file), |n| reported.push(n))
        .unwrap();
    // Batches differ, so the losses may differ in their last bits; the sums of each are exact.
    for (a, b) in whole.mean().iter().zip(parts.mean()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
    assert_eq!(reported.last(), Some(&10));
    let again = run(10, "parts");
    assert_eq!(again, parts);

    // Another length is measured from the beginning.
    let other = evaluate_loss(&subject, &data, &options(39, 10), Some(&file), |_| ()).unwrap();
    assert_eq!((other.length(), other.documents), (39, 10));
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

/// A document that is long enough for several chunks.
#[test]
fn few_documents_give_all_their_chunks() {
    let model = common::dump("fox_pro");
    let text =
        |d: u32, len: u32| (0..len).map(|i| (i * i * (d + 3) + d) % 64).collect::<Vec<u32>>();
    let texts = [text(0, 25), text(1, 61)];
    let run = |texts: &[Vec<u32>], count| {
        let data = MemoryDataset::new(texts.to_vec(), 64, 5, "test");
        evaluate_loss(&subject(&model), &data, &options(20, count), None, |_| ()).unwrap()
    };
    let sums = run(&texts, 9);
    assert_eq!((sums.chunks, sums.documents, sums.groups()), (4, 2, 2));
    let chunks = [&texts[0][..20], &texts[1][..20], &texts[1][20..40], &texts[1][40..60]];
    let each = chunks.map(|chunk| alone(&model, chunk.to_vec(), 5));
    for i in 0..20 {
        let expected = each.iter().map(|losses| losses[i]).sum::<f64>() / 4.0;
        assert!((sums.mean()[i] - expected).abs() < 1e-5, "position {i}");
    }
    // A single document leaves nothing but its chunks to draw.
    let sums = run(&texts[1..], 2);
    assert_eq!((sums.chunks, sums.documents, sums.groups()), (2, 1, 2));
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

/// Losses of one document by itself.
fn alone(model: &Model, document: Vec<u32>, bos: u32) -> Vec<f64> {
    let options = options(document.len(), 1);
    let data = MemoryDataset::new(vec![document], 64, bos, "test");
    evaluate_loss(&subject(model), &data, &options, None, |_| ()).unwrap().mean()
}

/// Short documents run through the model side by side: none may see another, nor start with its last token.
#[test]
fn batched_documents_are_isolated() {
    for name in ["fox_pro", "transformer_pro", "delta_net", "hgrn2", "mamba2"] {
        let model = common::dump(name);
        let texts: Vec<Vec<u32>> =
            (0..3).map(|d| (0..20).map(|i| (i * i * (d + 2) + 7 * d + i) % 64).collect()).collect();
        let data = MemoryDataset::new(texts.clone(), 64, 5, "test");
        let sums = evaluate_loss(&subject(&model), &data, &options(20, 3), None, |_| ()).unwrap();
        let each: Vec<Vec<f64>> = texts.into_iter().map(|t| alone(&model, t, 5)).collect();
        for (i, mean) in sums.mean().into_iter().enumerate() {
            let expected = each.iter().map(|losses| losses[i]).sum::<f64>() / 3.0;
            assert!((mean - expected).abs() < 1e-5, "{name}, position {i}: {mean} {expected}");
        }
    }
}

/// L(i) belongs to token i and depends on the tokens before it alone.
#[test]
fn loss_is_at_the_position_of_its_token() {
    let model = common::dump("fox_pro");
    let text: Vec<u32> = (0..12).map(|i| (i * i * 5 + i) % 64).collect();
    let before = alone(&model, text.clone(), 5);
    for at in 0..12 {
        let mut other = text.clone();
        other[at] = (other[at] + 31) % 64;
        let after = alone(&model, other, 5);
        for i in 0..12 {
            let change = (before[i] - after[i]).abs();
            match i {
                i if i < at => assert!(change < 1e-6, "token {at} changed the loss at {i}"),
                i if i == at => assert!(change > 1e-2, "the loss at {i} is not of token {at}"),
                _ => {}
            }
        }
    }
    let other_start = alone(&model, text, 6);
    assert!(
        (before[0] - other_start[0]).abs() > 1e-2,
        "the first token does not follow the marker"
    );
}

#[test]
fn resume_skips_the_same_documents() {
    let folder = tempfile::tempdir().unwrap();
    let model = common::dump("fox_pro");
    let text = |d: u32, len: u32| (0..len).map(|i| (i * (d + 3) + d) % 64).collect::<Vec<u32>>();
    let texts = vec![text(0, 9), text(1, 20), text(2, 3), text(3, 25), text(4, 20), text(5, 8)];
    let data = MemoryDataset::new(texts.clone(), 64, 0, "test");
    let run = |count, name: &str| {
        let path = folder.path().join(name);
        evaluate_loss(&subject(&model), &data, &options(20, count), Some(&path), |_| ()).unwrap()
    };
    let whole = run(9, "whole");
    assert_eq!((whole.documents, whole.skipped), (3, 3));
    for count in [1, 2, 3, 9] {
        run(count, "parts");
    }
    let parts = run(9, "parts");
    assert_eq!((parts.documents, parts.skipped), (3, 3));
    let long = [&texts[1], &texts[3], &texts[4]];
    let each: Vec<Vec<f64>> = long.map(|t| alone(&model, t[..20].to_vec(), 0)).to_vec();
    for i in 0..20 {
        let expected = each.iter().map(|losses| losses[i]).sum::<f64>() / 3.0;
        for found in [whole.mean()[i], parts.mean()[i]] {
            assert!((found - expected).abs() < 1e-5, "{i}: {found} {expected}");
        }
    }
}

/// Wherever a NaN sits, it must not vanish during the forward pass to the loss.
#[test]
fn nan_in_a_parameter_fails_the_evaluation() {
    for name in ["fox_pro", "fox_llama", "transformer_pro", "delta_net", "hgrn2", "mamba2"] {
        let model = common::dump(name);
        let ids: Vec<_> =
            model.params().iter().map(|(id, spec, _)| (id, spec.name.clone())).collect();
        let data = documents(2, 70);
        for (id, parameter) in ids {
            let mut model = common::dump(name);
            fill(&mut model, id, f32::NAN);
            for pruning in [Pruning::Off, Pruning::Tolerance(-10.0)] {
                let options = LossOptions { pruning, ..options(70, 2) };
                let said = match evaluate_loss(&subject(&model), &data, &options, None, |_| ()) {
                    Ok(sums) => panic!("{name}, {parameter}, {pruning:?}: {:?}", &sums.mean()[..3]),
                    Err(error) => error.to_string(),
                };
                assert!(says_not_finite(&said), "{name}, {parameter}: {said}");
            }
        }
    }
}

#[test]
fn non_finite_loss_is_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    let mut large = tiny();
    let id = large.params().find("lm_head.weight").unwrap();
    fill(&mut large, id, f32::MAX);
    let models = [broken(tiny(), f32::NAN), broken(tiny(), f32::INFINITY), large];
    for model in models {
        let result = evaluate_loss(
            &subject(&model),
            &documents(3, 20),
            &options(20, 3),
            Some(&path),
            |_| (),
        );
        let said = result.unwrap_err().to_string();
        assert!(says_not_finite(&said), "{said}");
        assert!(!path.exists());
    }
    // The second document alone is affected: the token 63 occurs in it first.
    let mut model = tiny();
    let table = model.params().find("model.embeddings.weight").unwrap();
    let tensor = model.params().value(table).clone();
    let mut values = tensor.to_f32().unwrap();
    values[63 * 32..].fill(f32::NAN);
    let poisoned = tensor.device().from_f32(&values, tensor.shape()).unwrap();
    model.params_mut().set(table, poisoned).unwrap();
    let data = MemoryDataset::new(vec![vec![1; 20], [1, 2, 63, 4].repeat(5)], 64, 0, "test");
    let run =
        |count| evaluate_loss(&subject(&model), &data, &options(20, count), Some(&path), |_| ());
    assert_eq!(run(1).unwrap().chunks, 1);
    let kept = std::fs::read(&path).unwrap();
    let said = run(2).unwrap_err().to_string();
    assert!(says_not_finite(&said) && said.contains("a loss at position"), "{said}");
    // What was good before is still there.
    assert_eq!(std::fs::read(&path).unwrap(), kept);
}

#[test]
fn results_belong_to_the_very_weights() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json");
    let (mut model, data) = (tiny(), documents(2, 20));
    let known = subject(&model).fingerprint().unwrap();
    evaluate_loss(&subject(&model), &data, &options(20, 1), Some(&path), |_| ()).unwrap();
    let last = model.params().iter().last().unwrap().0;
    let tensor = model.params().value(last).clone();
    let mut values = tensor.to_f32().unwrap();
    *values.last_mut().unwrap() += 1.0;
    let changed = tensor.device().from_f32(&values, tensor.shape()).unwrap();
    model.params_mut().set(last, changed).unwrap();
    assert_ne!(subject(&model).fingerprint().unwrap(), known);
    let again = evaluate_loss(&subject(&model), &data, &options(20, 2), Some(&path), |_| ());
    let fresh = evaluate_loss(&subject(&model), &data, &options(20, 2), None, |_| ()).unwrap();
    assert_eq!(again.unwrap(), fresh);
}
