//! Arrays in the LongCrawl64 layout, written here by a small helper.

// Helpers of tests may fail the test.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::Arc;

use fox_data::{
    Dataset, Error, Loader, LoaderConfig, Order, Split, Tokenizer, Verify, ZarrDataset,
    open_dataset,
};
use proptest::prelude::*;

/// How the helper stores chunks.
#[derive(Debug, Clone, Copy)]
struct Style {
    blosc: bool,
    shuffle: bool,
    split: bool,
    blocksize: usize,
}

const STYLE: Style = Style { blosc: true, shuffle: true, split: true, blocksize: 512 };

fn token(document: u64, position: u64) -> u16 {
    ((document * 7919 + position * position / 3) % 50_000) as u16
}

fn shuffle(bytes: &[u8]) -> Vec<u8> {
    let n = bytes.len() / 2;
    (0..2).flat_map(|b| (0..n).map(move |i| bytes[2 * i + b])).collect()
}

/// A Blosc 1 frame with LZ4 inside.
fn blosc_frame(bytes: &[u8], style: Style) -> Vec<u8> {
    let blocksize = style.blocksize.min(bytes.len());
    let mut flags = 1 << 5;
    flags |= u8::from(style.shuffle);
    if !style.split {
        flags |= 0x10;
    }
    let blocks: Vec<&[u8]> = bytes.chunks(blocksize).collect();
    let mut frame = vec![2, 1, flags, 2];
    frame.extend((bytes.len() as u32).to_le_bytes());
    frame.extend((blocksize as u32).to_le_bytes());
    frame.extend([0; 4]);
    let table = frame.len();
    frame.resize(table + 4 * blocks.len(), 0);
    // Written backwards: blocks may lie in any order.
    for (i, block) in blocks.iter().enumerate().rev() {
        let start = frame.len() as u32;
        frame[table + 4 * i..table + 4 * i + 4].copy_from_slice(&start.to_le_bytes());
        let block = if style.shuffle { shuffle(block) } else { block.to_vec() };
        let split = style.split && blocksize / 2 >= 128 && block.len() == blocksize;
        for stream in block.chunks(if split { blocksize / 2 } else { block.len() }) {
            let packed = lz4_flex::block::compress(stream);
            let stored = if packed.len() < stream.len() { &packed } else { stream };
            frame.extend((stored.len() as u32).to_le_bytes());
            frame.extend(stored);
        }
    }
    let size = frame.len() as u32;
    frame[12..16].copy_from_slice(&size.to_le_bytes());
    frame
}

fn write_array(path: &Path, shape: [u64; 2], chunks: [u64; 2], style: Style) {
    fs::create_dir_all(path).unwrap();
    let compressor = if style.blosc {
        r#"{"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}"#
    } else {
        "null"
    };
    let metadata = format!(
        r#"{{"zarr_format": 2, "shape": {shape:?}, "chunks": {chunks:?}, "dtype": "<u2", "order": "C",
            "fill_value": 0, "filters": null, "compressor": {compressor}}}"#
    );
    fs::write(path.join(".zarray"), metadata).unwrap();
    for row in 0..shape[0].div_ceil(chunks[0]) {
        for column in 0..shape[1].div_ceil(chunks[1]) {
            let mut bytes = Vec::new();
            for d in 0..chunks[0] {
                for p in 0..chunks[1] {
                    let id = token(row * chunks[0] + d, column * chunks[1] + p);
                    bytes.extend(id.to_le_bytes());
                }
            }
            let chunk = if style.blosc { blosc_frame(&bytes, style) } else { bytes };
            fs::write(path.join(format!("{row}.{column}")), chunk).unwrap();
        }
    }
}

fn open(path: &Path) -> ZarrDataset {
    ZarrDataset::open(path, Tokenizer::from_name("json-gpt2").unwrap()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_access_in_any_layout(
        rows in 1_u64..7,
        columns in 1_u64..60,
        chunk_rows in 1_u64..5,
        chunk_columns in 1_u64..40,
        blosc: bool,
        shuffle: bool,
        split: bool,
        blocksize in 1_usize..40,
        places in prop::collection::vec((0.0..1.0_f64, 0.0..1.0_f64, 0.0..1.0_f64), 1..6),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let style = Style { blosc, shuffle, split, blocksize: blocksize * 16 };
        write_array(folder.path(), [rows, columns], [chunk_rows, chunk_columns], style);
        let data = open(folder.path());
        for (a, b, c) in places {
            let document = (a * rows as f64) as u64;
            let start = (b * columns as f64) as u64;
            let len = (c * (columns - start + 1) as f64) as usize;
            let mut ids = vec![0; len];
            data.read(document, start, &mut ids).unwrap();
            for (i, id) in ids.iter().enumerate() {
                prop_assert_eq!(*id, u32::from(token(document, start + i as u64)));
            }
        }
    }
}

/// Section "LongCrawl64 loader" of the model specification, written out.
#[test]
fn longcrawl64_order_for_every_rank() {
    let (docs, len, w, b, ranks) = (11_u64, 64_u64, 16_u64, 4_u64, 2_u64);
    let folder = tempfile::tempdir().unwrap();
    write_array(&folder.path().join("train.zarr"), [docs, len], [4, 32], STYLE);
    let data = open_dataset(folder.path(), Split::Train, None, Verify::Structure).unwrap();
    let rows = docs / b;
    for rank in 0..ranks {
        let config = LoaderConfig {
            order: Order::LongCrawl64,
            rank: rank as usize,
            ranks: ranks as usize,
            epochs: Some(1),
            ..LoaderConfig::new(w as usize, b as usize)
        };
        let loader = Loader::new(Arc::clone(&data), config).unwrap();
        assert_eq!(loader.batches(), Some(rows * (len / w)));
        for k in 0..rows * (len / w) {
            let (col, row) = (k / rows, k % rows);
            let batch = loader.batch(k).unwrap();
            assert_eq!((batch.batch, batch.time), (2, 16));
            for r in 0..b / ranks {
                let document = row * b + rank * b / ranks + r;
                let tokens: Vec<i32> =
                    (0..w).map(|i| i32::from(token(document, col * w + i))).collect();
                let at = (r * w) as usize;
                assert_eq!(batch.labels[at..at + 16], tokens);
                assert_eq!(batch.inputs[at], 50_256);
                assert_eq!(batch.inputs[at + 1..at + 16], tokens[..15]);
            }
        }
        assert!(matches!(loader.batch(8), Err(Error::NoSuchBatch { .. })));
    }
}

#[test]
fn longcrawl64_order_needs_dividing_windows() {
    let folder = tempfile::tempdir().unwrap();
    write_array(folder.path(), [4, 64], [4, 32], STYLE);
    let data = open_dataset(folder.path(), Split::Train, None, Verify::Structure).unwrap();
    let config = LoaderConfig { order: Order::LongCrawl64, ..LoaderConfig::new(24, 2) };
    let error = Loader::new(data, config).err().unwrap().to_string();
    assert!(error.contains("do not divide documents of 64"), "{error}");
}

#[test]
fn rejects_missing_chunks() {
    let folder = tempfile::tempdir().unwrap();
    write_array(folder.path(), [4, 64], [4, 32], STYLE);
    fs::remove_file(folder.path().join("0.1")).unwrap();
    let data = open(folder.path());
    let mut ids = vec![0; 32];
    data.read(3, 0, &mut ids).unwrap();
    let error = data.read(3, 1, &mut ids).unwrap_err();
    assert!(matches!(error, Error::MissingChunk { .. }));
    assert!(error.to_string().contains("0.1"), "{error}");
}

#[test]
fn rejects_damaged_chunks() {
    let folder = tempfile::tempdir().unwrap();
    write_array(folder.path(), [40, 32], [40, 32], STYLE);
    let path = folder.path().join("0.0");
    let whole = fs::read(&path).unwrap();
    let mut ids = vec![0; 32];
    for keep in [0, 10, 17, 40, whole.len() / 2] {
        fs::write(&path, &whole[..keep]).unwrap();
        // A fresh data set: another would still hold the blocks.
        let error = open(folder.path()).read(0, 0, &mut ids).unwrap_err();
        assert!(matches!(error, Error::BadChunk { .. }), "{keep}: {error}");
    }
    for at in 0..60 {
        let mut changed = whole.clone();
        changed[at] ^= 0xff;
        fs::write(&path, changed).unwrap();
        // Some bytes mean nothing (the library's version); none may crash.
        for document in [0, 20, 39] {
            let _ = open(folder.path()).read(document, 0, &mut ids);
        }
    }
}

#[test]
fn rejects_chunks_of_another_size() {
    for blosc in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        write_array(folder.path(), [4, 64], [4, 64], Style { blosc, ..STYLE });
        let path = folder.path().join("0.0");
        let whole = fs::read(&path).unwrap();
        let mut ids = vec![0; 8];
        open(folder.path()).read(0, 0, &mut ids).unwrap();
        // The bytes that are read are untouched: only the size differs.
        for bytes in [[&whole[..], b"!"].concat(), whole[..whole.len() - 1].to_vec()] {
            fs::write(&path, &bytes).unwrap();
            let error = open(folder.path()).read(0, 0, &mut ids).unwrap_err().to_string();
            let want = format!("has {} bytes instead of {}", bytes.len(), whole.len());
            assert!(error.contains(&want) && error.contains("0.0"), "{error}");
        }
    }
}

#[test]
fn rejects_folders_without_data() {
    let folder = tempfile::tempdir().unwrap();
    let error = open_dataset(folder.path(), Split::Train, None, Verify::Structure).err().unwrap();
    assert!(error.to_string().contains("run `fox prepare` first"), "{error}");
}

/// Blosc stores bytes that it cannot compress as they are, after its header.
#[test]
fn reads_stored_frames() {
    let folder = tempfile::tempdir().unwrap();
    write_array(folder.path(), [4, 64], [4, 64], Style { blosc: false, ..STYLE });
    let (path, metadata) = (folder.path().join("0.0"), folder.path().join(".zarray"));
    let plain = fs::read(&path).unwrap();
    let size = |n: usize| (n as u32).to_le_bytes();
    let sizes = [size(plain.len()), size(512), size(16 + plain.len())];
    let frame = [&[2, 1, 0x22, 2][..], sizes.as_flattened(), &plain].concat();
    fs::write(&path, &frame).unwrap();
    let text = fs::read_to_string(&metadata).unwrap();
    let compressor = r#""compressor": {"id": "blosc", "cname": "lz4"}"#;
    fs::write(&metadata, text.replace(r#""compressor": null"#, compressor)).unwrap();
    let mut ids = vec![0; 40];
    open(folder.path()).read(2, 20, &mut ids).unwrap();
    let want: Vec<u32> = (20..60).map(|position| u32::from(token(2, position))).collect();
    assert_eq!(ids, want);
    fs::write(&path, &frame[..frame.len() - 1]).unwrap();
    open(folder.path()).read(2, 20, &mut ids).unwrap_err();
}
