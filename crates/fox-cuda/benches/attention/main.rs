//! Checks forgetting attention on the GPU against an f64 reference, then times it.
//!
//! `cargo bench -p fox-cuda --bench attention -- check bench`
//!
//! `check [name]` runs the cases and `bench [name]` times the shapes whose name contains `name`; `sanitize` runs a few
//! small cases without comparing much, for compute-sanitizer. The exit code is 1 when a case fails.

#![allow(clippy::unwrap_used)] // a driver: a broken assumption should stop it

mod bench;
mod cases;
mod reference;

use fox_cuda::{Gpu, Result};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match run(&args) {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(e) => {
            eprintln!("{e}");
            std::process::exit(2);
        }
    }
}

fn run(args: &[String]) -> Result<bool> {
    let gpu = Gpu::new(0)?;
    println!("{gpu:?}, {} multiprocessors, {} MiB L2", gpu.processors(), gpu.l2_bytes() >> 20);
    let mut good = true;
    let mut args = args.iter().peekable();
    while let Some(arg) = args.next() {
        let filter = args.next_if(|a| !["bench", "check", "sanitize"].contains(&a.as_str()));
        let filter = filter.map_or("", |f| f);
        match arg.as_str() {
            "check" => good &= cases::check_all(&gpu, filter)?,
            "sanitize" => cases::run_small(&gpu)?,
            "bench" => bench::table(&gpu, filter)?,
            other => eprintln!("unknown: {other}"),
        }
    }
    Ok(good)
}
