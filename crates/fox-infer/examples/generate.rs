//! Text from a model, inside of a program: what `fox generate` does, in thirty lines.
//!
//! ```sh
//! cargo run --release -p fox-infer --example generate -- runs/tiny-fox-pro/export "Ann sings. Ben"
//! ```

use std::io::Write;
use std::path::Path;

use fox_data::Tokenizer;
use fox_infer::{Engine, EngineOptions, Event, Request, Sampling, TextDecoder};
use fox_model::Model;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(folder), Some(prompt)) = (words.next(), words.next()) else {
        return Err("usage: generate CHECKPOINT PROMPT".into());
    };
    let folder = Path::new(&folder);
    let tokenizer = Tokenizer::load(folder)?;
    let model = Model::from_checkpoint(folder, &fox_cpu::device())?;
    let engine = Engine::start(model, EngineOptions::default())?;

    let ids: Vec<i32> = tokenizer.encode(&prompt)?.into_iter().map(|id| id as i32).collect();
    // Ids become text as they come: a letter may need several of them.
    let mut text = TextDecoder::new(&tokenizer, &ids, &[])?;
    let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
    for event in engine.submit(Request { sampling, ..Request::greedy(ids, 64) })? {
        let delta = match event {
            Event::Token(token) => text.push(token.id)?,
            Event::Finished(_) => text.finish()?,
            _ => continue,
        };
        print!("{}", delta.text);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
