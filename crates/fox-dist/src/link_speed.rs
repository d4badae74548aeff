//! Measured bandwidth between ranks.

use std::time::Instant;

use fox_tensor::{Device, Tensor};

use crate::{Group, Owned, Result};

/// Values of each tensor that is exchanged: 4 MiB.
const VALUES: usize = 1 << 20;

/// How often they are exchanged.
const ROUNDS: usize = 4;

impl Group {
    /// Bytes per second that each rank sends while all do what a training step does: tensors go to their owners, are
    /// added and come back. `None` without other ranks. All ranks get the figure of the slowest.
    pub fn link_speed(&self, device: &Device) -> Result<Option<f64>> {
        if self.size() == 1 {
            return Ok(None);
        }
        let ones = |_| device.full([VALUES], 1.0);
        let mut tensors: Vec<Tensor> =
            (0..self.size()).map(ones).collect::<fox_tensor::Result<_>>()?;
        let mut seconds = f64::INFINITY;
        // The best of several: the first opens the connections' windows and takes memory from the system, and others
        // may use the machine.
        for _ in 0..ROUNDS {
            self.barrier()?;
            let start = Instant::now();
            self.reduce_to_owners(&mut owned(&mut tensors))?;
            self.share(&mut owned(&mut tensors))?;
            device.backend().synchronize()?;
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        let slowest = self.all_numbers(&[seconds])?.into_iter().fold(0.0, f64::max);
        let bytes = 2 * (self.size() - 1) * VALUES * size_of::<f32>();
        Ok(Some(bytes as f64 / slowest.max(1e-9)))
    }
}

/// Each rank owns one.
fn owned(tensors: &mut [Tensor]) -> Vec<Owned<'_>> {
    tensors.iter_mut().enumerate().map(|(owner, tensor)| Owned { owner, tensor }).collect()
}
