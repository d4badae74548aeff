//! A real training process is killed at random moments, many times; what comes out is what an undisturbed
//! run gives, bit for bit. `FOX_LONG_TESTS=1` makes it ten times as long.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod train_common;

use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use train_common::{checkpoints, command, metrics, recipe, result, run, stderr};

/// SplitMix64, seeded by the clock: the moments should differ from run to run.
struct Moments(u64);

impl Moments {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }
}

/// Waits until the process has written a checkpoint of its own, has ended, or a second has passed.
fn wait_for_progress(child: &mut Child, out: &std::path::Path, before: usize) {
    let newest = || checkpoints(out).pop().map_or(0, |p| step_of(&p));
    let start = Instant::now();
    while newest() <= before
        && child.try_wait().unwrap().is_none()
        && start.elapsed() < Duration::from_secs(5)
    {
        sleep(Duration::from_millis(2));
    }
}

fn step_of(path: &std::path::Path) -> usize {
    let name = path.file_name().unwrap().to_str().unwrap();
    name.strip_prefix("step-").unwrap().parse().unwrap()
}

#[test]
fn a_killed_run_comes_to_the_same_bits() {
    let long = std::env::var_os("FOX_LONG_TESTS").is_some_and(|v| v != "0");
    let (kills, tokens) =
        if long { (200, "training.tokens=512000") } else { (20, "training.tokens=51200") };
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let extra = ["--set", tokens, "--quiet"];

    let whole = dir.path().join("whole");
    let output = run(&recipe, &whole, &extra);
    assert!(output.status.success(), "{}", stderr(&output));

    let torn = dir.path().join("torn");
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let (mut moments, mut killed, mut starts) = (Moments(seed), 0, 0);
    println!("seed {seed}");
    let finished = loop {
        starts += 1;
        let before = checkpoints(&torn).pop().map_or(0, |p| step_of(&p));
        let mut child = command(&recipe, &torn, &extra)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        if killed < kills {
            // Every third is killed while it starts; the others once they go on.
            if moments.next(3) > 0 {
                wait_for_progress(&mut child, &torn, before);
            }
            sleep(Duration::from_millis(moments.next(120)));
            if child.try_wait().unwrap().is_none() {
                child.kill().unwrap();
                killed += 1;
            }
        }
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            break output;
        }
        // Only a kill may end it: a complaint of the program itself is a failure.
        assert_eq!(output.status.code(), None, "{}", stderr(&output));
    };
    println!("{killed} kills in {starts} starts");
    assert!(killed >= 5, "only {killed} kills before the run was over");
    assert!(finished.status.success());
    assert_eq!(metrics(&torn), metrics(&whole), "seed {seed}");
    assert!(result(&torn) == result(&whole), "weights or moments differ, seed {seed}");
}
