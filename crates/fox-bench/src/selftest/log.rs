//! What a self-test prints: text as it comes, or one JSON document at the end.

use anyhow::Result;
use fox_tensor::Device;
use serde_json::{Value, json};

use crate::output;

/// The checks so far.
#[derive(Default)]
pub(super) struct Log {
    json: bool,
    devices: Vec<Value>,
    checks: Vec<Value>,
}

impl Log {
    pub(super) fn new(json: bool) -> Self {
        Log { json, ..Log::default() }
    }

    /// A line that is not part of a check.
    pub(super) fn line(&self, text: &str) -> Result<()> {
        if !self.json {
            output::print(&format!("{text}\n"))?;
        }
        Ok(())
    }

    /// One check: lines for a terminal, and the same figures by name. Returns whether it passed.
    pub(super) fn check(&mut self, passed: bool, text: &str, mut figures: Value) -> Result<bool> {
        if !self.json {
            output::print(text)?;
        }
        figures["passed"] = passed.into();
        self.checks.push(figures);
        Ok(passed)
    }

    /// Ends the checks of a device.
    pub(super) fn end_device(&mut self, device: &Device) {
        let checks = std::mem::take(&mut self.checks);
        self.devices.push(json!({ "device": device.backend().description(), "checks": checks }));
    }

    /// Prints the verdict on all devices.
    pub(super) fn finish(self, passed: bool) -> Result<()> {
        Ok(output::print(&match self.json {
            true => {
                let all = json!({ "passed": passed, "devices": self.devices });
                format!("{}\n", serde_json::to_string_pretty(&all)?)
            }
            false => format!("{}\n", if passed { "PASS" } else { "FAIL" }),
        })?)
    }
}
