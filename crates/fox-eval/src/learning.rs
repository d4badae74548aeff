//! Learning curves: training loss over tokens.

use fox_plot::{LineChart, learning_range};

/// The learning curve of a run: tokens seen, and the loss of a batch in nats per token.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Learning {
    /// Name of the model.
    pub model: String,
    /// `(tokens, loss)`, in order.
    pub losses: Vec<(f64, f64)>,
}

impl Learning {
    /// About 200 points, each averaged with its neighbours.
    pub fn smoothed(&self) -> Vec<(f64, f64)> {
        let block = self.losses.len().div_ceil(200).max(1);
        let mean = |block: &[(f64, f64)]| {
            let n = block.len() as f64;
            (block.iter().map(|p| p.0).sum::<f64>() / n, block.iter().map(|p| p.1).sum::<f64>() / n)
        };
        let averaged: Vec<(f64, f64)> = self.losses.chunks(block).map(mean).collect();
        let reach = averaged.len() / 40;
        (0..averaged.len())
            .map(|i| {
                let (first, last) = (i.saturating_sub(reach), (i + reach).min(averaged.len() - 1));
                (averaged[i].0, mean(&averaged[first..=last]).1)
            })
            .collect()
    }
}

/// A chart of several smoothed curves.
pub fn learning_chart(runs: &[Learning]) -> LineChart {
    let mut chart = LineChart::new("Learning curves", "tokens seen", "loss, nats");
    let curves: Vec<Vec<(f64, f64)>> = runs.iter().map(Learning::smoothed).collect();
    chart.y_range = learning_range(curves.iter().map(Vec::as_slice));
    for (run, curve) in runs.iter().zip(curves) {
        chart.add_line(&run.model, curve);
    }
    chart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smooths_curves_and_ignores_first_steps_in_range() {
        let mut losses: Vec<(f64, f64)> = (0..1000).map(|i| (f64::from(i), 2.0)).collect();
        losses[0].1 = 1000.0;
        // One of 200 points, which its five neighbours on either side share.
        losses[900..905].iter_mut().for_each(|loss| loss.1 = 13.0);
        let run = Learning { model: "m".into(), losses };
        let smooth = run.smoothed();
        assert_eq!(smooth.len(), 200);
        assert_eq!(smooth[100], (502.0, 2.0));
        for (i, want) in [(174, 2.0), (175, 3.0), (180, 3.0), (185, 3.0), (186, 2.0)] {
            assert!((smooth[i].1 - want).abs() < 1e-12, "{i}: {:?}", smooth[i]);
        }
        let (low, high) = learning_chart(&[run]).y_range.unwrap();
        assert!(low < 2.0 && high < 3.2, "{low} {high}");
    }
}
