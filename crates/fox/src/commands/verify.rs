//! `fox verify`: the same weights and tokens must give the values of the reference.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use fox_model::{Tolerances, VerifyCheck, VerifyReport, verify_dump};
use serde_json::{Value, json};

use crate::device::DeviceArgs;
use crate::output;

/// What a dump folder has beside a checkpoint.
const DUMP: &str = "io.safetensors";

/// Verify a model against reference dumps
///
/// A dump folder holds config.json, model.safetensors and io.safetensors: tokens, logits, loss per
/// token, mean loss, the gradient of every trained tensor and a greedy continuation. All of it is
/// computed again, logits and continuation also through the decode cache, token by token and in
/// chunks. Errors are norm-wise relative per tensor; for greedy, tokens that differ.
///
/// The exit code is 0 only if every error of every folder is within its tolerance.
#[derive(clap::Args)]
pub struct Args {
    /// Dump folders
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    /// Largest relative error of the logits
    #[arg(long, value_name = "X", default_value_t = Tolerances::default().logits)]
    tol_logits: f64,
    /// Largest relative error of the losses
    #[arg(long, value_name = "X", default_value_t = Tolerances::default().loss)]
    tol_loss: f64,
    /// Largest relative error of each gradient
    #[arg(long, value_name = "X", default_value_t = Tolerances::default().grad)]
    tol_grad: f64,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = args.device.open_exact()?;
    let tolerances =
        Tolerances { logits: args.tol_logits, loss: args.tol_loss, grad: args.tol_grad };
    let (mut all_passed, mut documents) = (true, Vec::new());
    for dir in &args.dirs {
        // One folder that cannot be read does not hide the others.
        let result = verify_dump(dir, &device, &tolerances);
        all_passed &= result.as_ref().is_ok_and(VerifyReport::passed);
        match result {
            Ok(report) if args.json => documents.push(document(dir, &report)),
            Ok(report) => output::print(&text(dir, &report))?,
            Err(error) => {
                let why = match dir.is_dir() && !dir.join(DUMP).is_file() {
                    true => format!(
                        "{} has no {DUMP}, the results of a reference; name a dump folder such as fixtures/models/fox_pro",
                        dir.display()
                    ),
                    false => error.to_string(),
                };
                output::note(&format!("error: {why}"));
                documents.push(json!({
                    "dir": dir.display().to_string(), "passed": false, "error": why,
                }));
            }
        }
    }
    if args.json {
        let all = json!({
            "device": device.to_string(), "passed": all_passed, "dumps": documents,
        });
        output::print(&format!("{all:#}\n"))?;
    }
    Ok(if all_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(dir: &Path, report: &VerifyReport) -> String {
    let mut rows = vec![["", "error", "tolerance", ""].map(String::from).to_vec()];
    rows.extend(report.checks.iter().map(row));
    let failed = report.checks.iter().filter(|check| !check.passed()).count();
    let verdict = match failed {
        0 => format!("PASS: {} comparisons", report.checks.len()),
        n => format!("FAIL: {n} of {} comparisons", report.checks.len()),
    };
    format!(
        "{} ({}, {} parameters)\n{}{verdict}\n",
        dir.display(),
        report.model_type.as_str(),
        output::grouped(report.parameters),
        output::table(&rows),
    )
}

fn row(check: &VerifyCheck) -> Vec<String> {
    let number = |x: f64| if x == 0.0 { "0".to_string() } else { format!("{x:.2e}") };
    let mark = if check.passed() { "ok" } else { "FAIL" };
    vec![check.name.clone(), number(check.error), number(check.tolerance), mark.to_string()]
}

fn document(dir: &Path, report: &VerifyReport) -> Value {
    let check = |check: &VerifyCheck| {
        json!({
            "name": check.name, "error": check.error,
            "tolerance": check.tolerance, "passed": check.passed(),
        })
    };
    json!({
        "dir": dir.display().to_string(),
        "model_type": report.model_type.as_str(),
        "parameters": report.parameters,
        "passed": report.passed(),
        "checks": report.checks.iter().map(check).collect::<Vec<_>>(),
    })
}
