//! Prints a sample and the figures of the synthetic corpus: `cargo run -p fox-data --release --example synthetic_statistics`

use std::time::Instant;

use fox_data::SyntheticConfig;
use fox_data::synthetic::{SyntheticDocument, SyntheticStatistics, SyntheticTokenizer, TokenKind};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = SyntheticConfig::default();
    let sample: Vec<u32> = SyntheticDocument::new(&config, 0).take(60).map(|t| t.id).collect();
    println!("{} ...\n", SyntheticTokenizer.decode(&sample)?);

    let (documents, len) = (64, 32_768);
    let start = Instant::now();
    let s = SyntheticStatistics::measure(&config, documents, len);
    let seconds = start.elapsed().as_secs_f64();
    let tokens = s.tokens as f64;
    let percent = |n: u64| 100.0 * n as f64 / tokens;
    println!(
        "{documents} documents of {len} tokens, {:.1} million tokens/s",
        tokens / seconds / 1e6
    );
    let (titles, names) = (config.titles, config.names_per_title);
    println!("mean gap {:.0} tokens, {titles} titles of {names} names", config.mean_gap());
    println!(
        "titles {:.2}% of tokens, names stated {:.2}%, asked {:.2}%",
        percent(s.titles),
        percent(s.stated),
        percent(s.asked)
    );
    println!(
        "grammar {:.3} nats/token, titles {:.3}, stated names {:.3}, asked names {:.3} without memory",
        s.grammar_nats / tokens,
        s.titles as f64 / tokens * (titles as f64).ln(),
        s.stated as f64 / tokens * (names as f64).ln(),
        s.asked as f64 / tokens * (names as f64).ln(),
    );
    println!("\ndistance of a question to the last mention:");
    for (octave, &count) in s.distances.counts.iter().enumerate().filter(|(_, c)| **c > 0) {
        let share = 100.0 * count as f64 / s.asked as f64;
        println!("  {:>6} .. {:<6} {share:5.1}%", 1_u64 << octave, (2_u64 << octave) - 1);
    }
    println!(
        "  before the document {:5.1}%",
        100.0 * s.distances.unanswerable as f64 / s.asked as f64
    );

    println!("\ndifferent facts mentioned in a window:");
    for window in [64, 256, 1024, 4096] {
        println!("  {window:>6} tokens: {:.1}", open_facts(&config, window));
    }

    println!("\nattainable loss (nats/token) at a position, by reach of memory:");
    let reaches = [0, 64, 256, 512, u64::MAX];
    print!("  position      ");
    for reach in reaches {
        let name = if reach == u64::MAX { "all".to_owned() } else { reach.to_string() };
        print!("{name:>8}");
    }
    println!();
    let curves = reaches.map(|reach| config.attainable_loss(1024, 4096, reach));
    for k in 4..12 {
        let range = 1_usize << k..2 << k;
        print!("  {:>5} .. {:<5}", range.start, range.end - 1);
        for curve in &curves {
            print!("{:8.3}", curve[range.clone()].iter().sum::<f64>() / range.len() as f64);
        }
        println!();
    }
    Ok(())
}

/// Mean number of titles in a window in the middle of documents.
fn open_facts(config: &SyntheticConfig, window: usize) -> f64 {
    let documents = 16;
    let total: usize = (0..documents)
        .map(|index| {
            let mut titles: Vec<u32> = SyntheticDocument::new(config, index)
                .skip(20_000)
                .take(window)
                .filter(|t| t.kind == TokenKind::Title)
                .map(|t| t.id)
                .collect();
            titles.sort_unstable();
            titles.dedup();
            titles.len()
        })
        .sum();
    total as f64 / documents as f64
}
