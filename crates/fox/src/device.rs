//! The choice of a device, common to the commands that compute.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use fox_tensor::Device;

/// Where to compute.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceName::Auto)]
    device: DeviceName,
    /// Threads for the CPU; all cores by default
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceName {
    /// The fastest that this build and machine have
    Auto,
    /// All cores, single precision
    Cpu,
    /// NVIDIA GPU
    Cuda,
    /// The slow oracle in double precision
    Naive,
}

impl DeviceArgs {
    /// Opens the device.
    pub fn open(&self) -> Result<Device> {
        Ok(match self.device {
            DeviceName::Auto | DeviceName::Cpu => {
                let options = fox_cpu::Options { threads: self.threads, ..Default::default() };
                fox_cpu::device_with(options)?
            }
            DeviceName::Cuda => {
                bail!("this build has no CUDA backend yet; use --device cpu or leave it out")
            }
            DeviceName::Naive => Device::naive(),
        })
    }
}
