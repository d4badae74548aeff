//! The choice of a device, common to the commands that compute.

use anyhow::Result;
use clap::{Args, ValueEnum};
use fox_tensor::Device;

/// Where to compute.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to compute
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    device: DeviceName,
    /// Threads for the CPU; all cores by default
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DeviceName {
    /// All cores, single precision
    Cpu,
    /// The slow oracle in double precision
    Naive,
}

impl DeviceArgs {
    /// Opens the device.
    pub fn open(&self) -> Result<Device> {
        Ok(match self.device {
            DeviceName::Cpu => {
                let options = fox_cpu::Options { threads: self.threads, ..Default::default() };
                fox_cpu::device_with(options)?
            }
            DeviceName::Naive => Device::naive(),
        })
    }
}
