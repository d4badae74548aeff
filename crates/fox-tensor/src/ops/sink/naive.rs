//! Attention sinks.

use crate::naive::{Naive, real};
use crate::{Result, SinkOps, Tensor};

impl SinkOps for Naive {
    fn sink_fwd(&self, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<(Tensor, Tensor)> {
        let (mut new_o, mut new_lse) = (real(o)?.to_vec(), real(lse)?.to_vec());
        let (sinks, d) = (real(sinks)?, o.cols() / sinks.len());
        for (i, (o, lse)) in new_o.chunks_mut(d).zip(&mut new_lse).enumerate() {
            let sink = sinks[i % sinks.len()];
            if *lse == f64::NEG_INFINITY {
                continue;
            }
            let share = 1.0 / (1.0 + (sink - *lse).exp());
            o.iter_mut().for_each(|x| *x *= share);
            *lse = lse.max(sink) + (-(*lse - sink).abs()).exp().ln_1p();
        }
        Ok((self.like(o, new_o), self.like(lse, new_lse)))
    }

    fn sink_bwd(&self, d_out: &Tensor, o: &Tensor, lse: &Tensor, sinks: &Tensor) -> Result<Tensor> {
        let (b, d) = (real(sinks)?, o.cols() / sinks.len());
        let mut d_sinks = vec![0.0; b.len()];
        let rows = real(o)?.chunks(d).zip(real(d_out)?.chunks(d)).zip(real(lse)?);
        for (i, ((o, d_out), lse)) in rows.enumerate() {
            let (h, product) = (i % b.len(), o.iter().zip(d_out).map(|(o, g)| o * g).sum::<f64>());
            if *lse > f64::NEG_INFINITY {
                d_sinks[h] -= (b[h] - lse).exp() * product;
            }
        }
        Ok(self.like(sinks, d_sinks))
    }
}
