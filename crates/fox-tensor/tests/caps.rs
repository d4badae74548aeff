//! What a device can do besides its ops, and what happens where it cannot.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use fox_tensor::naive::Naive;
use fox_tensor::{BATCH_INVARIANT_ROWS, Backend, Caps, DType, Device, IdRange, WeightFormat};

/// The names of the optional traits that are there.
fn present(caps: Caps<'_>) -> Vec<&'static str> {
    let Caps { activation_type, decode_batch, recompute, linear_group, packing, .. } = caps;
    let Caps { paged, slots, .. } = caps;
    assert_eq!((activation_type, decode_batch), (DType::F32, BATCH_INVARIANT_ROWS));
    let all = [
        (recompute.is_some(), "recompute"),
        (linear_group.is_some(), "linear_group"),
        (packing.is_some(), "packing"),
        (paged.is_some(), "paged"),
        (slots.is_some(), "slots"),
    ];
    all.into_iter().filter(|(there, _)| *there).map(|(_, name)| name).collect()
}

#[test]
fn oracle_capabilities() {
    assert!(present(Caps::default()).is_empty());
    assert_eq!(present(Naive::default().caps()), ["paged", "slots"]);
    assert!(Naive::default().caps().gates_in_pages());
    assert_eq!(
        present(Naive::with_optional_ops().caps()),
        ["recompute", "linear_group", "paged", "slots"]
    );
}

#[test]
fn weights_are_unchanged_without_packing() {
    let device = Device::naive();
    let w = device.from_f64(&[0.1, -2.0, 3.5, 1e-9], [2, 2]).unwrap();
    let same = w.packed(WeightFormat::F32).unwrap();
    assert_eq!(same.to_f64().unwrap(), [0.1, -2.0, 3.5, 1e-9]);
    for format in [WeightFormat::Bf16, WeightFormat::Int8] {
        assert_eq!(
            w.packed(format).unwrap_err().to_string(),
            "naive does not support packed weights; use the CPU"
        );
    }
}

#[test]
fn rejects_ids_beyond_the_vocabulary() {
    let range = |ignore| IdRange { vocab: 5, ignore };
    let device = Device::naive();
    for id in [0, 4] {
        assert!(range(None).allows(id) && range(Some(-100)).allows(id));
    }
    for id in [-1, 5, -100, i32::MIN, i32::MAX] {
        let ids = device.from_i32(&[0, id, 7], [3]).unwrap();
        assert_eq!(device.backend().id_out_of_range(&ids, range(None)).unwrap(), Some(id));
        assert_eq!(range(Some(-100)).allows(id), id == -100);
    }
}
