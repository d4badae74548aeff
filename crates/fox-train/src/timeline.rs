//! When the ops of one step ran, and when tensors travelled: both queues of a device side by side.

use std::path::PathBuf;

use fox_base::durable;
use fox_tensor::{Device, Span};
use serde_json::json;

use crate::Result;

/// Steps before the one that is watched: kernels are compiled and memory is taken in the first ones.
const AFTER: usize = 5;

/// A timeline that is still to be written.
#[derive(Debug)]
pub struct Timeline {
    path: PathBuf,
    steps: usize,
}

impl Timeline {
    /// To be written to `path`.
    pub fn new(path: PathBuf) -> Self {
        Timeline { path, steps: 0 }
    }

    /// Counts a step; whether this is the one.
    pub fn is_due(&mut self) -> bool {
        self.steps += 1;
        self.steps > AFTER
    }

    /// Ends the watch, and writes what was seen in the format of Chrome's traces (chrome://tracing, Perfetto). Returns
    /// the result in one line.
    pub fn write(self, device: &Device, writes: bool) -> Result<String> {
        device.backend().profile(false);
        let spans = device.backend().take_timeline()?;
        if spans.is_empty() {
            return Ok(format!(
                "{device} does not record when its ops run: no timeline is written"
            ));
        }
        if writes {
            let text = serde_json::to_vec(&trace(&spans)).unwrap_or_default();
            durable::write(&self.path, &text)?;
        }
        let overlap = Overlap::of(&spans);
        Ok(format!(
            "timeline of one step in {}: ops {:.2} ms; sums over processes {:.2} ms, {:.2} ms of them while ops ran",
            self.path.display(),
            overlap.compute * 1e3,
            overlap.sums * 1e3,
            overlap.both * 1e3
        ))
    }
}

fn trace(spans: &[Span]) -> serde_json::Value {
    let overlap = Overlap::of(spans);
    let event = |span: &Span| {
        json!({
            "name": span.op, "cat": span.queue, "ph": "X", "pid": 0, "tid": span.queue,
            "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6,
        })
    };
    json!({
        "traceEvents": spans.iter().map(event).collect::<Vec<_>>(),
        "seconds": { "compute": overlap.compute, "sums": overlap.sums, "both": overlap.both },
    })
}

/// How long the queues were busy, in seconds.
#[derive(Debug, PartialEq)]
struct Overlap {
    /// With ops.
    compute: f64,
    /// With sums of gradients.
    sums: f64,
    /// With both at once.
    both: f64,
}

impl Overlap {
    fn of(spans: &[Span]) -> Overlap {
        let busy = |wanted: &dyn Fn(&Span) -> bool| {
            let mut times: Vec<(f64, f64)> =
                spans.iter().filter(|s| wanted(s)).map(|s| (s.begin, s.end)).collect();
            times.sort_by(|a, b| a.0.total_cmp(&b.0));
            times
        };
        let compute = busy(&|s| s.queue == "compute");
        let sums = busy(&|s| s.queue == "exchange" && s.op == "sum");
        let length = |times: &[(f64, f64)]| times.iter().map(|(a, b)| b - a).sum();
        // The spans of one queue do not overlap.
        let common = |(a, b): &(f64, f64)| -> f64 {
            compute.iter().map(|(c, d)| (d.min(*b) - c.max(*a)).max(0.0)).sum()
        };
        let both = sums.iter().map(common).sum();
        Overlap { compute: length(&compute), sums: length(&sums), both }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_counts_time_of_both_queues() {
        let span = |queue, op, begin, end| Span { queue, op, begin, end };
        let spans = [
            span("compute", "linear", 0.0, 2.0),
            span("compute", "norm", 3.0, 4.0),
            span("exchange", "sum", 1.0, 3.5),
            span("exchange", "share", 5.0, 7.0),
        ];
        let overlap = Overlap::of(&spans);
        assert_eq!(overlap, Overlap { compute: 3.0, sums: 2.5, both: 1.5 });
        let trace = trace(&spans);
        assert_eq!(trace["traceEvents"][2]["ts"], 1e6);
        assert_eq!(trace["traceEvents"][2]["dur"], 2.5e6);
        assert_eq!(trace["seconds"]["both"], 1.5);
    }

    #[test]
    fn timeline_skips_first_steps() {
        let mut timeline = Timeline::new(PathBuf::from("timeline.json"));
        let due: Vec<bool> = (0..7).map(|_| timeline.is_due()).collect();
        assert_eq!(due, [false, false, false, false, false, true, true]);
    }
}
