//! `fox selftest`: is what this machine computes what the oracle computes?

mod decoding;
mod log;
mod packed;
mod slots;
mod totals;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};
use fox_base::difference::relative_error;
use fox_model::{Tolerances, VerifyReport, verify_dump};
use fox_tensor::cases::{self, AttentionCase, Case, CaseResult, Data, PagedCase};
use fox_tensor::{DType, Device, DeviceKind, Error};
use serde_json::json;

use crate::device::DeviceArgs;
use log::Log;

/// Compare every op on this device with the oracle
///
/// Every op case is computed by the device and by the oracle in double precision, forward and backward, with
/// fresh device memory full of NaN, and once more on the device: the bits must be the same. A decode state
/// must give what a forward pass gives. Dump folders, if named, are proven as by `fox verify`. On a GPU all
/// this happens in f32 and in bf16 (dumps in f32).
///
/// Errors are measured twice, by norm and by the largest element, each relative to the oracle's. The tolerance
/// is 2e-5 in f32; on a GPU, where the CPU's error in f32 is nearly as large, twice that error (three times for
/// the largest element). In bf16 it is twice the error that rounding the operands (output gradients among them)
/// and the result to bf16 makes by itself (three times for the gradient of the forget gates).
///
/// A GPU also gets large cases, in which every thread block takes several tiles; they are compared with the
/// CPU in f32, since the oracle would take minutes for each.
#[derive(clap::Args)]
pub struct Args {
    /// Dump folders to prove, see `fox verify`
    #[arg(value_name = "DIR")]
    dumps: Vec<PathBuf>,
    /// Only cases whose name contains this, e.g. attention, decoding/mamba2, pages, row products, packed
    /// weights, slots or wrong-operands
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Random cases of each kind of attention and of scans beside the list
    #[arg(long, value_name = "N", default_value_t = 50)]
    random: u64,
    /// Large cases on the CPU, too, against the oracle: minutes; a GPU always has them
    #[arg(long)]
    large: bool,
    /// Pass even where this device does not have an op
    #[arg(long)]
    allow_unsupported: bool,
    /// Print the error of every case
    #[arg(long)]
    verbose: bool,
    /// Print the figures as JSON
    #[arg(long, conflicts_with = "verbose")]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Relative error that f32 arithmetic may have, by norm and by the largest element: 330 unit roundoffs. Sums of the
/// cases have up to about 1,000 terms, whose roundings add up to some sqrt(1000) = 32 of them; a backward pass chains
/// up to four products, and differences of results (dP - delta, logits less their maximum) cost a factor of two to
/// three. Where gates are closed, dP and delta are equal and their difference is rounding error alone; see
/// [`Peer::Cpu`].
const TOLERANCE: f64 = 2e-5;
/// Half a unit in the last place of bf16.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let cases = !all_cases(args)?.is_empty() || !large_cases(args).is_empty();
    let decoding = decoding::cases().iter().any(|(name, ..)| args.wants(name));
    let slots = slots::cases().iter().any(|case| args.wants(case.name));
    let [pages, products, packed, greedy, wrong] =
        ["pages", "row products", "packed weights", slots::GREEDY, WRONG_OPERANDS]
            .map(|name| args.wants(name));
    let any = cases || decoding || pages || products || packed || slots || greedy || wrong;
    if let (Some(text), false) = (&args.only, any) {
        bail!("no case name contains `{text}`; --verbose lists all names");
    }
    let (mut passed, mut log) = (true, Log::new(args.json));
    for device in args.device.open_poisoned()? {
        log.line(&device.backend().description())?;
        let caps = device.backend().caps();
        if cases {
            passed &= check_cases(args, &device, &mut log)?;
        }
        if decoding {
            passed &= decoding::check(args, &device, &mut log)?;
        }
        if pages {
            passed &= check_pages(&device, &mut log)?;
            passed &= totals::check(&device, &mut log)?;
        }
        if products {
            passed &= slots::check_products(&device, &slots::PRODUCTS, &mut log)?;
        }
        if packed {
            passed &= packed::check(&device, &mut log)?;
        }
        if slots {
            passed &= slots::check_steps(args, &device, &mut log)?;
        }
        if greedy {
            passed &= slots::check_greedy(&device, &mut log)?;
        }
        if wrong {
            passed &= check_wrong_operands(&device, &mut log)?;
        }
        if caps.activation_type == DType::F32 {
            passed &= check_dumps(args, &device, &mut log)?;
        }
        log.end_device(&device);
    }
    log.finish(passed)?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Args {
    fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|text| name.contains(text))
    }
}

/// Name of [`check_wrong_operands`] for `--only`.
const WRONG_OPERANDS: &str = "wrong-operands";

/// Calls every op with operands of wrong shape, type, storage or device: each call must return an error. Under
/// compute-sanitizer this also shows that no kernel accesses memory out of bounds.
fn check_wrong_operands(device: &Device, log: &mut Log) -> Result<bool> {
    let others = [Device::naive(), fox_cpu::device()];
    let cases::WrongOperands { calls, accepted } = cases::refuse_wrong_operands(device, &others)?;
    let mut text = format!("  {calls} calls with wrong operands, {} accepted\n", accepted.len());
    for call in &accepted {
        text += &format!("  FAIL {call}: no error\n");
    }
    let figures = json!({ "name": WRONG_OPERANDS, "cases": calls, "failures": accepted });
    log.check(accepted.is_empty(), &text, figures)
}

/// Descriptions of the large cases: their operands take long to draw.
fn large_cases(args: &Args) -> Vec<AttentionCase> {
    let mut cases = cases::large_attention();
    cases.retain(|case| args.wants(&case.name()));
    cases
}

fn all_cases(args: &Args) -> Result<Vec<Case>> {
    let mut cases = cases::all();
    for seed in 0..args.random {
        cases.push(cases::random_attention(seed)?);
        cases.push(cases::random_stick_breaking(seed)?);
        cases.push(cases::random_path_attention(seed)?);
        cases.push(cases::random_scan(seed)?);
    }
    cases.retain(|case| args.wants(&case.name));
    Ok(cases)
}

/// What happened to the cases.
#[derive(Default)]
struct Tally {
    /// Print the error of every case.
    verbose: bool,
    compared: usize,
    unsupported: usize,
    failures: Vec<String>,
    worst: f64,
    worst_name: String,
}

fn check_cases(args: &Args, device: &Device, log: &mut Log) -> Result<bool> {
    let (begin, mut tally) = (Instant::now(), Tally::new(args.verbose));
    // Cases are not copied, only made again: the second list gets rounded operands.
    let rounded = all_cases(args)?;
    let oracle = Device::naive();
    for (case, rounded) in all_cases(args)?.iter().zip(rounded) {
        tally.check(case, rounded, device, &oracle)?;
    }
    let is_gpu = device.backend().kind() == DeviceKind::Cuda;
    if is_gpu || args.large {
        let reference = if is_gpu { fox_cpu::device() } else { oracle };
        for case in large_cases(args) {
            tally.check(&case.build()?, case.build()?, device, &reference)?;
        }
        for (case, again) in cases::large_wall().iter().zip(cases::large_wall()) {
            if args.wants(&case.name) {
                tally.check(case, again, device, &reference)?;
            }
        }
        for case in cases::large_path_attention() {
            let build = || cases::path_attention_case(&case);
            if args.wants(&build()?.name) {
                tally.check(&build()?, build()?, device, &reference)?;
            }
        }
    }
    let Tally { compared, unsupported, failures, worst, worst_name, .. } = tally;
    let seconds = begin.elapsed().as_secs_f64();
    let mut text = format!(
        "  op cases: {compared} compared, worst error {worst:.2} of its tolerance ({worst_name}), {seconds:.0} s\n"
    );
    if unsupported > 0 {
        let verdict = if args.allow_unsupported { "" } else { "FAIL " };
        text += &format!("  {verdict}{unsupported} cases of ops that this device does not have\n");
    }
    for failure in failures.iter().take(40) {
        text += &format!("  FAIL {failure}\n");
    }
    if failures.len() > 40 {
        text += &format!("  and {} more\n", failures.len() - 40);
    }
    let passed = failures.is_empty() && (unsupported == 0 || args.allow_unsupported);
    let figures = json!({
        "name": "op cases", "cases": compared, "unsupported": unsupported, "failures": failures,
        "worst_fraction_of_tolerance": worst, "worst_case": worst_name, "seconds": seconds,
    });
    log.check(passed, &text, figures)
}

impl Tally {
    fn new(verbose: bool) -> Self {
        Tally { verbose, ..Tally::default() }
    }

    /// Runs a case twice on the device, and on the reference, in bf16 also with the operands of `rounded`, the
    /// same case once more.
    fn check(
        &mut self,
        case: &Case,
        rounded: Case,
        device: &Device,
        reference: &Device,
    ) -> Result<()> {
        let got = match cases::run(case, device) {
            Ok(got) => got,
            Err(Error::Unsupported { .. }) => {
                self.unsupported += 1;
                return Ok(());
            }
            Err(error) => {
                self.failures.push(format!("{}: {error}", case.name));
                return Ok(());
            }
        };
        let again = cases::run(case, device)?;
        let want = cases::run(case, reference)?;
        let backend = device.backend();
        let peer = if backend.caps().activation_type == DType::Bf16 {
            Some(Peer::Rounded(cases::run(&round(rounded), reference)?))
        } else if backend.kind() == DeviceKind::Cuda && !is_cpu(reference) {
            Some(Peer::Cpu(cases::run(case, &fox_cpu::device())?))
        } else {
            None
        };
        self.judge(case, [&got, &again], &want, peer.as_ref())
    }

    /// Compares what two runs gave with what should come out, allowing for the error of a result in the same precision.
    fn judge(
        &mut self,
        case: &Case,
        [got, again]: [&CaseResult; 2],
        want: &CaseResult,
        peer: Option<&Peer>,
    ) -> Result<()> {
        self.compared += 1;
        if got.outputs != again.outputs || got.gradients != again.gradients {
            self.failures.push(format!("{}: two runs differ", case.name));
        }
        for (measure, by, factor) in MEASURES {
            let of_peer = peer.map(|peer| cases::compare_by(measure, peer.result(), want));
            let errors = cases::compare_by(measure, got, want);
            for (i, (name, error)) in errors.into_iter().enumerate() {
                // The bf16 kernels use other tile sizes.
                if matches!(peer, Some(Peer::Rounded(_))) && name == "tiles" {
                    continue;
                }
                let tolerance = match (peer, of_peer.as_ref().map(|errors| errors[i].1)) {
                    (Some(Peer::Rounded(_)), Some(error)) => bf16_tolerance(&name, factor, error),
                    (Some(Peer::Cpu(_)), Some(error)) => {
                        TOLERANCE.max(factor * error.min(TOLERANCE))
                    }
                    _ => TOLERANCE,
                };
                let name = format!("{}: {name}", case.name);
                self.note(&name, by, error, tolerance)?;
            }
        }
        Ok(())
    }

    fn note(&mut self, name: &str, by: &str, error: f64, tolerance: f64) -> Result<()> {
        let share = if error.is_finite() { error / tolerance } else { f64::INFINITY };
        if share > self.worst {
            (self.worst, self.worst_name) = (share, format!("{name} {by}"));
        }
        let line = format!("{name} is off by {error:.1e} {by}, {tolerance:.1e} is allowed");
        if share > 1.0 {
            self.failures.push(line);
        } else if self.verbose {
            crate::output::print(&format!("  {line}\n"))?;
        }
        Ok(())
    }
}

fn is_cpu(device: &Device) -> bool {
    device.backend().kind() == DeviceKind::Cpu
}

/// A distance of a result from what is expected.
type Measure = fn(&[f64], &[f64]) -> f64;

/// What is measured of every result, how a message says it, and how often the error that rounding makes by
/// itself is allowed. That error is known from one draw of the roundings: the largest of its elements varies
/// more from draw to draw than its norm.
const MEASURES: [(Measure, &str, f64); 2] = [
    (cases::relative_error, "by norm", 2.0),
    (cases::largest_error, "in its largest element", 3.0),
];

/// A result in the precision of the device, whose error sets the tolerance.
enum Peer {
    /// In bf16: the reference with rounded operands.
    Rounded(CaseResult),
    /// In f32 on a GPU: the CPU, which by itself may be off by [`TOLERANCE`]. Where a result is the difference of
    /// equal numbers, such as `d q` with closed gates, plain f32 sums in two orders differ by up to 3e-5 of
    /// [`cases::FLOOR`] in the largest of 100,000 elements.
    Cpu(CaseResult),
}

impl Peer {
    fn result(&self) -> &CaseResult {
        match self {
            Peer::Rounded(result) | Peer::Cpu(result) => result,
        }
    }
}

/// Allows in bf16 `factor` times what `rounding` the operands and the result makes by itself.
fn bf16_tolerance(name: &str, factor: f64, rounding: f64) -> f64 {
    // The GPU corrects this sum over all later queries in groups of 16.
    let factor = if name == "d log_gates" { 3.0 } else { factor };
    factor * (rounding + BF16_ROUNDING)
}

/// Rounds what a GPU holds in bf16: everything but gates, their logits, weights of losses.
fn round(mut case: Case) -> Case {
    case.rounding = to_bf16;
    const WIDE: [&str; 6] = ["log_gates", "log_decay", "shift", "z", "bias", "weights"];
    for input in case.inputs.iter_mut().filter(|input| !WIDE.contains(&input.name)) {
        if let Data::Real(values) = &mut input.data {
            values.iter_mut().for_each(|x| *x = to_bf16(*x));
        }
    }
    case
}

/// The nearest bf16, ties to even.
fn to_bf16(x: f64) -> f64 {
    let bits = (x as f32).to_bits();
    let up = 0x7fff + ((bits >> 16) & 1);
    f64::from(f32::from_bits(bits.wrapping_add(up) & 0xffff_0000))
}

/// Attention over pages against the oracle.
fn check_pages(device: &Device, log: &mut Log) -> Result<bool> {
    const CASES: u64 = 60;
    const DROPPED: u64 = 20;
    let narrow = device.backend().caps().activation_type == DType::Bf16;
    let (mut worst, mut failures) = (0.0f64, String::new());
    let random = (0..CASES).map(|seed| (format!("pages {seed}"), PagedCase::random(seed)));
    let dropped = (0..DROPPED)
        .map(|seed| (format!("dropped pages {seed}"), PagedCase::with_dropped_pages(seed)));
    for (name, case) in random.chain(dropped) {
        let case = case?;
        let run =
            |case: &PagedCase, device: &Device| case.run(device, &case.pages(device)?, &case.spec);
        let (want, got) = (run(&case, &Device::naive())?, run(&case, device)?);
        let tolerance = match narrow {
            true => {
                let mut rounded = case.clone();
                let keys = rounded.sequences.iter_mut().flat_map(|s| [&mut s.k, &mut s.v]);
                keys.chain([&mut rounded.q]).flatten().for_each(|x| *x = to_bf16(*x));
                2.0 * (distance(&run(&rounded, &Device::naive())?, &want) + BF16_ROUNDING)
            }
            false => TOLERANCE,
        };
        let error = distance(&got, &want);
        let share = if error.is_finite() { error / tolerance } else { f64::INFINITY };
        worst = worst.max(share);
        if share > 1.0 {
            failures += &format!("  FAIL {name}: off by {error:.1e}, {tolerance:.1e} is allowed\n");
        }
        if run(&case, device)? != got {
            failures += &format!("  FAIL {name}: two runs differ\n");
        }
    }
    let text =
        format!("  {} cases of pages, worst error {worst:.2} of its tolerance\n", CASES + DROPPED);
    let figures = json!({
        "name": "pages", "cases": CASES + DROPPED, "worst_fraction_of_tolerance": worst,
        "failures": failures,
    });
    log.check(failures.is_empty(), &(text + &failures), figures)
}

/// Relative distance of two results; what should be zero must be.
fn distance(got: &[f64], want: &[f64]) -> f64 {
    relative_error(got, want, f64::MIN_POSITIVE)
}

fn check_dumps(args: &Args, device: &Device, log: &mut Log) -> Result<bool> {
    let mut passed = true;
    for dir in &args.dumps {
        let (agrees, text) = match verify_dump(dir, device, &Tolerances::default()) {
            Ok(report) => (report.passed(), verdict(&report)),
            Err(error) => (false, format!("FAIL {error}")),
        };
        let figures = json!({ "name": dir, "result": text });
        passed &= log.check(agrees, &format!("  {}: {text}\n", dir.display()), figures)?;
    }
    Ok(passed)
}

fn verdict(report: &VerifyReport) -> String {
    let failed: Vec<_> = report.checks.iter().filter(|check| !check.passed()).collect();
    if failed.is_empty() {
        return format!("{} comparisons agree", report.checks.len());
    }
    let names =
        failed.iter().map(|c| format!("{} ({:.1e} > {:.1e})", c.name, c.error, c.tolerance));
    format!("FAIL {}", names.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(value: f64) -> CaseResult {
        CaseResult { outputs: vec![("o".into(), vec![value])], ..CaseResult::default() }
    }

    #[test]
    fn f32_tolerance_follows_the_cpu() {
        let case = Case::new("one number", |_, _| Ok(Vec::new()));
        let failures = |got: f64, peer: Option<f64>| {
            let (peer, mut tally) = (peer.map(|x| Peer::Cpu(result(x))), Tally::default());
            let got = result(got);
            tally.judge(&case, [&got, &got], &result(1.0), peer.as_ref()).unwrap();
            tally.failures.len()
        };
        // By norm twice the error of the CPU, in the largest element three times; at least 2e-5, at most 6e-5.
        for (got, peer, expected) in [
            (1.0 + 1.9e-5, None, 0),
            (1.0 + 2.1e-5, None, 2),
            (1.0 + 2.1e-5, Some(1.0 + 1e-7), 2),
            (1.0 + 2.9e-5, Some(1.0 - 1.6e-5), 0),
            (1.0 + 4.0e-5, Some(1.0 - 1.6e-5), 1),
            (1.0 + 5.0e-5, Some(1.0 - 1.6e-5), 2),
            (1.0 + 6.1e-5, Some(2.0), 2),
        ] {
            assert_eq!(failures(got, peer), expected, "{got} {peer:?}");
        }
    }
}
