//! A training process is killed at random moments, many times; its result is that of an uninterrupted run, bit for bit.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use common::{checkpoints, command, metrics, recipe, result, run, stderr, succeeded};
use fox_base::random::SplitMix64;

/// Waits until the process has written a checkpoint or ended, for one second at most.
fn wait_for_progress(child: &mut Child, out: &Path, before: usize) {
    let newest = || checkpoints(out).pop().map_or(0, |p| step_of(&p));
    let start = Instant::now();
    while newest() <= before
        && child.try_wait().unwrap().is_none()
        && start.elapsed() < Duration::from_secs(5)
    {
        sleep(Duration::from_millis(2));
    }
}

fn step_of(path: &Path) -> usize {
    let name = path.file_name().unwrap().to_str().unwrap();
    name.strip_prefix("step-").unwrap().parse().unwrap()
}

/// Runs to the end in `out`, killed at random moments at most `kills` times; returns the number of kills.
fn torn_run(
    recipe: &Path,
    out: &Path,
    extra: &[&str],
    kills: usize,
    moments: &mut SplitMix64,
) -> usize {
    let (mut killed, mut starts) = (0, 0);
    loop {
        starts += 1;
        let before = checkpoints(out).pop().map_or(0, |p| step_of(&p));
        let mut child = command(recipe, out, extra)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        if killed < kills {
            // Every third start is killed immediately; the others once they train.
            if moments.below(3) > 0 {
                wait_for_progress(&mut child, out, before);
            }
            sleep(Duration::from_millis(moments.below(120)));
            if child.try_wait().unwrap().is_none() {
                child.kill().unwrap();
                killed += 1;
            }
        }
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            println!("{killed} kills in {starts} starts");
            return killed;
        }
        // Any other end than a kill is a failure.
        assert_eq!(output.status.code(), None, "{}", stderr(&output));
    }
}

/// An uninterrupted run.
fn whole_run(recipe: &Path, out: &Path, extra: &[&str]) {
    succeeded(&run(recipe, out, extra));
}

fn clock_seed() -> u64 {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    seed
}

fn assert_same(torn: &Path, whole: &Path, seed: u64) {
    assert_eq!(metrics(torn), metrics(whole), "seed {seed}");
    assert!(result(torn) == result(whole), "weights or moments differ, seed {seed}");
}

/// Compares a run that is killed `kills` times with an uninterrupted one.
fn killed_and_whole(kills: usize, tokens: usize, extra: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let (recipe, tokens) = (recipe(dir.path()), format!("training.tokens={tokens}"));
    let extra = [&["--set", &tokens, "--quiet"][..], extra].concat();
    let (whole, torn) = (dir.path().join("whole"), dir.path().join("torn"));
    whole_run(&recipe, &whole, &extra);
    let seed = clock_seed();
    let killed = torn_run(&recipe, &torn, &extra, kills, &mut SplitMix64::new(seed));
    assert!(killed >= 4, "only {killed} kills before the run was over");
    assert_same(&torn, &whole, seed);
}

#[test]
fn resume_is_bit_exact() {
    killed_and_whole(20, 51200, &[]);
}

#[test]
fn resume_is_bit_exact_with_muon_and_ema() {
    let average = ["--set", "training.ema=0.99", "--set", "evaluation.weights=ema"];
    let extra = [&["--set", "optimizer.name=muon"][..], &average].concat();
    killed_and_whole(10, 25600, &extra);
}

/// Soak test: one run after the other, killed until it finishes, each compared with the uninterrupted one.
/// `FOX_SOAK_KILLS` kills in total (1000), or `FOX_SOAK_MINUTES`.
#[test]
#[ignore = "takes hours"]
fn soak() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let kills = number("FOX_SOAK_KILLS").unwrap_or(1000) as usize;
    let limit = number("FOX_SOAK_MINUTES").map_or(Duration::MAX, |m| Duration::from_secs(60 * m));
    let dir = tempfile::tempdir().unwrap();
    let (recipe, extra) = (recipe(dir.path()), ["--quiet"]);
    let whole = dir.path().join("whole");
    whole_run(&recipe, &whole, &extra);
    let seed = clock_seed();
    let (mut moments, mut killed, mut runs, start) = (SplitMix64::new(seed), 0, 0, Instant::now());
    while killed < kills && start.elapsed() < limit {
        let torn = dir.path().join(format!("torn{runs}"));
        killed += torn_run(&recipe, &torn, &extra, kills - killed, &mut moments);
        assert_same(&torn, &whole, seed);
        std::fs::remove_dir_all(&torn).unwrap();
        runs += 1;
        println!(
            "{killed} kills in {runs} runs, {:.0} s: same bits",
            start.elapsed().as_secs_f64()
        );
    }
}
