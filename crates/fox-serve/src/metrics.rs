//! `/metrics`: counters and times in the text format of Prometheus, under names of this server (`fox_`) and, for
//! existing dashboards, under those of vLLM (`vllm:`, with the label `model_name`).

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fox_infer::Stats;

use crate::memory::ByteBudget;

/// Upper bounds of the histogram buckets, in seconds.
const BUCKETS: [f64; 18] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0, 600.0,
];

/// Metrics of the server; those of the engine are in its statistics.
#[derive(Default)]
pub(crate) struct Metrics {
    /// Responses by path and status.
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
    /// From a completion request to the end of its last choice.
    pub request_time: TimeHistogram,
    /// From a completion request to its first token.
    pub first_token_time: TimeHistogram,
    /// Between two tokens of an answer.
    pub inter_token_time: TimeHistogram,
    /// Time in the engine's queue.
    pub queue_time: TimeHistogram,
    /// Choices by the reason of their end, in the order of [`Outcome::ALL`].
    outcomes: [AtomicU64; Outcome::ALL.len()],
}

/// How a choice ended, in vLLM's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    /// The client disconnected.
    Abort,
    Error,
}

impl Outcome {
    const ALL: [Outcome; 4] = [Outcome::Stop, Outcome::Length, Outcome::Abort, Outcome::Error];

    fn label(self) -> &'static str {
        match self {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Abort => "abort",
            Outcome::Error => "error",
        }
    }
}

/// A histogram of times.
#[derive(Default)]
pub(crate) struct TimeHistogram {
    counts: [AtomicU64; BUCKETS.len() + 1],
    micros: AtomicU64,
}

impl TimeHistogram {
    pub fn observe(&self, time: Duration) {
        let bucket = BUCKETS.iter().position(|bound| time.as_secs_f64() <= *bound);
        self.counts[bucket.unwrap_or(BUCKETS.len())].fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Writes the histogram; `label` is empty or such as `model_name="x"`.
    fn write(&self, text: &mut String, (name, help): (&str, &str), label: &str) {
        header(text, name, help, "histogram");
        let (comma, braces) = match label {
            "" => ("", String::new()),
            label => (",", format!("{{{label}}}")),
        };
        let mut sum = 0;
        for (i, count) in self.counts.iter().enumerate() {
            sum += count.load(Ordering::Relaxed);
            let bound = BUCKETS.get(i).map_or("+Inf".to_string(), f64::to_string);
            line(text, &format!("{name}_bucket{{{label}{comma}le=\"{bound}\"}}"), sum as f64);
        }
        let seconds = self.micros.load(Ordering::Relaxed) as f64 / 1e6;
        line(text, &format!("{name}_sum{braces}"), seconds);
        line(text, &format!("{name}_count{braces}"), sum as f64);
    }
}

impl Metrics {
    /// Counts a response.
    pub fn count(&self, path: &'static str, status: u16) {
        let mut responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        *responses.entry((path, status)).or_default() += 1;
    }

    /// Counts choices that ended.
    pub fn count_outcome(&self, outcome: Outcome, choices: usize) {
        self.outcomes[outcome as usize].fetch_add(choices as u64, Ordering::Relaxed);
    }

    /// All metrics, those of the engine included.
    pub fn text(
        &self,
        model: &str,
        stats: &Stats,
        answers: &ByteBudget,
        bodies: &ByteBudget,
    ) -> String {
        let mut text = String::new();
        let name = "fox_http_responses_total";
        header(&mut text, name, "Responses by path and status.", "counter");
        for ((path, status), count) in
            self.responses.lock().unwrap_or_else(PoisonError::into_inner).iter()
        {
            let labels = format!("{name}{{path=\"{path}\",status=\"{status}\"}}");
            line(&mut text, &labels, *count as f64);
        }
        for (times, name, help) in [
            (&self.request_time, "fox_request_seconds", "Completions, from request to end."),
            (&self.first_token_time, "fox_first_token_seconds", "Completions, to the first token."),
            (&self.inter_token_time, "fox_inter_token_seconds", "Between two tokens of an answer."),
            (&self.queue_time, "fox_queue_seconds", "Completions, time in the queue."),
        ] {
            times.write(&mut text, (name, help), "");
        }
        engine(&mut text, stats);
        self.vllm(&mut text, model, stats);
        let used = answers.used() as f64;
        single(&mut text, "fox_answer_bytes", "Bytes of answers in flight.", "gauge", used);
        let used = bodies.used() as f64;
        single(&mut text, "fox_body_bytes", "Bytes of unfinished bodies.", "gauge", used);
        if let Some(bytes) = resident_bytes() {
            let name = "process_resident_memory_bytes";
            single(&mut text, name, "Memory in use.", "gauge", bytes as f64);
        }
        text
    }

    /// The names that dashboards for vLLM query.
    fn vllm(&self, text: &mut String, model: &str, stats: &Stats) {
        let escaped = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let label = format!("model_name=\"{escaped}\"");
        let usage = stats.cache_bytes as f64 / (stats.cache_budget.max(1)) as f64;
        let prompt_tokens = stats.prefilled_tokens + stats.shared_tokens;
        for (name, kind, help, value) in [
            ("num_requests_running", "gauge", "Running requests.", stats.running as f64),
            ("num_requests_waiting", "gauge", "Requests in the queue.", stats.queued as f64),
            ("kv_cache_usage_perc", "gauge", "Fraction of the KV cache in use, 0 to 1.", usage),
            ("gpu_cache_usage_perc", "gauge", "As kv_cache_usage_perc.", usage),
            ("num_preemptions_total", "counter", "Preemptions.", stats.preempted as f64),
            ("prompt_tokens_total", "counter", "Prompt tokens.", prompt_tokens as f64),
            (
                "prefix_cache_hits_total",
                "counter",
                "Prompt tokens found in the prefix cache.",
                stats.shared_tokens as f64,
            ),
            (
                "generation_tokens_total",
                "counter",
                "Tokens generated.",
                stats.generated_tokens as f64,
            ),
        ] {
            let name = format!("vllm:{name}");
            header(text, &name, help, kind);
            line(text, &format!("{name}{{{label}}}"), value);
        }
        let name = "vllm:request_success_total";
        header(text, name, "Choices by the reason of their end.", "counter");
        for (outcome, count) in Outcome::ALL.into_iter().zip(&self.outcomes) {
            let labels = format!("{name}{{finished_reason=\"{}\",{label}}}", outcome.label());
            line(text, &labels, count.load(Ordering::Relaxed) as f64);
        }
        let tokens = &self.inter_token_time;
        for (times, name, help) in [
            (&self.first_token_time, "time_to_first_token_seconds", "Time to the first token."),
            (tokens, "inter_token_latency_seconds", "Between two tokens of an answer."),
            (tokens, "time_per_output_token_seconds", "As inter_token_latency_seconds."),
            (&self.request_time, "e2e_request_latency_seconds", "From request to end."),
            (&self.queue_time, "request_queue_time_seconds", "Time in the queue."),
        ] {
            times.write(text, (&format!("vllm:{name}"), help), &label);
        }
    }
}

fn engine(text: &mut String, stats: &Stats) {
    let gauges = [
        ("fox_requests_queued", "Requests in the queue.", stats.queued as f64),
        ("fox_requests_running", "Running requests.", stats.running as f64),
        ("fox_cache_bytes", "Bytes of KV caches.", stats.cache_bytes as f64),
        ("fox_cache_peak_bytes", "Peak bytes of KV caches.", stats.peak_cache_bytes as f64),
        ("fox_cache_budget_bytes", "Limit on the bytes of KV caches.", stats.cache_budget as f64),
        (
            "fox_cache_evicted_ratio",
            "Fraction of the running requests' pages that was evicted.",
            stats.evicted_fraction(),
        ),
    ];
    let counters = [
        ("fox_requests_finished_total", "Requests that ended.", stats.finished),
        ("fox_requests_cancelled_total", "Requests cancelled by their clients.", stats.cancelled),
        ("fox_requests_preempted_total", "Preemptions for lack of memory.", stats.preempted),
        ("fox_prompt_tokens_total", "Prompt tokens prefilled.", stats.prefilled_tokens),
        (
            "fox_shared_tokens_total",
            "Prompt tokens found in the prefix cache.",
            stats.shared_tokens,
        ),
        ("fox_generated_tokens_total", "Tokens generated.", stats.generated_tokens),
        ("fox_steps_total", "Steps of the engine.", stats.steps),
    ];
    for (name, help, value) in gauges {
        single(text, name, help, "gauge", value);
    }
    for (name, help, value) in counters {
        single(text, name, help, "counter", value as f64);
    }
}

fn single(text: &mut String, name: &str, help: &str, kind: &str, value: f64) {
    header(text, name, help, kind);
    line(text, name, value);
}

fn header(text: &mut String, name: &str, help: &str, kind: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn line(text: &mut String, name: &str, value: f64) {
    let _ = writeln!(text, "{name} {value}");
}

/// Resident memory of this process, where `/proc` has it.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kilobytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_in_seconds() {
        let times = TimeHistogram::default();
        for micros in [1_500, 2_000_250] {
            times.observe(Duration::from_micros(micros));
        }
        let mut text = String::new();
        times.write(&mut text, ("t", "Times."), "");
        let figures: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        for line in ["t_bucket{le=\"0.001\"} 0", "t_bucket{le=\"0.0025\"} 1", "t_sum 2.00175"] {
            assert!(figures.contains(&line), "{line} is not in\n{text}");
        }
    }
}
