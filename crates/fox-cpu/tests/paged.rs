//! Attention over pages against the oracle.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use fox_base::difference::largest_error;
use fox_cpu::Level;
use fox_cpu::{Options, device_with};
use fox_tensor::Device;
use fox_tensor::cases::PagedCase;

#[test]
fn random_cases_at_every_level() {
    let naive = Device::naive();
    for level in Level::available() {
        let options = Options { level: Some(level), poison: true, ..Options::default() };
        let cpu = device_with(options).unwrap();
        let random = (0..60).map(|seed| (seed, PagedCase::random(seed)));
        let dropped = (0..20).map(|seed| (1000 + seed, PagedCase::with_dropped_pages(seed)));
        for (seed, case) in random.chain(dropped) {
            let case = case.unwrap();
            let run = |device| case.run(device, &case.pages(device).unwrap(), &case.spec).unwrap();
            let (want, got) = (run(&naive), run(&cpu));
            let error = largest_error(&got, &want);
            assert!(error < 2e-5, "{} seed {seed}: {error:e}", level.name());
        }
    }
}
