//! Training a FoX in thirty lines: a text becomes a model that `fox generate` and others can load.
//!
//! ```sh
//! cargo run --release -p fox-train --example train -- my.txt runs/mine
//! ```

use std::ops::ControlFlow;

use fox_data::{HeldOut, PrepareOptions, Tokenizer, prepare};
use fox_train::{Event, RunSpec, recipe, train};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let (Some(text), Some(run)) = (words.next(), words.next()) else {
        return Err("usage: train TEXT RUN".into());
    };
    // Bytes as tokens; the last tenth of the text is held out.
    let data = std::path::Path::new(&run).join("data");
    let mut options = PrepareOptions::new(text, &data, Tokenizer::from_name("bytes")?);
    options.held_out = HeldOut::Ends { fraction: 0.1 };
    prepare(&options, |_| ControlFlow::Continue(()))?;

    let mut recipe = recipe::load("tiny-fox-pro", &["data.sequence_length=256".into()])?;
    recipe.data.path = Some(data);
    let spec = RunSpec { recipe, out: run.into(), device: fox_cpu::device(), command: vec![] };
    let outcome = train(&spec, &mut |event| {
        match event {
            Event::Step(step) => {
                println!("step {}  loss {:.3}", step.step, step.loss.unwrap_or(f64::NAN))
            }
            Event::Evaluated(record) => println!("held-out loss {:.3}", record.evaluation.loss),
            _ => {}
        }
        ControlFlow::Continue(())
    })?;
    println!("{} has the exported model", spec.out.join("export").display());
    assert!(outcome.summary.finished);
    Ok(())
}
