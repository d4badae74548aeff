//! Prints a sample and the figures of the synthetic corpus: `cargo run -p fox-data --release --example synthetic_corpus`

use fox_data::SyntheticConfig;
use fox_data::synthetic::{SyntheticDocument, SyntheticTokenizer, TokenKind};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = SyntheticConfig::default();
    let sample: Vec<u32> = SyntheticDocument::new(&config, 0).take(120).map(|t| t.id).collect();
    println!("{} ...\n", SyntheticTokenizer.decode(&sample)?);

    let (documents, len) = (1024, 4096);
    let (mut tokens, mut new, mut distances) = (0_u64, 0_u64, vec![0_u64; 13]);
    for index in 0..documents {
        for token in SyntheticDocument::new(&config, index).take(len) {
            tokens += 1;
            match token.kind {
                TokenKind::Action { distance: Some(d) } => distances[d.ilog2() as usize] += 1,
                TokenKind::Action { distance: None } => new += 1,
                _ => {}
            }
        }
    }
    let facts = (new + distances.iter().sum::<u64>()) as f64;
    println!("{documents} documents of {len} tokens, {:.1}% facts", 200.0 * facts / tokens as f64);
    println!("\ntokens since a fact was last said in its chapter:");
    println!("  never          {:5.1}%", 100.0 * new as f64 / facts);
    for (octave, &count) in distances.iter().enumerate().filter(|(_, c)| **c > 0) {
        let share = 100.0 * count as f64 / facts;
        println!("  {:>4} .. {:<6} {share:5.1}%", 1_u64 << octave, (2_u64 << octave) - 1);
    }

    println!("\nattainable loss (nats/token) at a position, by reach of memory:");
    let reaches = [0, 64, 256, 512, u64::MAX];
    print!("  position      ");
    for reach in reaches {
        let name = if reach == u64::MAX { "all".to_owned() } else { reach.to_string() };
        print!("{name:>8}");
    }
    println!();
    let curves = reaches.map(|reach| config.attainable_loss(4096, len, reach));
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
