//! `fox launch`: several processes of one command on this machine.

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fox_dist::Secret;

use crate::{output, signals};

/// The others end by themselves when one is lost; those that do not within this time are killed.
const GRACE: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A process that ends by itself within this time reports an error of the command, which a restart would repeat.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Start the processes of a distributed run on this machine
///
/// Each process computes the gradient of its rows of every batch and updates the parameters it owns. On GPUs, process N
/// takes GPU N; on the CPU the cores are divided. With parallel.context=2 in the recipe, every two processes share
/// their sequences instead of the batch. Processes of `eval loss` share the documents. Over several machines, start `fox
/// train` under torchrun, mpirun or srun instead of `fox launch`.
///
/// When a process is lost, all end; with --restarts they start again and the run resumes at its newest checkpoint, to
/// the bits of an undisturbed run. A command that fails within its first ten seconds is not repeated.
#[derive(clap::Args)]
pub struct Args {
    /// Number of processes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024),
          required_unless_present = "gpus", conflicts_with = "gpus")]
    ranks: Option<u16>,
    /// Number of processes, each with one GPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus: Option<u16>,
    /// Start all processes again when one is lost, at most N times
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,
    /// Halve the number of processes at every restart, down to N; the same bits need training.reduction=tree
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    min_ranks: Option<u16>,
    /// The command, after `--`: train RECIPE ... or eval loss MODEL ...
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let mut words = args.command.iter().map(String::as_str);
    if !matches!((words.next(), words.next()), (Some("train"), _) | (Some("eval"), Some("loss"))) {
        bail!(
            "fox launch starts `train` and `eval loss`, e.g. fox launch --ranks 2 -- train tiny-fox-pro"
        );
    }
    let names_device = |word: &String| word == "--device" || word.starts_with("--device=");
    if args.gpus.is_some() && args.command.iter().any(names_device) {
        bail!("--gpus gives each process a GPU; leave --device out, or use --ranks");
    }
    let stop = signals::on_stop(|| {
        output::note("\nwaiting until all processes have stopped; once more to stop at once");
    })?;
    let secret = match Secret::from_env()? {
        given if given.is_set() => given,
        _ => Secret::random()?,
    };
    let mut count = args.gpus.or(args.ranks).unwrap_or(1);
    if args.min_ranks.is_some() && args.restarts == 0 {
        bail!("--min-ranks needs --restarts N, the number of restarts");
    }
    if args.min_ranks.is_some_and(|least| least > count) {
        bail!("--min-ranks is larger than the number of processes, {count}");
    }
    for restart in 1.. {
        let began = Instant::now();
        let mut ranks = start(args, count, &secret)?;
        let Some((rank, status)) = ranks.wait(&stop)? else { return Ok(ExitCode::SUCCESS) };
        if status.code() == Some(130) {
            return Ok(ExitCode::from(130));
        }
        let repeats = status.code().is_some() && began.elapsed() < AT_ONCE;
        if restart > args.restarts || repeats || stop.load(Ordering::Relaxed) {
            bail!("rank {rank} ended first, with {status}");
        }
        count = args.min_ranks.map_or(count, |least| (count / 2).max(least));
        output::note(&format!(
            "rank {rank} ended first, with {status}; restart {restart} of {} with {count} processes",
            args.restarts
        ));
    }
    unreachable!("the loop ends when no restart is left")
}

/// The processes; they do not outlive this one.
struct Ranks(Vec<Child>);

impl Ranks {
    /// Waits until all have ended: the first that failed, if any.
    fn wait(&mut self, stop: &AtomicBool) -> Result<Option<(usize, ExitStatus)>> {
        let mut first: Option<(usize, ExitStatus, Instant)> = None;
        loop {
            let (mut running, mut failed) = (0, Vec::new());
            for (rank, child) in self.0.iter_mut().enumerate() {
                match child.try_wait().context("cannot wait for a process")? {
                    None => running += 1,
                    Some(status) if !status.success() => failed.push((rank, status)),
                    Some(_) => {}
                }
            }
            if first.is_none() {
                // A process that was killed explains why the others ended by themselves.
                let killed = failed.iter().find(|(_, status)| status.code().is_none());
                first =
                    killed.or(failed.first()).map(|&(rank, status)| (rank, status, Instant::now()));
            }
            if running == 0 {
                return Ok(first.map(|(rank, status, _)| (rank, status)));
            }
            if first.is_some_and(|(_, _, when)| when.elapsed() > GRACE) {
                self.kill();
            }
            if stop.load(Ordering::Relaxed) && first.is_none() {
                self.stop();
            }
            sleep(LOOK_EVERY);
        }
    }

    fn kill(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
        }
    }

    /// Asks all to stop with a checkpoint: they do when their standard input ends.
    fn stop(&mut self) {
        for child in &mut self.0 {
            drop(child.stdin.take());
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start(args: &Args, count: u16, secret: &Secret) -> Result<Ranks> {
    let port = fox_dist::free_port().context("cannot find a free port")?;
    let mut ranks = Ranks(Vec::new());
    // Without it a machine that lacks a GPU or a driver would compute on its CPU.
    let device: &[&str] = if args.gpus.is_some() { &["--device", "cuda"] } else { &[] };
    let shares_gpu = args.command.iter().any(|word| word == "--gpu" || word.starts_with("--gpu="));
    for rank in 0..count {
        let mut command = signals::child_process()?;
        command
            .args(&args.command)
            .args(device)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", count.to_string())
            .env("LOCAL_WORLD_SIZE", count.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("FOX_PORT", port.to_string())
            .env(Secret::VARIABLE, secret.text());
        if shares_gpu {
            // NCCL connects ranks on one GPU only if they seem to be on different machines, by sockets.
            let host = format!("fox-rank-{rank}");
            let settings = [
                ("NCCL_HOSTID", host.as_str()),
                ("NCCL_SOCKET_IFNAME", "lo"),
                // One socket carries little more than 1 GB/s.
                ("NCCL_SOCKET_NTHREADS", "4"),
                ("NCCL_NSOCKS_PERTHREAD", "2"),
                // Of a chunk, every 64 KiB may take another socket: the default of 128 KiB uses two of the eight.
                // NCCL admits an eighth of its buffer of 4 MiB.
                ("NCCL_P2P_NET_CHUNKSIZE", "524288"),
            ];
            let unset = settings.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
            command.envs(unset);
        }
        if rank > 0 {
            command.stdout(Stdio::null()).stderr(Stdio::piped());
        }
        let mut child = command.spawn().context("cannot start a process")?;
        if let Some(errors) = child.stderr.take() {
            thread::spawn(move || {
                for line in BufReader::new(errors).lines().map_while(|line| line.ok()) {
                    output::note(&format!("rank {rank}: {line}"));
                }
            });
        }
        ranks.0.push(child);
    }
    Ok(ranks)
}
