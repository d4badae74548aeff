//! Batches: any step can be reached at once, and nothing is lost or doubled.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Arc;

use fox_data::{
    Batch, Dataset, DocumentLengths, Error, IGNORED_LABEL, Layout, Loader, LoaderConfig,
    LoaderState, MemoryDataset, Order,
};
use proptest::prelude::*;

const BOS: u32 = 99_999;

/// Documents of distinct tokens, so that a token identifies its position.
fn data(lens: &[usize]) -> Arc<dyn Dataset> {
    let mut next = 0;
    let documents = lens
        .iter()
        .map(|&len| {
            let document: Vec<u32> = (next..next + len as u32).collect();
            next += len as u32;
            document
        })
        .collect();
    Arc::new(MemoryDataset::new(documents, 100_000, BOS, "test"))
}

fn loader(lens: &[usize], config: LoaderConfig) -> Loader {
    Loader::new(data(lens), config).unwrap()
}

/// The labels of a batch row by row, those without a loss left out.
fn rows(batch: &Batch) -> Vec<Vec<i32>> {
    batch
        .labels
        .chunks(batch.time)
        .map(|row| row.iter().copied().filter(|&l| l != IGNORED_LABEL).collect())
        .collect()
}

fn layouts() -> impl Strategy<Value = Layout> {
    prop_oneof![Just(Layout::Windows), Just(Layout::PaddedWindows), Just(Layout::Packed)]
}

fn orders() -> impl Strategy<Value = Order> {
    prop_oneof![Just(Order::Sequential), any::<u64>().prop_map(|seed| Order::Shuffled { seed })]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn resuming_from_any_state_continues_in_order(
        lens in prop::collection::vec(4_usize..40, 2..8),
        layout in layouts(),
        order in orders(),
        skip in 0_u64..20,
    ) {
        let config = LoaderConfig { layout, order, ..LoaderConfig::new(4, 2) };
        let loader = loader(&lens, config);
        let mut sequential = loader.prefetch(loader.state_at(0), 3).unwrap();
        let mut state = loader.state_at(0);
        for _ in 0..skip {
            state = sequential.next().unwrap().unwrap().state;
        }
        prop_assert_eq!(state.next_batch, skip);
        let saved = serde_json::to_string(&state).unwrap();
        let restored: LoaderState = serde_json::from_str(&saved).unwrap();
        let mut resumed = loader.prefetch(restored, 1).unwrap();
        for number in skip..skip + 3 {
            let expected = sequential.next().unwrap().unwrap();
            prop_assert_eq!(&resumed.next().unwrap().unwrap(), &expected);
            prop_assert_eq!(&loader.batch(number).unwrap(), &expected);
            prop_assert_eq!(expected.number(), number);
        }
    }

    #[test]
    fn every_sequence_comes_once_per_epoch(
        lens in prop::collection::vec(0_usize..40, 2..8),
        layout in layouts(),
        order in orders(),
    ) {
        prop_assume!(lens.iter().any(|&len| len >= 4));
        let config = LoaderConfig { layout, order, epochs: Some(2), ..LoaderConfig::new(4, 1) };
        let loader = loader(&lens, config);
        for epoch in 0..2 {
            let mut counts: HashMap<i32, u32> = HashMap::new();
            for k in 0..loader.batches_per_epoch() {
                let number = epoch * loader.batches_per_epoch() + k;
                prop_assert_eq!(loader.epoch_of(number), epoch);
                for id in rows(&loader.batch(number).unwrap()).concat() {
                    *counts.entry(id).or_default() += 1;
                }
            }
            let total: usize = lens.iter().sum();
            let expected = match layout {
                Layout::Windows => lens.iter().map(|len| len / 4 * 4).sum(),
                Layout::PaddedWindows => total,
                Layout::Packed => total / 4 * 4,
            };
            prop_assert!(counts.values().all(|&c| c == 1));
            prop_assert_eq!(counts.len(), expected);
        }
        prop_assert_eq!(loader.prefetch(loader.state_at(0), 2).unwrap().count() as u64, loader.batches().unwrap());
    }

    #[test]
    fn ranks_divide_a_batch_without_overlap(order in orders(), number in 0_u64..30) {
        let config = LoaderConfig { order, ..LoaderConfig::new(4, 6) };
        let lens = [40, 41, 42, 43];
        let whole = rows(&loader(&lens, config.clone()).batch(number).unwrap());
        let mut together = Vec::new();
        for rank in 0..3 {
            let part = loader(&lens, LoaderConfig { rank, ranks: 3, ..config.clone() });
            together.extend(rows(&part.batch(number).unwrap()));
        }
        prop_assert_eq!(together, whole);
    }
}

#[test]
fn inputs_are_shifted_labels() {
    let config = LoaderConfig { order: Order::Sequential, ..LoaderConfig::new(3, 2) };
    let batch = loader(&[7, 3], config).batch(0).unwrap();
    let bos = BOS as i32;
    assert_eq!(batch.labels, [0, 1, 2, 3, 4, 5]);
    assert_eq!(batch.inputs, [bos, 0, 1, bos, 3, 4]);
    assert_eq!(batch.boundaries, None);
    assert_eq!(batch.labelled(), 6);
}

#[test]
fn packed_batches_list_document_starts() {
    let config = LoaderConfig {
        order: Order::Sequential,
        layout: Layout::Packed,
        ..LoaderConfig::new(4, 2)
    };
    let batch = loader(&[3, 4, 5], config).batch(0).unwrap();
    let bos = BOS as i32;
    assert_eq!(batch.labels, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(batch.inputs, [bos, 0, 1, bos, bos, 4, 5, bos]);
    assert_eq!(batch.boundaries, Some(vec![0, 3, 4, 7, 8]));
}

#[test]
fn padded_positions_have_no_loss() {
    let config = LoaderConfig {
        order: Order::Sequential,
        layout: Layout::PaddedWindows,
        ..LoaderConfig::new(4, 2)
    };
    let batch = loader(&[6], config).batch(0).unwrap();
    let bos = BOS as i32;
    assert_eq!(batch.labels, [0, 1, 2, 3, 4, 5, -100, -100]);
    assert_eq!(batch.inputs, [bos, 0, 1, 2, bos, 4, bos, bos]);
}

#[test]
fn rejects_impossible_settings() {
    let error = |lens: &[usize], config| Loader::new(data(lens), config).err().unwrap().to_string();
    let base = LoaderConfig::new(4, 2);
    assert!(error(&[3, 2], base.clone()).contains("longer than any document (the longest has 3)"));
    assert!(error(&[7], base.clone()).contains("fewer than one batch of 2"));
    let change = |f: fn(&mut LoaderConfig)| {
        let mut config = base.clone();
        f(&mut config);
        error(&[40], config)
    };
    assert!(change(|c| c.window = 0).contains("sequence length"));
    assert!(change(|c| c.batch = 0).contains("batch size"));
    assert!(change(|c| c.rank = 1).contains("not one of 1 ranks"));
    assert!(change(|c| c.ranks = 4).contains("shared evenly by 4 ranks"));
    let error = error(&[8, 12], LoaderConfig { order: Order::LongCrawl64, ..base });
    assert!(error.contains("different lengths"), "{error}");
}

#[test]
fn rejects_states_of_other_data_or_settings() {
    let base = LoaderConfig::new(4, 2);
    let loader_a = loader(&[40, 40], base.clone());
    let state = loader_a.state_at(5);
    for other in [
        loader(&[40, 41], base.clone()),
        loader(&[40, 40], LoaderConfig { window: 8, ..base.clone() }),
        loader(&[40, 40], LoaderConfig { batch: 4, ..base.clone() }),
        loader(&[40, 40], LoaderConfig { order: Order::Sequential, ..base.clone() }),
    ] {
        assert!(matches!(other.prefetch(state, 1), Err(Error::WrongLoaderState { .. })));
    }
    let same = loader(&[40, 40], LoaderConfig { ranks: 2, rank: 1, ..base });
    assert!(same.prefetch(state, 1).is_ok());
}

#[test]
fn loader_rejects_ids_outside_the_vocabulary() {
    let data = Arc::new(MemoryDataset::new(vec![vec![1, 2, 3, 50]], 50, 0, "test"));
    let loader = Loader::new(data, LoaderConfig::new(4, 1)).unwrap();
    let mut batches = loader.prefetch(loader.state_at(0), 2).unwrap();
    let error = batches.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::UnknownToken { id: 50, vocab_size: 50 }));
    assert!(batches.next().is_none());
}

#[test]
fn dropping_the_prefetcher_ends_its_thread() {
    let loader = loader(&[400], LoaderConfig::new(4, 2));
    let mut batches = loader.prefetch(loader.state_at(0), 4).unwrap();
    batches.next().unwrap().unwrap();
    drop(batches);
}

/// Documents that exist only as a rule, so many or so long that 32 bits do not count their tokens.
struct Vast(DocumentLengths);

/// Every 64-bit place gives another id, almost always.
fn id_at(document: u64, position: u64) -> u32 {
    let mixed = (document.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ position)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 33) as u32
}

impl Dataset for Vast {
    fn lengths(&self) -> &DocumentLengths {
        &self.0
    }

    fn read(&self, document: u64, start: u64, out: &mut [u32]) -> Result<(), Error> {
        let len = self.0.len_of(document).unwrap();
        assert!(start + out.len() as u64 <= len);
        for (position, id) in (start..).zip(out) {
            *id = id_at(document, position);
        }
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        1 << 31
    }

    fn bos(&self) -> u32 {
        7
    }

    fn identity(&self) -> String {
        "vast".into()
    }

    fn tokenizer_identity(&self) -> String {
        "test".into()
    }
}

/// 48 billion tokens are more than 2^35.
#[test]
fn reads_positions_beyond_32_bits() {
    const K: u64 = 1 << 10;
    let (many, long) = (1_u64 << 34, 1_u64 << 36);
    let varied = DocumentLengths::Varied { ends: vec![long, long + 5 * K, 2 * long] };
    for (lengths, layout) in [
        (DocumentLengths::Uniform { documents: many, len: 4 * K }, Layout::Windows),
        (DocumentLengths::Uniform { documents: 3, len: long }, Layout::Windows),
        (DocumentLengths::Uniform { documents: many, len: 4 * K }, Layout::Packed),
        (varied.clone(), Layout::Windows),
        (varied, Layout::Packed),
    ] {
        let config =
            LoaderConfig { order: Order::Sequential, layout, ..LoaderConfig::new(1024, 2) };
        let loader = Loader::new(Arc::new(Vast(lengths.clone())), config.clone()).unwrap();
        let tokens = lengths.tokens();
        assert_eq!(loader.batches_per_epoch(), tokens / (2 * K));
        for number in [0, (1 << 22) + 3, loader.batches_per_epoch() - 1] {
            let batch = loader.batch(number).unwrap();
            let first = number * 2 * K;
            for at in [0, 1, K - 1, K, 2 * K - 1] {
                let (document, position) = lengths.locate(first + at).unwrap();
                assert_eq!(batch.labels[at as usize] as u32, id_at(document, position));
            }
        }
        // Shuffled, too, every sequence lies inside, and far ones come.
        let config = LoaderConfig { order: Order::Shuffled { seed: 1 }, ..config };
        let shuffled = Loader::new(Arc::new(Vast(lengths)), config).unwrap();
        let ids: std::collections::HashSet<i32> =
            (0..64).flat_map(|n| shuffled.batch((1 << 32) + n).unwrap().labels).collect();
        assert!(ids.len() > 100_000, "{}", ids.len());
    }
}
