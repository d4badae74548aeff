//! `fox bench`: speed on this machine, as a fraction of the roofline.

mod attention;
mod capacity;
mod compare;
mod decode;
mod greedy;
mod hybrid;
mod logprobs;
mod sampled;
mod throughput;
mod train;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use fox_model::Architecture;
use fox_tensor::Device;
use fox_tensor::cases::Rng;

use crate::engine::free_on_host;
use crate::output;

/// Measure speed as a fraction of the roofline
///
/// Correctness is checked first, and the roofline is measured in the same run.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    Attention(attention::Args),
    Train(train::Args),
    Hybrid(hybrid::Args),
    Decode(decode::Args),
    Throughput(throughput::Args),
    #[command(hide = true)]
    Streams(throughput::Args),
    Capacity(capacity::Args),
    Greedy(greedy::Args),
    Logprobs(logprobs::Args),
    Compare(compare::Args),
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.benchmark {
        Benchmark::Attention(args) => attention::run(args),
        Benchmark::Train(args) => train::run(args),
        Benchmark::Hybrid(args) => hybrid::run(args),
        Benchmark::Decode(args) => decode::run(args),
        Benchmark::Throughput(args) => throughput::run(args),
        Benchmark::Streams(args) => {
            output::note("`fox bench streams` is now called `fox bench throughput`");
            throughput::run(args)
        }
        Benchmark::Capacity(args) => capacity::run(args),
        Benchmark::Greedy(args) => greedy::run(args),
        Benchmark::Logprobs(args) => logprobs::run(args),
        Benchmark::Compare(args) => compare::run(args),
    }
}

/// Seconds that `f` takes.
fn seconds<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, f64)> {
    let start = Instant::now();
    let value = f()?;
    Ok((value, start.elapsed().as_secs_f64()))
}

/// The median of an odd number of measurements.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Rejects operands that do not fit into host memory, where they are generated: a failed allocation would abort.
fn check_host_memory(bytes_per_token: usize, batch: usize, seq: usize) -> Result<()> {
    // Each sequence has one segment.
    let bytes = (seq as f64 * bytes_per_token as f64 + 64.0) * batch as f64;
    let free = free_on_host().unwrap_or(1 << 40) as f64;
    if bytes > free {
        bail!(
            "{batch} x {seq} tokens take {} and more, but {} of memory are free; lower --seq or --batch",
            output::bytes(bytes),
            output::bytes(free)
        );
    }
    Ok(())
}

/// Standard normal values.
fn normals(rng: &mut Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.normal() as f32).collect()
}

/// A description of the machine.
fn machine(device: &Device) -> String {
    if device.to_string() != "cpu" {
        return device.backend().description();
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{device}, {}, {threads} cores", fox_cpu::Level::detect().name())
}

/// The architectures of all mixers, by name.
fn architectures() -> impl TypedValueParser<Value = Architecture> {
    let names = Architecture::all().into_iter().map(|architecture| architecture.name);
    PossibleValuesParser::new(names)
        .try_map(|name| Architecture::by_name(&name).ok_or("no such architecture"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejects_batches_beyond_host_memory() {
        let refused = train::Batch::new(&Device::naive(), 8, 1 << 44, 256).err();
        let said = refused.map(|error| error.to_string()).unwrap_or_default();
        assert!(said.starts_with("8 x 17592186044416 tokens take "), "{said}");
        assert!(said.ends_with(" of memory are free; lower --seq or --batch"), "{said}");
    }
}
