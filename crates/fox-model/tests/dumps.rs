//! Every dump of the references, on the f64 oracle, at the float32 tolerances.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[path = "bodies/dumps.rs"]
mod bodies;

use bodies::dump;
use fox_model::{Tolerances, verify_dump};
use fox_tensor::Device;

prove_dumps!(Device::naive());

#[test]
fn fails_below_the_error() {
    let strict = Tolerances { logits: 1e-12, loss: 1e-12, grad: 1e-12 };
    let report = verify_dump(&dump("fox_llama"), &Device::naive(), &strict).unwrap();
    assert!(!report.passed());
}

#[test]
fn rejects_gradients_of_unknown_parameters() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dump("fox_llama")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    // One more tensor of one value at the end.
    let file = folder.path().join("io.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let place = [data.len(), data.len() + 4];
    header["grad.unknown.weight"] =
        serde_json::json!({ "dtype": "F32", "shape": [1], "data_offsets": place });
    let header = header.to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(&file, [&length[..], &header, data, &[0; 4]].concat()).unwrap();
    let error = verify_dump(folder.path(), &Device::naive(), &Tolerances::default()).unwrap_err();
    let words = "a gradient of unknown.weight, not trained";
    assert!(error.to_string().contains(words), "{error}");
}
