//! What a step computes: a token of every sequence that decodes, then pieces of prompts under a budget.
//!
//! Pieces have one length and begin at its multiples from the start of their prompt, so a prompt is cut the
//! same in any company, and its bits are the same. What adapts is the number of pieces in a step.

use std::time::Duration;

/// Of so many pieces, one goes to the oldest prompt and the others to the one with the least left to read.
/// A short prompt therefore waits for at most one piece of a long one, and a long one is never stopped.
const OLDEST_EVERY: u64 = 4;

/// How much a new measurement counts against the earlier ones.
const FRESH: f64 = 0.2;

/// Whose prompt is read next.
#[derive(Debug, Default)]
pub(crate) struct PrefillOrder {
    pieces: u64,
}

impl PrefillOrder {
    /// Indices into `unread` of the prompts that get a piece of `piece` tokens each, in order, until `budget`
    /// tokens are taken; at least one piece. `unread` has the tokens left of every prompt, oldest first.
    pub fn form(&mut self, unread: &mut [usize], piece: usize, budget: usize) -> Vec<usize> {
        let (mut chosen, mut taken) = (Vec::new(), 0);
        while chosen.is_empty() || taken < budget {
            let Some(at) = self.next(unread) else { break };
            let tokens = unread[at].min(piece);
            if !chosen.is_empty() && taken + tokens > budget {
                break;
            }
            self.pieces += 1;
            unread[at] -= tokens;
            taken += tokens;
            chosen.push(at);
        }
        chosen
    }

    fn next(&self, unread: &[usize]) -> Option<usize> {
        let mut left = unread.iter().enumerate().filter(|(_, left)| **left > 0);
        match (self.pieces + 1).is_multiple_of(OLDEST_EVERY) {
            true => left.next(),
            false => left.min_by_key(|(_, left)| **left),
        }
        .map(|(at, _)| at)
    }
}

/// What steps take, as measured.
#[derive(Debug, Default)]
pub(crate) struct StepTimes {
    /// Seconds of the decode rows of a step.
    decode_s: Option<f64>,
    /// Seconds per token of a prompt.
    prompt_token_s: Option<f64>,
}

impl StepTimes {
    /// Tokens of prompts that a step may read beside its decode rows: as much time for both, and
    /// `max_tokens` at most.
    pub fn prompt_tokens(&self, max_tokens: usize) -> usize {
        match (self.decode_s, self.prompt_token_s) {
            (Some(decode), Some(token)) if token > 0.0 => {
                ((decode / token) as usize).min(max_tokens)
            }
            _ => 0,
        }
    }

    /// Notes the time of the decode rows of a step.
    pub fn decoded(&mut self, time: Duration) {
        average(&mut self.decode_s, time.as_secs_f64());
    }

    /// Notes the time of `tokens` tokens of a prompt.
    pub fn read(&mut self, tokens: usize, time: Duration) {
        if tokens > 0 {
            average(&mut self.prompt_token_s, time.as_secs_f64() / tokens as f64);
        }
    }
}

fn average(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + FRESH * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The step of one piece that ends each prompt.
    fn read_all(lengths: &[usize], piece: usize) -> Vec<usize> {
        let (mut order, mut left) = (PrefillOrder::default(), lengths.to_vec());
        let mut done = vec![0; left.len()];
        for step in 1.. {
            if order.form(&mut left, piece, 1).is_empty() {
                break;
            }
            for (done, left) in done.iter_mut().zip(&left) {
                if *done == 0 && *left == 0 {
                    *done = step;
                }
            }
        }
        done
    }

    #[test]
    fn the_shortest_is_read_first_and_the_oldest_is_not_stopped() {
        assert_eq!(read_all(&[3000, 10, 20], 10), [303, 1, 3]);
        // Short prompts without end: the long one still gets its share.
        let (mut order, mut long) = (PrefillOrder::default(), 100);
        let mut steps = 0;
        while long > 0 {
            let mut unread = [long, 10, 10];
            order.form(&mut unread, 10, 1);
            (long, steps) = (unread[0], steps + 1);
        }
        assert_eq!(steps, 9 * 4 + 1, "the last piece is as short as the others");
    }

    #[test]
    fn equals_are_read_one_after_the_other() {
        assert_eq!(read_all(&[100, 100, 100], 10), [10, 20, 30]);
    }

    #[test]
    fn a_step_keeps_to_its_budget_but_for_the_first_piece() {
        let mut order = PrefillOrder::default();
        assert_eq!(order.form(&mut [100, 30], 16, 0), [1], "at least one piece");
        assert_eq!(order.form(&mut [100, 30], 16, 47), [1, 1, 0], "16, 14, and 16 of the oldest");
        assert_eq!(order.form(&mut [5, 7], 16, 100), [0, 1], "all there is");
        assert!(order.form(&mut [0], 16, 100).is_empty());
    }

    #[test]
    fn prompts_get_as_much_time_as_decode_rows() {
        let mut pace = StepTimes::default();
        assert_eq!(pace.prompt_tokens(1000), 0, "nothing is known");
        pace.decoded(Duration::from_millis(10));
        pace.read(50, Duration::from_millis(5));
        assert_eq!(pace.prompt_tokens(1000), 100);
        assert_eq!(pace.prompt_tokens(64), 64);
        (0..50).for_each(|_| pace.read(50, Duration::from_millis(50)));
        assert_eq!(pace.prompt_tokens(1000), 10);
    }
}
