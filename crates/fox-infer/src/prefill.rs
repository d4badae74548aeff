//! Chunked prefill: which prompts get the next chunks of a step, and how many tokens beside the decode batch.
//!
//! Chunks have one length and begin at its multiples from the start of their prompt, so a prompt is split the same way
//! whatever the batch, and its bits are the same. Only the number of chunks per step adapts.

use std::time::Duration;

/// Every fourth chunk goes to the oldest prompt, the others to the one with the fewest tokens left. A short prompt
/// therefore waits for at most one chunk of a long one, and a long prompt does not starve.
const OLDEST_EVERY: u64 = 4;

/// Weight of a new measurement in the moving averages.
const FRESH: f64 = 0.2;

/// The order in which prompts are prefilled.
#[derive(Debug, Default)]
pub(crate) struct PrefillOrder {
    chunks: u64,
}

impl PrefillOrder {
    /// Selects chunks of `chunk` tokens until `budget` tokens are taken; at least one. Returns indices into `unread`, which
    /// has the tokens left of every prompt, oldest first.
    pub fn select(&mut self, unread: &mut [usize], chunk: usize, budget: usize) -> Vec<usize> {
        let (mut chosen, mut taken) = (Vec::new(), 0);
        while chosen.is_empty() || taken < budget {
            let Some(at) = self.next(unread) else { break };
            let tokens = unread[at].min(chunk);
            if !chosen.is_empty() && taken + tokens > budget {
                break;
            }
            self.chunks += 1;
            unread[at] -= tokens;
            taken += tokens;
            chosen.push(at);
        }
        chosen
    }

    fn next(&self, unread: &[usize]) -> Option<usize> {
        let mut left = unread.iter().enumerate().filter(|(_, left)| **left > 0);
        match (self.chunks + 1).is_multiple_of(OLDEST_EVERY) {
            true => left.next(),
            false => left.min_by_key(|(_, left)| **left),
        }
        .map(|(at, _)| at)
    }
}

/// Moving averages of step times.
#[derive(Debug, Default)]
pub(crate) struct StepTimes {
    /// Seconds of a decode batch.
    decode_s: Option<f64>,
    /// Seconds per prefilled token.
    prompt_token_s: Option<f64>,
}

impl StepTimes {
    /// Prompt tokens to prefill beside a decode batch: as many as take the same time, and at most `max_tokens`.
    pub fn prompt_tokens(&self, max_tokens: usize) -> usize {
        match (self.decode_s, self.prompt_token_s) {
            (Some(decode), Some(token)) if token > 0.0 => {
                ((decode / token) as usize).min(max_tokens)
            }
            _ => 0,
        }
    }

    /// Records the time of a decode batch.
    pub fn decoded(&mut self, time: Duration) {
        update(&mut self.decode_s, time.as_secs_f64());
    }

    /// Records the time of `tokens` prefilled tokens.
    pub fn prefilled(&mut self, tokens: usize, time: Duration) {
        if tokens > 0 {
            update(&mut self.prompt_token_s, time.as_secs_f64() / tokens as f64);
        }
    }
}

fn update(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + FRESH * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The step, of one chunk each, at which each prompt is complete.
    fn prefill_all(lengths: &[usize], chunk: usize) -> Vec<usize> {
        let (mut order, mut left) = (PrefillOrder::default(), lengths.to_vec());
        let mut done = vec![0; left.len()];
        for step in 1.. {
            if order.select(&mut left, chunk, 1).is_empty() {
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
    fn shortest_prompt_first_without_starvation() {
        assert_eq!(prefill_all(&[3000, 10, 20], 10), [303, 1, 3]);
        // An endless supply of short prompts: the long one still gets every fourth chunk.
        let (mut order, mut long) = (PrefillOrder::default(), 100);
        let mut steps = 0;
        while long > 0 {
            let mut unread = [long, 10, 10];
            order.select(&mut unread, 10, 1);
            (long, steps) = (unread[0], steps + 1);
        }
        assert_eq!(steps, 9 * 4 + 1, "the last chunk is as short as the others");
    }

    #[test]
    fn equal_prompts_are_prefilled_in_order() {
        assert_eq!(prefill_all(&[100, 100, 100], 10), [10, 20, 30]);
    }

    #[test]
    fn budget_holds_except_for_the_first_chunk() {
        let mut order = PrefillOrder::default();
        assert_eq!(order.select(&mut [100, 30], 16, 0), [1], "at least one chunk");
        assert_eq!(order.select(&mut [100, 30], 16, 47), [1, 1, 0], "16, 14, and 16 of the oldest");
        assert_eq!(order.select(&mut [5, 7], 16, 100), [0, 1], "all that is left");
        assert!(order.select(&mut [0], 16, 100).is_empty());
    }

    #[test]
    fn prefill_gets_as_much_time_as_decoding() {
        let mut times = StepTimes::default();
        assert_eq!(times.prompt_tokens(1000), 0, "no measurement yet");
        times.decoded(Duration::from_millis(10));
        times.prefilled(50, Duration::from_millis(5));
        assert_eq!(times.prompt_tokens(1000), 100);
        assert_eq!(times.prompt_tokens(64), 64);
        (0..50).for_each(|_| times.prefilled(50, Duration::from_millis(50)));
        assert_eq!(times.prompt_tokens(1000), 10);
        times.prefilled(0, Duration::from_millis(5));
        assert_eq!(times.prompt_tokens(1000), 10, "a step without prompt tokens measures nothing");
    }
}
