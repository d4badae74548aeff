//! Transfers of tensors between the ranks of a context: from device to device where the group has connected these, and
//! through the host otherwise, in f32.

use fox_tensor::{DType, Device, Result, Shape, Tensor};

use super::SequenceShard;
use crate::reduce::values;

/// Tensors and the index of the rank that they go to.
pub(super) type Parcel = (usize, Vec<Tensor>);
/// Shapes and types of tensors, and the index of the rank that sends them.
pub(super) type Expected = (usize, Vec<(Shape, DType)>);

/// The number of a transfer, by which all ranks know its messages; `None` between connected devices, which need none.
#[derive(Clone, Copy)]
pub(super) struct TransferNumber(Option<u32>);

/// Tensors in flight.
pub(super) enum Transfer {
    /// Between devices, which use the memory of both until the transfer has finished.
    Device { sent: Vec<Parcel>, received: Vec<Vec<Tensor>> },
    /// Through the host.
    Host { number: u32, device: Device, expected: Vec<Expected> },
}

impl SequenceShard {
    /// Numbers a transfer. All ranks do it at the same point of their work, whatever they send and receive.
    pub(super) fn number_transfer(&self) -> Result<TransferNumber> {
        if self.0.context.on_devices() {
            return Ok(TransferNumber(None));
        }
        let group = &self.0.context.group;
        let number = self.record_failure(group.collective(|links| Ok(links.begin())))?;
        Ok(TransferNumber(Some(number)))
    }

    /// Starts to send and to receive tensors of a device, beside the work that it does until [`SequenceShard::finish`].
    pub(super) fn begin(
        &self,
        device: &Device,
        sent: Vec<Parcel>,
        expected: Vec<Expected>,
    ) -> Result<Transfer> {
        self.begin_numbered(self.number_transfer()?, device, sent, expected)
    }

    /// The same for a rank that sends and receives at different times.
    pub(super) fn begin_numbered(
        &self,
        TransferNumber(number): TransferNumber,
        device: &Device,
        sent: Vec<Parcel>,
        expected: Vec<Expected>,
    ) -> Result<Transfer> {
        let (group, first) = (&self.0.context.group, self.0.context.first);
        let Some(number) = number else {
            let memory = |(_, layout): &Expected| -> Result<Vec<Tensor>> {
                layout.iter().map(|&(shape, dtype)| device.uninit(shape, dtype)).collect()
            };
            let mut received = expected.iter().map(memory).collect::<Result<Vec<_>>>()?;
            let to = sent.iter().flat_map(|(to, x)| x.iter().map(move |x| (first + to, x)));
            let from = expected.iter().zip(&mut received);
            let from = from.flat_map(|((from, _), x)| x.iter_mut().map(move |x| (first + from, x)));
            let (to, mut from): (Vec<_>, Vec<_>) = (to.collect(), from.collect());
            self.record_failure(group.on_peers(device, |p| p.begin_exchange(&to, &mut from)))?;
            return Ok(Transfer::Device { sent, received });
        };
        let mut messages = Vec::with_capacity(sent.len());
        for (to, tensors) in sent {
            let mut message = Vec::new();
            for tensor in tensors {
                message.extend(tensor.to_f32()?);
            }
            messages.push((first + to, message));
        }
        self.record_failure(group.resume_collective(|links| {
            for (to, message) in &messages {
                links.send_numbered(*to, number, bytemuck::cast_slice(message));
            }
            Ok(())
        }))?;
        Ok(Transfer::Host { number, device: device.clone(), expected })
    }

    /// The tensors of a transfer, in the order in which they were expected.
    pub(super) fn finish(&self, transfer: Transfer) -> Result<Vec<Vec<Tensor>>> {
        let (group, first) = (&self.0.context.group, self.0.context.first);
        match transfer {
            Transfer::Device { sent, received } => {
                self.record_failure(group.finish_reduce())?;
                drop(sent);
                Ok(received)
            }
            Transfer::Host { number, device, expected } => {
                let from = expected.iter().map(|(from, _)| first + from);
                let found = group.resume_collective(|links| links.finish(from, number));
                let found = self.record_failure(found)?;
                let tensors = |((from, layout), bytes): (Expected, Vec<u8>)| {
                    let len = layout.iter().map(|(shape, _)| shape.len()).sum();
                    let message = values(group.rank(), first + from, &bytes, len);
                    unpack(&device, &layout, &self.record_failure(message)?)
                };
                expected.into_iter().zip(found).map(tensors).collect()
            }
        }
    }
}

/// The tensors of a message, which has the length of all.
fn unpack(device: &Device, layout: &[(Shape, DType)], mut message: &[f32]) -> Result<Vec<Tensor>> {
    let mut next = |&(shape, dtype): &(Shape, DType)| {
        let (own, rest) = message.split_at(shape.len());
        message = rest;
        let tensor = device.from_f32(own, shape)?;
        if dtype == DType::F32 {
            return Ok(tensor);
        }
        let mut narrow = device.uninit(shape, dtype)?;
        device.backend().copy_rows(&tensor, 0, &mut narrow, 0, tensor.rows())?;
        Ok(narrow)
    };
    layout.iter().map(&mut next).collect()
}

/// A matrix of this shape and type: rows of `x`, given as row there, row here and number of rows, and zeros elsewhere.
pub(super) fn arranged(
    x: &Tensor,
    rows: usize,
    dtype: DType,
    copies: impl IntoIterator<Item = [usize; 3]>,
) -> Result<Tensor> {
    let mut matrix = x.device().zeros([rows, x.cols()], dtype)?;
    for [there, here, count] in copies {
        x.device().backend().copy_rows(x, there, &mut matrix, here, count)?;
    }
    Ok(matrix)
}
