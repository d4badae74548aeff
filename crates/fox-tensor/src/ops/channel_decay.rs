//! Log decays per channel of Kimi Delta Attention.

use crate::cases::{Case, Output};
use crate::check::Operands;
use crate::naive::{Matrix, Naive, log_sigmoid, matrix, real, sigmoid};
use crate::tape::{Tape, Var};
use crate::{Backend, Result, Tensor};

/// Operands of the decay of `H` heads of `C` channels, with `u = z + bias`:
/// `log_decay = -exp(a_log) softplus(u)`, or with a bound `log_decay = bound * sigmoid(exp(a_log) u)`.
#[derive(Clone, Debug)]
pub struct ChannelDecayInputs<'a> {
    /// `[R, H * C]`.
    pub z: &'a Tensor,
    /// `[H * C]`.
    pub bias: &'a Tensor,
    /// `[H]`.
    pub a_log: &'a Tensor,
    /// The strongest log decay of a token, below 0; unbounded when absent.
    pub bound: Option<f32>,
}

/// Log decays per channel on a device.
pub trait ChannelDecayOps {
    /// `log_decay`, `[R, H * C]`.
    fn channel_decay_fwd(&self, inputs: &ChannelDecayInputs<'_>) -> Result<Tensor>;
    /// `(dz[R, H * C], da_log[H])` from the gradient of `log_decay`. The gradient of the bias is the column sums of
    /// `dz`.
    fn channel_decay_bwd(
        &self,
        dlog_decay: &Tensor,
        inputs: &ChannelDecayInputs<'_>,
    ) -> Result<(Tensor, Tensor)>;
}

/// Validates the operands of [`ChannelDecayOps::channel_decay_fwd`].
pub fn check_channel_decay_fwd(
    backend: &dyn Backend,
    inputs: &ChannelDecayInputs<'_>,
) -> Result<()> {
    let operands = Operands::new("channel_decay", backend);
    let (_, width) = operands.matrix("z", inputs.z)?;
    let heads = inputs.a_log.len();
    operands.require(heads > 0 && width > 0 && width.is_multiple_of(heads), || {
        format!("{width} channels are not a multiple of {heads} heads")
    })?;
    operands.real("bias", inputs.bias, &[width])?;
    operands.real("a_log", inputs.a_log, &[heads])?;
    // A positive bound would grow the state; NaN compares as false.
    operands.require(inputs.bound.is_none_or(|bound| bound < 0.0 && bound.is_finite()), || {
        format!("the bound of the log decay is {:?}, but must be finite and below 0", inputs.bound)
    })
}

/// Validates the operands of [`ChannelDecayOps::channel_decay_bwd`].
pub fn check_channel_decay_bwd(
    backend: &dyn Backend,
    dlog_decay: &Tensor,
    inputs: &ChannelDecayInputs<'_>,
) -> Result<()> {
    check_channel_decay_fwd(backend, inputs)?;
    Operands::new("channel_decay_bwd", backend).real("dlog_decay", dlog_decay, inputs.z.dims())
}

impl Tape<'_> {
    /// Log decays `[R, H * C]` of `z: [R, H * C]`, `bias: [H * C]` and `a_log: [H]`; see [`ChannelDecayInputs`].
    pub fn channel_decay(
        &mut self,
        z: &Var,
        bias: &Var,
        a_log: &Var,
        bound: Option<f32>,
    ) -> Result<Var> {
        let inputs =
            ChannelDecayInputs { z: z.value(), bias: bias.value(), a_log: a_log.value(), bound };
        let decay = self.device.backend().channel_decay_fwd(&inputs)?;
        let needs_grad = z.needs_grad() || bias.needs_grad() || a_log.needs_grad();
        let out = self.output(decay, needs_grad);
        let (z_slot, b_slot, a_slot, out_slot) = (z.slot, bias.slot, a_log.slot, out.slot);
        let device = self.device.clone();
        let (z, bias, a_log) = (z.value.clone(), bias.value.clone(), a_log.value.clone());
        self.push(move |flow| {
            let Some(d_out) = flow.take(out_slot) else { return Ok(()) };
            let inputs = ChannelDecayInputs { z: &z, bias: &bias, a_log: &a_log, bound };
            let backend = device.backend();
            let (dz, da_log) = backend.channel_decay_bwd(&d_out, &inputs)?;
            flow.update(b_slot, |acc| backend.linear_bwd_bias(&dz, acc))?;
            flow.add(a_slot, da_log)?;
            flow.add(z_slot, dz)
        });
        Ok(out)
    }
}

impl ChannelDecayOps for Naive {
    fn channel_decay_fwd(&self, inputs: &ChannelDecayInputs<'_>) -> Result<Tensor> {
        check_channel_decay_fwd(self, inputs)?;
        let decay = operands(inputs)?;
        let log = (0..decay.z.data.len()).map(|i| decay.log(i)).collect();
        Ok(self.like(inputs.z, log))
    }

    fn channel_decay_bwd(
        &self,
        dlog_decay: &Tensor,
        inputs: &ChannelDecayInputs<'_>,
    ) -> Result<(Tensor, Tensor)> {
        check_channel_decay_bwd(self, dlog_decay, inputs)?;
        let (decay, d_out) = (operands(inputs)?, matrix(dlog_decay)?);
        let mut da_log = vec![0.0; decay.a_log.len()];
        let grad = |(i, d): (usize, &f64)| {
            let (du, da) = decay.gradients(i, *d);
            da_log[decay.head(i)] += da;
            du
        };
        let dz = d_out.data.iter().enumerate().map(grad).collect();
        Ok((self.like(inputs.z, dz), self.like(inputs.a_log, da_log)))
    }
}

/// Operands of the oracle.
struct ChannelDecay<'a> {
    z: Matrix<'a>,
    bias: &'a [f64],
    a_log: &'a [f64],
    bound: Option<f64>,
}

fn operands<'a>(inputs: &ChannelDecayInputs<'a>) -> Result<ChannelDecay<'a>> {
    Ok(ChannelDecay {
        z: matrix(inputs.z)?,
        bias: real(inputs.bias)?,
        a_log: real(inputs.a_log)?,
        bound: inputs.bound.map(f64::from),
    })
}

impl ChannelDecay<'_> {
    fn head(&self, i: usize) -> usize {
        i % self.z.cols / (self.z.cols / self.a_log.len())
    }

    /// `(exp(a_log), u)` of element `i`.
    fn rate_and_logit(&self, i: usize) -> (f64, f64) {
        (self.a_log[self.head(i)].exp(), self.z.data[i] + self.bias[i % self.z.cols])
    }

    fn log(&self, i: usize) -> f64 {
        let (rate, u) = self.rate_and_logit(i);
        match self.bound {
            None => rate * log_sigmoid(-u),
            Some(bound) => bound * sigmoid(rate * u),
        }
    }

    /// Gradients of `u` and of `a_log` from that of the log decay.
    fn gradients(&self, i: usize, d: f64) -> (f64, f64) {
        let (rate, u) = self.rate_and_logit(i);
        match self.bound {
            None => (-d * rate * sigmoid(u), d * self.log(i)),
            Some(bound) => {
                let slope = d * bound * sigmoid(rate * u) * sigmoid(-rate * u) * rate;
                (slope, slope * u)
            }
        }
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, heads, channels) in [(1, 1, 1), (113, 3, 5), (65, 4, 32)] {
        cases.push(case(rows, heads, channels, None));
        cases.push(case(rows, heads, channels, Some(-5.0)));
    }
    cases
}

fn case(rows: usize, heads: usize, channels: usize, bound: Option<f32>) -> Case {
    let name = format!("channel_decay/{bound:?}/{rows}x{heads}x{channels}");
    let case = Case::new(name, move |tape, args| {
        let (z, bias, a_log) = (args.var("z")?, args.var("bias")?, args.var("a_log")?);
        let decay = tape.channel_decay(z, bias, a_log, bound)?;
        Ok(vec![Output::Var("log_decay", decay)])
    });
    let width = heads * channels;
    case.normal("z", &[rows, width]).normal("bias", &[width]).normal("a_log", &[heads])
}
