//! Every kernel compiles for every supported architecture within its budget of registers and spills (`budget.toml`).
//! Needs NVRTC but no GPU; skipped without it.
//!
//! `FOX_COMPILE_ONLY=scan_delta` selects the sources whose name contains `scan_delta` and prints registers and spills;
//! `FOX_COMPILE_ALL=1` compiles all variants for every architecture instead of one per source for sm_89, sm_100 and
//! sm_120, and one per source and head dim for sm_80. `FOX_COMPILE_REPEAT=3` compiles every variant three more times and
//! fails where the machine code differs: some versions of NVRTC are not deterministic (`NOTES.md`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

use fox_cuda::{ComputeCapability, Generation, Source, compile, nvrtc_is_present, variants};
use serde::Deserialize;

/// Limits of one entry of `budget.toml`.
#[derive(Deserialize)]
struct Budget {
    /// Name of the source, e.g. `attention_fwd_sm90`.
    kernel: String,
    /// Defines that a variant must have for the entry to apply; the first entry that fits counts.
    #[serde(default)]
    defines: Vec<String>,
    /// Registers per thread.
    registers: u32,
    /// Bytes of spill loads.
    spill_loads: u32,
}

#[derive(Deserialize)]
struct Budgets {
    budget: Vec<Budget>,
}

/// Largest number before `unit` in the assembler's report.
fn largest(log: &str, unit: &str) -> u32 {
    let number = |line: &str| {
        let before = &line[..line.find(unit)?];
        before.trim().rsplit([' ', ',']).next()?.parse::<u32>().ok()
    };
    log.lines().filter_map(number).max().unwrap_or(0)
}

fn check(
    architecture: &str,
    source: Source,
    defines: &[String],
    budgets: &[Budget],
    repeat: usize,
) -> Option<String> {
    let name = format!("{architecture} {} {}", source.name, defines.join(" "));
    let compiled = match compile(source, architecture, defines) {
        Ok(compiled) => compiled,
        Err(e) => return Some(format!("{name}: {e}")),
    };
    for _ in 0..repeat {
        match compile(source, architecture, defines) {
            Ok(again) if again.cubin == compiled.cubin => {}
            _ => return Some(format!("{name}: other machine code when it was compiled again")),
        }
    }
    let fits =
        |b: &&Budget| b.kernel == source.name && b.defines.iter().all(|d| defines.contains(d));
    let Some(budget) = budgets.iter().find(fits) else {
        return Some(format!("{name}: no entry in budget.toml"));
    };
    let registers = largest(&compiled.log, " registers");
    let spills = largest(&compiled.log, " bytes spill loads");
    let serialized = compiled.log.contains("serialized");
    if std::env::var_os("FOX_COMPILE_ONLY").is_some() {
        println!("{name}: {registers} registers, {spills} bytes of spill loads");
    }
    (registers > budget.registers || spills > budget.spill_loads || serialized).then(|| {
        format!("{name}: {registers} registers, {spills} bytes of spill loads, serialized products: {serialized}")
    })
}

#[test]
fn kernels_compile_within_register_budget() {
    if !nvrtc_is_present() {
        println!("skipped: libnvrtc was not found");
        return;
    }
    let budgets: Budgets = toml::from_str(include_str!("../budget.toml")).unwrap();
    // All variants of the Hopper kernels; of the others those without gates, windows and masks are skipped, which only
    // differ in the mask.
    let usual = |defines: &[String]| {
        let has = |d: &str| defines.iter().any(|x| x == d);
        !has("GATES=0") && !has("MASK=1") && !has("WINDOW=1")
    };
    let only = std::env::var("FOX_COMPILE_ONLY").unwrap_or_default();
    let all = std::env::var_os("FOX_COMPILE_ALL").is_some();
    let repeat = std::env::var("FOX_COMPILE_REPEAT").map_or(0, |n| n.parse().unwrap());
    let mut builds = Vec::new();
    let mut counts = BTreeMap::new();
    let capabilities = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)];
    for capability in capabilities.map(|(major, minor)| ComputeCapability { major, minor }) {
        let (architecture, generation) = (capability.target(), capability.generation());
        let mut variants = variants(generation);
        variants.retain(|(source, defines)| source.name.ends_with("sm90") || usual(defines));
        variants.retain(|(source, _)| source.name.contains(&only));
        // Of the others one variant per source, on Ampere one per head dim: the code is Hopper's, without its own kernels.
        if !all && generation != Generation::Hopper {
            let head_dim = |defines: &[String]| {
                let ampere = (generation == Generation::Ampere).then_some(defines)?;
                ampere.iter().find(|define| define.starts_with("HEAD_DIM=")).cloned()
            };
            let mut seen = BTreeSet::new();
            variants.retain(|(source, defines)| seen.insert((source.name, head_dim(defines))));
        }
        counts.insert(architecture.clone(), variants.len());
        let job = |(source, defines)| (architecture.clone(), source, defines);
        builds.extend(variants.into_iter().map(job));
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut failures = Vec::new();
        while let Some((arch, source, defines)) = builds.get(next.fetch_add(1, Ordering::Relaxed)) {
            failures.extend(check(arch, *source, defines, &budgets.budget, repeat));
        }
        failures
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let failures: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    println!("variants compiled: {counts:?}");
    assert!(!builds.is_empty(), "no kernel source is called anything like {only}");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn racecheck_variants_compile() {
    if !nvrtc_is_present() {
        println!("skipped: libnvrtc was not found");
        return;
    }
    for name in ["attention_fwd_sm90", "attention_bwd_sm90", "decode_matmul_sm90", "scan_delta"] {
        let mut variants = variants(Generation::Hopper);
        variants.retain(|(source, _)| source.name == name);
        let (source, mut defines) =
            variants.pop().unwrap_or_else(|| panic!("no variant of {name}"));
        defines.push("RACECHECK=1".to_owned());
        compile(source, "sm_90a", &defines).unwrap();
    }
}
