//! The small tasks: every answer is computed again from the tokens alone, by readers that know only the definitions.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use fox_data::task::{Case, Setting, TaskConfig, TaskDataset, find, names};
use fox_data::{Dataset, IGNORED_LABEL, Loader, LoaderConfig};

fn config(name: &str, vocabulary: u32, settings: &[(usize, f64)]) -> TaskConfig {
    let settings: Vec<Setting> = settings.iter().map(|s| Setting::from(*s)).collect();
    TaskConfig {
        name: name.into(),
        seed: 11,
        vocabulary,
        train: settings.clone(),
        test: settings,
        test_cases: 50,
    }
}

/// The first test cases of a setting.
fn cases(name: &str, vocabulary: u32, setting: (usize, f64), count: u64) -> Vec<Case> {
    let config = config(name, vocabulary, &[setting]);
    config.check().unwrap();
    (0..count).map(|i| config.test_case(&config.test[0], i).unwrap()).collect()
}

/// Positions and tokens of the answers.
fn answers(case: &Case) -> Vec<(usize, u32)> {
    let all = case.tokens.iter().zip(&case.answers).enumerate();
    all.filter(|(_, (_, answer))| **answer).map(|(i, (token, _))| (i, *token)).collect()
}

/// Walks over the pairs at even positions. The first `bindings` bind; after that every key that is bound is a query.
fn recall(tokens: &[u32], bindings: usize) -> Vec<(usize, u32)> {
    let mut memory = HashMap::new();
    let mut found = Vec::new();
    for (i, pair) in tokens.chunks_exact(2).enumerate() {
        if i < bindings {
            memory.insert(pair[0], pair[1]);
        } else if let Some(value) = memory.get(&pair[0]) {
            found.push((2 * i + 1, *value));
        }
    }
    found
}

#[test]
fn recall_answers_are_the_bound_values() {
    for (vocabulary, length, pairs) in [(8192, 64, 4.0), (8192, 256, 64.0), (40, 50, 9.0)] {
        for case in cases("mqar", vocabulary, (length, pairs), 100) {
            let pairs = pairs as usize;
            assert_eq!(case.tokens.len(), length);
            assert_eq!(answers(&case), recall(&case.tokens, pairs));
            assert_eq!(answers(&case).len(), pairs);
            let (keys, values): (Vec<u32>, Vec<u32>) =
                case.tokens[..2 * pairs].chunks(2).map(|pair| (pair[0], pair[1])).unzip();
            assert!(keys.iter().all(|key| *key > 0 && *key < vocabulary / 2));
            assert!(values.iter().all(|value| (vocabulary / 2..vocabulary).contains(value)));
            for tokens in [keys, values] {
                assert_eq!(tokens.iter().collect::<BTreeSet<_>>().len(), pairs, "different ones");
            }
            assert!(case.tokens.iter().all(|token| *token != 0), "noise everywhere else");
        }
    }
}

#[test]
fn rebound_keys_answer_with_the_last_value() {
    let mut changed = 0;
    for case in cases("mqar-rebound", 256, (96, 16.0), 200) {
        assert_eq!(answers(&case), recall(&case.tokens, 16));
        assert_eq!(answers(&case).len(), 8);
        let mut times: HashMap<u32, Vec<u32>> = HashMap::new();
        case.tokens[..32].chunks(2).for_each(|p| times.entry(p[0]).or_default().push(p[1]));
        assert!(times.values().all(|values| values.len() == 2 && values[0] != values[1]));
        // A reader that keeps the first value is wrong about every key.
        for (at, token) in answers(&case) {
            changed += usize::from(times[&case.tokens[at - 1]][0] != token);
        }
    }
    assert_eq!(changed, 200 * 8);
}

/// Queries near the pairs are more likely: slot k has a weight of 1 / k.
#[test]
fn near_queries_are_more_likely() {
    let (mut near, mut all) = (0.0, 0.0);
    for case in cases("mqar", 8192, (136, 4.0), 2000) {
        let first = 8 + 2 * 8;
        near += answers(&case).iter().filter(|(at, _)| *at < first).count() as f64;
        all += 4.0;
    }
    // 8 of 64 slots, drawn four times without replacement: clearly above an eighth, and about the law's share.
    let share = near / all;
    assert!((0.45..0.65).contains(&share), "{share}");
}

#[test]
fn n_back_answers_are_n_steps_old() {
    for (length, back) in [(65, 1), (64, 8), (41, 19)] {
        for case in cases("n-back", 33, (length, back as f64), 50) {
            assert_eq!(case.tokens[0] as usize, back, "the first token says how far");
            let steps: Vec<&[u32]> = case.tokens[1..].chunks_exact(2).collect();
            assert!(steps.iter().all(|step| (1..33).contains(&step[0])));
            let expected: Vec<(usize, u32)> =
                (back..steps.len()).map(|t| (2 * t + 2, steps[t - back][0])).collect();
            assert_eq!(answers(&case), expected);
            assert!(steps[..back].iter().all(|step| step[1] == 0));
        }
    }
}

#[test]
fn flip_flop_answers_are_the_bit_written_last() {
    const WRITE: u32 = 1;
    const READ: u32 = 2;
    const IGNORE: u32 = 3;
    for ignored in [0.8, 0.98, 0.1] {
        let (mut ignores, mut writes, mut free) = (0.0, 0.0, 0.0);
        for case in cases("flip-flop", 6, (512, ignored), 200) {
            let mut stored = 0;
            let mut expected = Vec::new();
            let pairs: Vec<&[u32]> = case.tokens.chunks(2).collect();
            for (i, pair) in pairs.iter().enumerate() {
                assert!((4..6).contains(&pair[1]), "a bit behind every instruction");
                match pair[0] {
                    WRITE => stored = pair[1],
                    READ => expected.push((2 * i + 1, stored)),
                    other => assert_eq!(other, IGNORE),
                }
            }
            assert_eq!(answers(&case), expected);
            assert_eq!((pairs[0][0], pairs[255][0]), (WRITE, READ));
            let inner = &pairs[1..255];
            let count = |what| inner.iter().filter(|pair| pair[0] == what).count() as f64;
            ignores += count(IGNORE);
            writes += count(WRITE);
            free += 254.0;
        }
        let error = |p: f64, n: f64| 4.0 * (p * (1.0 - p) / n).sqrt();
        let share = ignores / free;
        assert!((share - ignored).abs() < error(ignored, free), "{share} ignored, not {ignored}");
        let rest = free - ignores;
        assert!((writes / rest - 0.5).abs() < error(0.5, rest), "writes and reads are as likely");
    }
}

#[test]
fn selective_copies_are_the_symbols_in_order() {
    for (length, symbols) in [(64, 4), (256, 16), (33, 16)] {
        let mut first_half = 0;
        for case in cases("selective-copy", 19, (length, symbols as f64), 200) {
            let marker = case.tokens.iter().position(|token| *token == 2).unwrap();
            assert_eq!(marker, length - symbols - 1);
            let data: Vec<u32> = case.tokens[..marker].iter().copied().filter(|t| *t > 2).collect();
            let expected: Vec<(usize, u32)> =
                data.iter().enumerate().map(|(i, symbol)| (marker + 1 + i, *symbol)).collect();
            assert_eq!((answers(&case), data.len()), (expected, symbols));
            first_half += case.tokens[..marker / 2].iter().filter(|t| **t > 2).count();
        }
        let share = first_half as f64 / (200 * symbols) as f64;
        assert!((share - 0.5).abs() < 0.06, "{share} of the symbols in the first half");
    }
}

#[test]
fn parity_is_that_of_the_ones() {
    let mut odd = 0;
    for case in cases("parity", 4, (40, 0.0), 400) {
        let ones = case.tokens[..38].iter().filter(|token| **token == 3).count();
        assert_eq!(case.tokens[38], 1);
        assert_eq!(answers(&case), [(39, 2 + (ones % 2) as u32)]);
        odd += ones % 2;
    }
    assert!((150..250).contains(&odd), "{odd}");
}

/// Every task in a small size.
fn every_task() -> Vec<TaskConfig> {
    let sizes = [(64, 8.0), (64, 8.0), (16, 4.0), (6, 0.8), (19, 4.0), (4, 0.0)];
    let small = |(name, (vocabulary, difficulty))| {
        config(name, vocabulary, &[(40, difficulty), (32, difficulty)])
    };
    let all: Vec<TaskConfig> = names().zip(sizes).map(small).collect();
    assert_eq!(all.len(), names().count());
    all.iter().for_each(|config| config.check().unwrap());
    all
}

#[test]
fn only_answers_have_labels() {
    for config in every_task() {
        let data = Arc::new(TaskDataset::train(config.clone()).unwrap());
        let loader = Loader::new(data.clone(), LoaderConfig::new(40, 6)).unwrap();
        let batch = loader.batch(5).unwrap();
        let (mut labelled, mut padded) = (0, 0);
        for (inputs, labels) in batch.inputs.chunks(40).zip(batch.labels.chunks(40)) {
            assert_eq!(inputs[0], 0, "the start marker");
            for i in 0..40 {
                assert!((inputs[i] as u32) < config.vocabulary);
                // A label is the next input.
                let next = inputs.get(i + 1).copied();
                assert!(labels[i] == IGNORED_LABEL || next.is_none_or(|next| next == labels[i]));
            }
            let here = labels.iter().filter(|label| **label != IGNORED_LABEL).count();
            let expected = match config.name.as_str() {
                "mqar" => 8,
                "mqar-rebound" | "selective-copy" => 4,
                "parity" => 1,
                "flip-flop" => inputs.iter().filter(|id| **id == 2).count(),
                // All steps but the first four, whose answers are padding.
                _ => inputs[2..].iter().step_by(2).filter(|id| **id != 0).count() - 4,
            };
            assert_eq!(here, expected, "{}: {inputs:?}", config.name);
            labelled += here;
            let tail = &labels[32..];
            padded += usize::from(
                inputs[33..].iter().all(|id| *id == 0)
                    && tail.iter().all(|label| *label == IGNORED_LABEL),
            );
        }
        assert!(labelled >= 6, "{}: {labelled}", config.name);
        assert!(padded > 0 && padded < 6, "{}: {padded} of 6 rows are short", config.name);
        // The case itself, read through the data set, has the same answers.
        let (mut ids, mut marks) = (vec![0; 40], vec![false; 40]);
        data.read_labelled(4, 0, &mut ids, &mut marks).unwrap();
        let mut part = vec![0; 10];
        data.read(4, 17, &mut part).unwrap();
        assert_eq!(part, ids[17..27]);
        assert!(marks.iter().any(|mark| *mark));
    }
}

#[test]
fn cases_depend_on_seed_and_index_only() {
    for config in every_task() {
        let other = TaskConfig { seed: 12, ..config.clone() };
        let all = |config: &TaskConfig| -> Vec<Case> {
            (0..20).map(|i| config.test_case(&config.test[0], i).unwrap()).collect()
        };
        assert_eq!(all(&config), all(&config));
        assert_ne!(all(&config), all(&other));
        // More settings, or another order of them, leave a test set as it is.
        let mut more = config.clone();
        more.test.reverse();
        more.train.truncate(1);
        assert_eq!(config.test_case(&config.test[0], 7), more.test_case(&config.test[0], 7));
        let identity = |config: &TaskConfig| TaskDataset::train(config.clone()).unwrap().identity();
        assert_ne!(identity(&config), identity(&other));
        let heldout = TaskDataset::held_out(config.clone()).unwrap().identity();
        assert_ne!(identity(&config), heldout);
    }
    // The same on every machine and in every version.
    let case = &cases("mqar", 20, (12, 2.0), 1)[0];
    assert_eq!(case.tokens, FROZEN);
}

/// The first test case of `mqar` with 20 ids, 12 tokens and 2 pairs, seed 11.
const FROZEN: [u32; 12] = [1, 11, 2, 19, 2, 19, 1, 11, 8, 11, 15, 13];

#[test]
fn test_cases_are_not_training_cases() {
    for name in ["mqar", "flip-flop", "n-back"] {
        let config = every_task().into_iter().find(|config| config.name == name).unwrap();
        let train = TaskDataset::train(config.clone()).unwrap();
        let heldout = TaskDataset::held_out(config.clone()).unwrap();
        let read = |data: &TaskDataset, document: u64| {
            let mut ids = vec![0; 40];
            data.read(document, 0, &mut ids).unwrap();
            ids
        };
        let seen: BTreeSet<Vec<u32>> = (0..20_000).map(|d| read(&train, d)).collect();
        assert!(seen.len() > 19_990, "{name}: training cases do not repeat");
        for i in 0..500 {
            let test = config.test_case(&config.test[0], i).unwrap().tokens;
            assert!(!seen.contains(&test), "{name}: test case {i} is trained on");
            assert!(!seen.contains(&read(&heldout, i)), "{name}: held-out case {i} is trained on");
        }
    }
}

#[test]
fn rejects_impossible_sizes() {
    let said = |name: &str, vocabulary: u32, setting: (usize, f64)| {
        let problem = config(name, vocabulary, &[setting]).check().unwrap_err();
        format!("{} {}", problem.key, problem.detail)
    };
    let cases = [
        ("mqar", 64, (20, 8.0), "train has cases of 20 tokens, but difficulty 8 needs 32"),
        ("mqar", 16, (64, 8.0), "train has 8 pairs, too many for 16 ids"),
        ("mqar", 64, (64, 2.5), "train has 2.5 pairs; give a whole number above 0"),
        ("mqar-rebound", 64, (64, 7.0), "train has 7 bindings; every key has two"),
        ("flip-flop", 7, (64, 0.8), "train needs 6 ids, not 7"),
        ("flip-flop", 6, (64, 1.5), "train ignores a fraction of 1.5; it must be 0 to 1"),
        ("flip-flop", 6, (63, 0.5), "train has cases of 63 tokens; give an even number"),
        ("selective-copy", 4, (64, 4.0), "train needs at least 5 ids, not 4"),
        ("n-back", 9, (10, 5.0), "train has cases of 10 tokens, but difficulty 5 needs 13"),
        ("n-back", 9, (40, 9.0), "train goes 9 steps back, which 9 ids cannot say"),
        ("parity", 4, (9, 2.0), "train has the difficulty 2; give 0"),
    ];
    for (name, vocabulary, setting, expected) in cases {
        assert_eq!(said(name, vocabulary, setting), expected, "{name}");
    }
    let none = TaskConfig { test: Vec::new(), ..config("parity", 4, &[(9, 0.0)]) };
    assert_eq!(none.check().unwrap_err().key, "test");
    assert!(find("mqqr").is_none());
    let error = TaskDataset::train(config("mqqr", 64, &[(40, 8.0)])).unwrap_err().to_string();
    assert_eq!(
        error,
        "unknown task mqqr; the tasks are mqar, mqar-rebound, n-back, flip-flop, selective-copy, parity"
    );
}

#[test]
fn chance_level_counts_possible_answers() {
    let tasks = [
        ("mqar", 40, (50, 9.0)),
        ("flip-flop", 6, (64, 0.5)),
        ("n-back", 9, (41, 3.0)),
        ("parity", 4, (12, 0.0)),
        ("selective-copy", 11, (40, 8.0)),
    ];
    for (name, vocabulary, setting) in tasks {
        let cases = cases(name, vocabulary, setting, 200);
        let said: BTreeSet<u32> = cases.iter().flat_map(answers).map(|(_, token)| token).collect();
        assert_eq!(find(name).unwrap().chance(vocabulary), 1.0 / said.len() as f64, "{name}");
    }
}
