//! Wrong operands for every method of every op trait: each call must give an error, never undefined behaviour.
//!
//! Backends are public, so every method is called directly, not through the tape. A call starts from operands that are
//! accepted; then one operand at a time gets another extent, rank, element type, device or storage format.

mod decoding;
mod dense;
mod memory;
mod sequence;

use crate::{Backend, Device, Error, Result, Tensor, WeightFormat};

/// The outcome of [`refuse_wrong_operands`].
#[derive(Debug, Default)]
pub struct WrongOperands {
    /// Number of wrong calls.
    pub calls: usize,
    /// Those that did not give an error.
    pub accepted: Vec<String>,
}

/// Calls every op of `device` with wrong operands. Operands on another device come from each of `others`.
///
/// # Errors
/// A call with valid operands failed.
pub fn refuse_wrong_operands(device: &Device, others: &[Device]) -> Result<WrongOperands> {
    let mut calls = Calls { device, others, outcome: WrongOperands::default() };
    memory::calls(&mut calls)?;
    dense::calls(&mut calls)?;
    sequence::calls(&mut calls)?;
    decoding::calls(&mut calls)?;
    Ok(calls.outcome)
}

/// Contents of an operand.
#[derive(Clone, Copy, PartialEq)]
enum Content {
    Real,
    /// A weight that may be packed.
    Packable,
    /// Integers below this bound.
    Ids(usize),
}

/// An operand of a valid call.
#[derive(Clone, Copy)]
struct Operand {
    name: &'static str,
    dims: &'static [usize],
    /// Axes whose extent is given by another operand.
    fixed: &'static [usize],
    /// Whether another number of dimensions is an error.
    fixed_rank: bool,
    content: Content,
}

const fn real(name: &'static str, dims: &'static [usize], fixed: &'static [usize]) -> Operand {
    Operand { name, dims, fixed, fixed_rank: true, content: Content::Real }
}

/// The calls so far.
struct Calls<'a> {
    device: &'a Device,
    others: &'a [Device],
    outcome: WrongOperands,
}

impl<'a> Calls<'a> {
    /// Calls an op with valid operands, then with every wrong one. A device that does not support it is skipped.
    fn op<R>(
        &mut self,
        op: &str,
        operands: &[Operand],
        run: impl Fn(&'a dyn Backend, &[Tensor]) -> Result<R>,
    ) -> Result<()> {
        let make = |operand: &Operand| operand.on(self.device, operand.dims);
        let mut tensors: Vec<Tensor> = operands.iter().map(make).collect::<Result<_>>()?;
        match run(self.device.backend(), &tensors) {
            Err(Error::Unsupported { .. }) => return Ok(()),
            result => drop(result?),
        }
        for (i, operand) in operands.iter().enumerate() {
            for (what, wrong) in operand.wrong(self.device, self.others)? {
                let valid = std::mem::replace(&mut tensors[i], wrong);
                let result = run(self.device.backend(), &tensors);
                self.must_fail(|| format!("{op}: {} {what}", operand.name), result);
                tensors[i] = valid;
            }
        }
        Ok(())
    }

    /// Notes a call that must have failed.
    fn must_fail<T>(&mut self, name: impl FnOnce() -> String, result: Result<T>) {
        self.outcome.calls += 1;
        if result.is_ok() {
            self.outcome.accepted.push(name());
        }
    }

    /// A matrix or vector of the device.
    fn tensor(&self, dims: &'static [usize]) -> Result<Tensor> {
        real("", dims, &[]).on(self.device, dims)
    }
}

impl Operand {
    fn on(&self, device: &Device, dims: &[usize]) -> Result<Tensor> {
        let len = dims.iter().product();
        match self.content {
            Content::Ids(bound) => {
                let ids: Vec<i32> = (0..len).map(|i| (i % bound) as i32).collect();
                device.from_i32(&ids, dims)
            }
            // Log gates and log decays must not be positive.
            Content::Real | Content::Packable => device.from_f32(&vec![-0.25; len], dims),
        }
    }

    /// Tensors that must not take the place of this operand.
    fn wrong(&self, device: &Device, others: &[Device]) -> Result<Vec<(String, Tensor)>> {
        let mut wrong = Vec::new();
        for &axis in self.fixed {
            for extent in [self.dims[axis] + 1, self.dims[axis] - 1, 0] {
                let mut dims = self.dims.to_vec();
                dims[axis] = extent;
                wrong.push((format!("of shape {dims:?}"), self.on(device, &dims)?));
            }
        }
        let tensor = self.on(device, self.dims)?;
        if self.fixed_rank {
            let flat = tensor.len();
            for dims in [[&[1], self.dims].concat(), [self.dims, &[1]].concat(), vec![flat]] {
                if dims != self.dims {
                    wrong.push((format!("of shape {dims:?}"), tensor.reshape(&dims[..])?));
                }
            }
        }
        wrong.push(match self.content {
            Content::Ids(_) => ("of reals".into(), device.full(self.dims, 0.0)?),
            _ => ("of integers".into(), device.zeros(self.dims, crate::DType::I32)?),
        });
        for other in others {
            wrong.push((format!("on another device ({other})"), self.on(other, self.dims)?));
        }
        if self.content == Content::Real && self.dims.len() == 2 {
            for format in [WeightFormat::Bf16, WeightFormat::Int8] {
                match tensor.packed(format) {
                    Ok(packed) if packed.is_packed() => {
                        wrong.push(("in packed storage".into(), packed))
                    }
                    _ => {}
                }
            }
        }
        if let Content::Ids(bound) = self.content {
            for id in [bound as i32, -1, i32::MIN, i32::MAX] {
                let mut ids = vec![0; tensor.len()];
                ids[tensor.len() - 1] = id;
                wrong.push((format!("with id {id}"), device.from_i32(&ids, self.dims)?));
            }
        }
        Ok(wrong)
    }
}
