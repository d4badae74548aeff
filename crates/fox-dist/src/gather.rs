//! Gathers: broadcasts of single tensors from the ranks that own them, while the devices do other work.

use fox_tensor::{Device, Shape, Tensor};

use crate::reduce::values;
use crate::{Group, Result};

/// A tensor in flight from the rank that owns it, see [`Group::begin_gather`].
#[derive(Debug)]
pub struct Gather(State);

#[derive(Debug)]
enum State {
    /// Owned by this rank, or received by the device.
    Here(Tensor),
    /// A message of the collective with this number.
    ByHost { owner: usize, number: u32, shape: Shape, device: Device },
}

impl Group {
    /// Whether devices exchange tensors without the host.
    pub fn is_connected(&self) -> bool {
        self.connected().is_some()
    }

    /// Begins to send each tensor from its owner to all other ranks, with their numbers. The tensors of other ranks are
    /// memory that devices receive into, in the packing of the owner; without connected devices they are
    /// [absent](Tensor::absent). All ranks finish every gather, in the same order.
    pub fn begin_gather(&self, mut tensors: Vec<(usize, Tensor)>) -> Result<Vec<Gather>> {
        if let Some(device) = self.connected().filter(|_| !tensors.is_empty()) {
            let mut pairs: Vec<_> =
                tensors.iter_mut().map(|(owner, tensor)| (*owner, tensor)).collect();
            self.on_peers(device, |peers| peers.begin_broadcast(&mut pairs))?;
            return Ok(tensors.into_iter().map(|(_, t)| Gather(State::Here(t))).collect());
        }
        let begin = |(owner, tensor): (usize, Tensor)| {
            self.collective(|links| {
                if owner != self.rank() {
                    let (shape, device) = (tensor.shape(), tensor.device().clone());
                    let number = links.begin();
                    return Ok(Gather(State::ByHost { owner, number, shape, device }));
                }
                let values = tensor.to_f32()?;
                for other in links.others() {
                    links.send(other, bytemuck::cast_slice(&values));
                }
                Ok(Gather(State::Here(tensor)))
            })
        };
        tensors.into_iter().map(begin).collect()
    }

    /// Lets all later work of a connected device wait for the gathers that were begun.
    pub fn wait_for_gathers(&self) -> Result<()> {
        self.finish_reduce()
    }

    /// The tensor of a gather, after [`Group::wait_for_gathers`]. Over the host it is not packed.
    pub fn finish_gather(&self, gather: Gather) -> Result<Tensor> {
        match gather.0 {
            State::Here(tensor) => Ok(tensor),
            State::ByHost { owner, number, shape, device } => {
                let mut found = self.resume_collective(|links| links.finish([owner], number))?;
                let bytes = found.pop().unwrap_or_default();
                let values = values(self.rank(), owner, &bytes, shape.len())?;
                Ok(device.from_f32(&values, shape)?)
            }
        }
    }
}
