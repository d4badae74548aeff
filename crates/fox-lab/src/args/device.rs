//! Device arguments of all commands that compute.

use std::thread;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fox_cpu::Level;
use fox_cuda::{Cuda, Gpu, Precision};
use fox_dist::Placement;
use fox_tensor::{Device, DeviceKind};

use crate::{Scheduler, output, signals};

/// Where to compute.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to compute
    #[arg(long, help_heading = "Device", value_enum, default_value_t = DeviceName::Auto)]
    device: DeviceName,
    /// Number of the GPU; 0 by default, and one for each process of `fox launch`
    #[arg(long, help_heading = "Device", value_name = "N")]
    gpu: Option<usize>,
    /// Precision of a GPU: bf16 activations and products, or f32 throughout; bf16 by default, f32 where results are
    /// compared with a reference
    #[arg(long, help_heading = "Device", value_enum)]
    precision: Option<PrecisionName>,
    /// Threads for the CPU; all cores by default
    #[arg(long, help_heading = "Device", value_name = "N", value_parser = parse_threads)]
    threads: Option<usize>,
    /// Instruction set for the CPU: avx512, avx2, neon or portable; the best it has by default
    #[arg(long, help_heading = "Device", value_name = "NAME")]
    simd: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum DeviceName {
    /// A GPU if there is one, else the CPU
    Auto,
    /// All cores, single precision
    Cpu,
    /// NVIDIA GPU
    #[value(alias = "gpu")]
    Cuda,
    /// The slow oracle in double precision
    Naive,
}

#[derive(Clone, Copy, ValueEnum)]
enum PrecisionName {
    F32,
    Bf16,
}

/// Parses a number of threads.
pub fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=4096) => Ok(threads),
        _ => Err("a number from 1 to 4096; all cores without the flag".into()),
    }
}

/// Device options that a command sets, not its user.
#[derive(Clone, Copy, Default)]
struct Options {
    /// Fill fresh memory with NaN.
    poison: bool,
    /// Local rank and number of local processes.
    place: Option<(usize, usize)>,
}

impl DeviceArgs {
    /// The same choice as arguments for one of `jobs` processes, which divide the CPU's threads.
    pub fn arguments(&self, jobs: usize) -> Vec<String> {
        let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map(|value| value.get_name().to_string()).unwrap_or_default()
        };
        let mut arguments = vec!["--device".into(), name(&|| self.device.to_possible_value())];
        let gpu = self.gpu.map(|gpu| ["--gpu".into(), gpu.to_string()]);
        arguments.extend(gpu.into_iter().flatten());
        if let Some(precision) = self.precision {
            arguments.extend(["--precision".into(), name(&|| precision.to_possible_value())]);
        }
        if let Some(simd) = &self.simd {
            arguments.extend(["--simd".into(), simd.clone()]);
        }
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or_else(cores) / jobs.max(1);
        arguments.extend(["--threads".into(), threads.max(1).to_string()]);
        arguments
    }

    /// A scheduler of `jobs` child processes on this device, which the first signal stops.
    pub fn scheduler(&self, jobs: usize, quiet: bool) -> Result<Scheduler> {
        let stop = signals::on_stop(|| {
            output::note("\nstopping all runs with a checkpoint; repeat to exit immediately");
        })?;
        Ok(Scheduler { jobs, device: self.arguments(jobs), quiet, stop })
    }

    /// Opens the device; a GPU computes in bf16 by default.
    pub fn open(&self) -> Result<Device> {
        self.open_in(Precision::Bf16, Options::default())
    }

    /// The same for one of several processes, each with a separate GPU or an equal number of cores.
    pub fn open_at(&self, placement: Option<&Placement>) -> Result<Device> {
        let place = placement.map(|place| (place.local_rank, place.local_size));
        self.open_in(Precision::Bf16, Options { place, ..Options::default() })
    }

    /// Opens the device to compare its results with a reference: f32 by default.
    pub fn open_exact(&self) -> Result<Device> {
        self.open_in(Precision::F32, Options::default())
    }

    /// Opens the device in every supported precision, with fresh memory filled with NaN, for self-tests.
    pub fn open_poisoned(&self) -> Result<Vec<Device>> {
        let options = Options { poison: true, ..Options::default() };
        let first = self.open_in(Precision::F32, options)?;
        if self.precision.is_some() || first.backend().kind() != DeviceKind::Cuda {
            return Ok(vec![first]);
        }
        Ok(vec![first, self.open_in(Precision::Bf16, options)?])
    }

    /// Opens devices for as many jobs as can run at a time: one GPU, or an equal number of cores each.
    pub fn open_shared(&self, jobs: usize) -> Result<Vec<Device>> {
        let first = self.open()?;
        if first.backend().kind() != DeviceKind::Cpu {
            return Ok(vec![first]);
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or(cores).max(1);
        let count = jobs.clamp(1, threads);
        let level = self.simd_level()?;
        (0..count)
            .map(|i| {
                // The first devices get the remainder.
                let threads = threads / count + usize::from(i < threads % count);
                let options =
                    fox_cpu::Options { threads: Some(threads), level, ..Default::default() };
                Ok(fox_cpu::device_with(options)?)
            })
            .collect()
    }

    /// The requested instruction set.
    fn simd_level(&self) -> Result<Option<Level>> {
        let Some(wanted) = &self.simd else { return Ok(None) };
        let levels = Level::available();
        let short = |level: &Level| level.name().split('+').next() == Some(wanted);
        match levels.iter().find(|level| level.name() == wanted || short(level)) {
            Some(level) => Ok(Some(*level)),
            None => {
                let names: Vec<&str> = levels.iter().map(|level| level.name()).collect();
                bail!("--simd {wanted}: this CPU has {}; name one of them", names.join(", "))
            }
        }
    }

    fn open_in(&self, default: Precision, options: Options) -> Result<Device> {
        let Options { poison, place } = options;
        let precision = self.precision.map_or(default, Precision::from);
        let open_gpu = || -> fox_cuda::Result<Device> {
            let gpu = Gpu::new(self.gpu.or(place.map(|(rank, _)| rank)).unwrap_or(0))?;
            gpu.poison(poison);
            Ok(Device::new(Cuda::new(gpu, precision)?))
        };
        match self.device {
            DeviceName::Cuda => return Ok(open_gpu()?),
            // With a driver but without the other libraries: report what is missing and use the CPU.
            DeviceName::Auto if Gpu::driver_is_present() => match open_gpu() {
                Ok(device) => return Ok(device),
                Err(error) => output::note(&format!("note: {error}; computing on the CPU")),
            },
            _ => {}
        }
        if let Some(PrecisionName::Bf16) = self.precision {
            bail!("--precision bf16 needs a GPU; the CPU computes in f32");
        }
        if self.device == DeviceName::Naive {
            return Ok(Device::naive());
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let per_process = place.map(|(_, size)| (cores / size).max(1));
        let (threads, level) = (self.threads.or(per_process), self.simd_level()?);
        let options = fox_cpu::Options { threads, level, poison };
        Ok(fox_cpu::device_with(options)?)
    }
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Self {
        match name {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Bf16 => Precision::Bf16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_is_another_name_of_cuda() {
        assert_eq!(DeviceName::from_str("gpu", false), Ok(DeviceName::Cuda));
        assert!(DeviceName::from_str("tpu", false).is_err());
    }
}
