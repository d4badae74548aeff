//! The search for a learning rate: walk along a grid until the best point lies between worse ones.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::graph::{Node, NodeId, RunGraph, RunOutcome, TrainRun};

/// The grid {1, 2, 5} x 10^i: index 0 is 1, index 1 is 2, index -1 is 0.5.
pub fn learning_rate_grid(index: i32) -> f64 {
    let mantissa = [1.0, 2.0, 5.0][index.rem_euclid(3) as usize];
    let exponent = index.div_euclid(3);
    // Division by a power of ten gives the nearest number to the decimal; multiplication does not.
    if exponent < 0 { mantissa / 10f64.powi(-exponent) } else { mantissa * 10f64.powi(exponent) }
}

/// The state of a search: the losses of grid points that were tried.
#[derive(Clone, Debug)]
pub struct Bracket {
    start: i32,
    known: BTreeMap<i32, f64>,
}

impl Bracket {
    /// Starts at the point of the grid that is nearest to `lr` on a logarithmic scale.
    pub fn around(lr: f64) -> Bracket {
        let distance = |i: &i32| (learning_rate_grid(*i) / lr.max(1e-30)).ln().abs();
        let nearest = (-60..=30).min_by(|a, b| distance(a).total_cmp(&distance(b)));
        Bracket { start: nearest.unwrap_or(-9), known: BTreeMap::new() }
    }

    /// Records the loss of a point; NaN and infinity mean that the run diverged.
    pub fn record(&mut self, index: i32, loss: f64) {
        self.known.insert(index, if loss.is_nan() { f64::INFINITY } else { loss });
    }

    /// The best point so far.
    pub fn best(&self) -> Option<i32> {
        self.known.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(index, _)| *index)
    }

    /// Points to try next, in order of preference; empty when both neighbours of the best are known.
    pub fn wanted(&self) -> Vec<i32> {
        let Some(best) = self.best() else { return vec![self.start] };
        // When everything diverges, only smaller ones can help; 60 points are 20 decades.
        if self.known[&best].is_infinite() {
            let lowest = self.known.keys().next().copied().unwrap_or(self.start);
            return if self.known.len() < 60 { vec![lowest - 1] } else { Vec::new() };
        }
        let neighbours = [best - 1, best + 1].into_iter();
        neighbours.filter(|index| !self.known.contains_key(index)).collect()
    }

    /// Points that were tried, with their losses, in order of the learning rate.
    pub fn known(&self) -> impl Iterator<Item = (i32, f64)> + '_ {
        self.known.iter().map(|(index, loss)| (*index, *loss))
    }
}

/// A learning-rate search whose points are training runs of a graph.
#[derive(Clone, Debug)]
pub struct RateSearch {
    /// The losses so far.
    pub bracket: Bracket,
    /// The runs, with their grid points.
    pub nodes: Vec<(i32, NodeId)>,
    failed: bool,
}

impl RateSearch {
    /// Starts at the grid point nearest to `lr`.
    pub fn around(lr: f64) -> RateSearch {
        RateSearch { bracket: Bracket::around(lr), nodes: Vec::new(), failed: false }
    }

    /// Records runs that have ended and adds the next ones; `run` builds the training run for a learning rate.
    pub fn update(
        &mut self,
        graph: &mut RunGraph,
        rank: usize,
        run: impl Fn(f64) -> Result<TrainRun>,
    ) -> Result<()> {
        loop {
            for (index, id) in &self.nodes {
                let node = graph.node(*id);
                // The search cannot continue around an unknown loss.
                self.failed |= matches!(node.outcome, Some(RunOutcome::Failed(_)));
                if let Some(loss) = node.loss()? {
                    self.bracket.record(*index, loss);
                }
            }
            let mut added = false;
            let tried = |index: &i32| self.nodes.iter().any(|(known, _)| known == index);
            let wanted: Vec<i32> =
                self.bracket.wanted().into_iter().filter(|index| !tried(index)).collect();
            for index in wanted.into_iter().filter(|_| !self.failed) {
                let node = Node { rank, ..Node::train(run(learning_rate_grid(index))?) };
                self.nodes.push((index, graph.add(node)?));
                added = true;
            }
            if !added {
                return Ok(());
            }
        }
    }

    /// Whether no more runs are needed.
    pub fn is_over(&self) -> bool {
        self.failed || self.bracket.wanted().is_empty()
    }

    /// The best learning rate so far.
    pub fn best(&self) -> Option<f64> {
        self.bracket.best().map(learning_rate_grid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grid_is_one_two_five() {
        let grid: Vec<f64> = (-9..=0).map(learning_rate_grid).collect();
        assert_eq!(grid, [1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0]);
    }

    /// Runs a search over a loss and returns the best rate and the rates tried, in order.
    fn search(start: f64, loss: impl Fn(f64) -> f64) -> (f64, Vec<f64>) {
        let mut bracket = Bracket::around(start);
        let mut tried = Vec::new();
        while let Some(&index) = bracket.wanted().first() {
            let lr = learning_rate_grid(index);
            tried.push(lr);
            bracket.record(index, loss(lr));
        }
        (learning_rate_grid(bracket.best().unwrap()), tried)
    }

    #[test]
    fn brackets_a_local_optimum() {
        let loss = |lr: f64| (lr / 5e-3).ln().powi(2);
        let (best, tried) = search(1e-3, loss);
        assert_eq!(best, 5e-3);
        assert_eq!(tried, [1e-3, 5e-4, 2e-3, 5e-3, 1e-2]);
        assert_eq!(search(5e-3, loss).1, [5e-3, 2e-3, 1e-2]);
    }

    #[test]
    fn divergence_lowers_the_rate() {
        let loss = |lr: f64| if lr > 3e-3 { f64::NAN } else { (lr / 1e-3).ln().abs() };
        let (best, tried) = search(2e-2, loss);
        assert_eq!(best, 1e-3);
        assert_eq!(tried, [2e-2, 1e-2, 5e-3, 2e-3, 1e-3, 5e-4]);
    }

    #[test]
    fn nan_loss_counts_as_divergence() {
        let mut search = Bracket::around(1e-3);
        let start = search.wanted()[0];
        search.record(start, f64::NAN);
        assert_eq!(search.wanted(), [start - 1]);
    }
}
