//! A prepared folder: an index and one shard, as they are and with their checksums made right, because hardly any
//! damage would get past those.
//!
//! The input: two bytes with the length of the index, the index, the shard.
#![no_main]

use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use fox_data::{Dataset, Layout, Loader, LoaderConfig, Order, PreparedDataset, Split, Verify};
use fox_fuzz::{check_sentence, folder};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use tempfile::TempDir;
use twox_hash::XxHash3_128;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = folder();
    fs::create_dir(folder.path().join("train")).expect("memory");
    folder
});
/// The only name a shard has here.
const SHARD: &str = "train/00000.tokens";
const HEAD: usize = 16;
const FOOT: usize = 72;
const ENTRY: usize = 16;

fuzz_target!(|bytes: &[u8]| {
    let Some((length, rest)) = bytes.split_at_checked(2) else { return };
    let length = usize::from(u16::from_le_bytes([length[0], length[1]])).min(rest.len());
    let (index, shard) = rest.split_at(length);
    write(index, shard);
    look(FOLDER.path());
    let shard = mended_shard(shard.to_vec());
    write(&mended_index(index, &shard).unwrap_or_default(), &shard);
    look(FOLDER.path());
});

fn write(index: &[u8], shard: &[u8]) {
    fs::write(FOLDER.path().join("index.json"), index).expect("memory");
    fs::write(FOLDER.path().join(SHARD), shard).expect("memory");
}

/// Opens both splits, reads every document and a few batches.
fn look(folder: &Path) {
    for split in [Split::Train, Split::HeldOut] {
        for verify in [Verify::Structure, Verify::Everything] {
            let data = match PreparedDataset::open(folder, split, verify) {
                Ok(data) => data,
                Err(error) => {
                    check_sentence(&error);
                    continue;
                }
            };
            for document in 0..data.lengths().documents() {
                let length = data.lengths().len_of(document).expect("a document that is there");
                let mut ids = vec![0; length as usize];
                if let Err(error) = data.read(document, 0, &mut ids) {
                    check_sentence(&error);
                }
                assert!(data.read(document, 1, &mut ids).is_err() || ids.is_empty());
            }
            let data: Arc<dyn Dataset> = Arc::new(data);
            for layout in [Layout::Windows, Layout::PaddedWindows, Layout::Packed] {
                for order in [Order::Sequential, Order::Shuffled { seed: 1 }] {
                    let config = LoaderConfig { layout, order, ..LoaderConfig::new(3, 2) };
                    batches(data.clone(), config);
                }
            }
        }
    }
}

fn batches(data: Arc<dyn Dataset>, config: LoaderConfig) {
    let loader = match Loader::new(data, config) {
        Ok(loader) => loader,
        Err(error) => return check_sentence(&error),
    };
    for number in [0, 1, loader.batches_per_epoch()] {
        if let Err(error) = loader.batch(number) {
            check_sentence(&error);
        }
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The shard with counts that fit its size, documents in order, and checksums that are right.
fn mended_shard(mut shard: Vec<u8>) -> Vec<u8> {
    if shard.len() < HEAD + FOOT {
        return shard;
    }
    shard[..8].copy_from_slice(b"FOXTOKEN");
    shard[8..12].copy_from_slice(&1u32.to_le_bytes());
    let width = if shard[12] % 2 == 0 { 2 } else { 4 };
    shard[12..16].copy_from_slice(&(width as u32).to_le_bytes());
    // The ids and their filler, then whole entries of the table.
    let inner = shard.len() - HEAD - FOOT;
    let documents = (usize::from(shard[HEAD + inner]) % 8).min(inner / ENTRY);
    let table = shard.len() - FOOT - documents * ENTRY;
    let tokens = (table - HEAD) / 8 * 8 / width;
    let end = HEAD + tokens * width;
    shard.drain(end..table);
    let foot = end + documents * ENTRY;
    let mut ends: Vec<u64> =
        (0..documents).map(|d| number(&shard, end + d * ENTRY) % (tokens as u64 + 1)).collect();
    ends.sort_unstable();
    if let Some(last) = ends.last_mut() {
        *last = tokens as u64;
    }
    for (d, value) in ends.iter().enumerate() {
        shard[end + d * ENTRY..][..8].copy_from_slice(&value.to_le_bytes());
    }
    let mut hash = XxHash3_128::new();
    hash.write(&shard[..HEAD]);
    hash.write(&shard[end..foot]);
    hash.write(&(tokens as u64).to_le_bytes());
    hash.write(&shard[foot + 16..foot + 32]);
    let (tokens_sum, table_sum) = (XxHash3_128::oneshot(&shard[HEAD..end]), hash.finish_128());
    shard[foot..foot + 8].copy_from_slice(&(documents as u64).to_le_bytes());
    shard[foot + 8..foot + 16].copy_from_slice(&(tokens as u64).to_le_bytes());
    shard[foot + 32..foot + 48].copy_from_slice(&tokens_sum.to_le_bytes());
    shard[foot + 48..foot + 64].copy_from_slice(&table_sum.to_le_bytes());
    shard[foot + 64..].copy_from_slice(b"FOXSHEND");
    shard
}

/// The index with this shard in every entry, and a checksum that is right.
fn mended_index(index: &[u8], shard: &[u8]) -> Option<Vec<u8>> {
    let mut file: Value = serde_json::from_slice(index).ok()?;
    if shard.len() >= HEAD + FOOT {
        let foot = shard.len() - FOOT;
        let long = |at: usize| u128::from_le_bytes(shard[at..at + 16].try_into().expect("bytes"));
        let inner = file.get_mut("index")?.as_object_mut()?;
        inner.insert("tokenizer".into(), format!("fuzz:{:032x}", long(foot + 16)).into());
        inner.insert("token_bytes".into(), shard[12].into());
        for split in ["train", "heldout"] {
            let shards = inner.get_mut(split)?.get_mut("shards")?.as_array_mut()?;
            for entry in shards.iter_mut().take(4) {
                *entry = serde_json::json!({
                    "file": SHARD,
                    "documents": number(shard, foot),
                    "tokens": number(shard, foot + 8),
                    "checksum": format!("{:032x}", long(foot + 32)),
                });
            }
        }
    }
    let inner: fox_data::Index = serde_json::from_value(file.get("index")?.clone()).ok()?;
    let text = serde_json::to_vec(&inner).ok()?;
    file["index"] = serde_json::to_value(&inner).ok()?;
    file["checksum"] = format!("{:032x}", XxHash3_128::oneshot(&text)).into();
    serde_json::to_vec(&file).ok()
}
