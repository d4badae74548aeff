//! Axes: mapping of values to coordinates, and ticks.

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear.
    Linear,
    /// Logarithmic with ticks at powers of two. Values must be positive.
    Log2,
    /// Logarithmic with ticks at powers of ten. Values must be positive.
    Log10,
}

/// An axis: values `low..=high` at coordinates `from..=to`.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    /// Distance of linear ticks, for an axis that ends at them.
    tick_step: Option<f64>,
}

impl Axis {
    /// An axis that covers all `values`, except those that it cannot show: not finite, or not positive on a logarithmic
    /// axis.
    pub(super) fn around(values: impl Iterator<Item = f64>, scale: Scale) -> Self {
        let fits = |v: &f64| v.is_finite() && (scale == Scale::Linear || *v > 0.0);
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(fits) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 2.0);
        }
        if low == high {
            (low, high) = match scale {
                Scale::Linear => (low - 0.5, high + 0.5),
                Scale::Log2 | Scale::Log10 => (low / 2.0, high * 2.0),
            };
        }
        Axis { scale, low, high, from: 0.0, to: 1.0, tick_step: None }
    }

    /// Widens the axis so that it ends at ticks: of a linear axis with the steps that widen it least, of a logarithmic
    /// one at powers.
    pub(super) fn ending_at_ticks(mut self) -> Self {
        match self.scale {
            Scale::Linear => {
                let ends = |wanted: usize| {
                    let step = self.step(wanted);
                    // An end that is a tick but for rounding stays.
                    let low = (self.low / step + 1e-6).floor() * step;
                    (low, (self.high / step - 1e-6).ceil() * step, step)
                };
                let all = (4..=6).map(ends);
                let width = |ends: &(f64, f64, f64)| ends.1 - ends.0;
                if let Some((low, high, step)) = all.min_by(|a, b| width(a).total_cmp(&width(b))) {
                    (self.low, self.high, self.tick_step) = (low, high, Some(step));
                }
            }
            Scale::Log2 | Scale::Log10 => {
                let base: f64 = if self.scale == Scale::Log2 { 2.0 } else { 10.0 };
                let power = |v: f64| v.ln() / base.ln();
                let low = base.powf((power(self.low) + 0.02).floor());
                let high = base.powf((power(self.high) - 0.02).ceil());
                // Within a decade there are too few powers.
                if high > low && (self.scale == Scale::Log2 || high / low > base) {
                    (self.low, self.high) = (low.min(self.low), high.max(self.high));
                }
            }
        }
        self
    }

    /// Widens the axis by a fraction of its length on both sides, so that lines do not touch the frame. Values of at least
    /// 0, such as rates and losses, get no negative end.
    pub(super) fn padded(mut self, fraction: f64) -> Self {
        let (low, high) = (self.forward(self.low), self.forward(self.high));
        let pad = (high - low) * fraction;
        let least = if self.low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
        (self.low, self.high) = (self.backward(low - pad).max(least), self.backward(high + pad));
        self
    }

    /// The same axis between two coordinates.
    pub(super) fn placed(self, from: f64, to: f64) -> Self {
        Axis { from, to, ..self }
    }

    fn forward(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Log2 | Scale::Log10 => value.ln(),
        }
    }

    fn backward(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Log2 | Scale::Log10 => value.exp(),
        }
    }

    /// The coordinate of a value; `None` if the axis cannot show it.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        let (low, high) = (self.forward(self.low), self.forward(self.high));
        let fraction = (self.forward(value) - low) / (high - low);
        fraction.is_finite().then_some(self.from + fraction * (self.to - self.from))
    }

    /// About `wanted` tick values with their labels.
    pub(super) fn ticks(&self, wanted: usize) -> Vec<(f64, String)> {
        let wanted = wanted.max(2);
        match self.scale {
            Scale::Linear => self.linear_ticks(wanted),
            Scale::Log2 => self.power_ticks(2.0, wanted),
            Scale::Log10 => {
                let ticks = self.power_ticks(10.0, wanted);
                // Within one decade there are too few powers.
                if ticks.len() < 2 { self.linear_ticks(wanted) } else { ticks }
            }
        }
    }

    /// The step of about `wanted` linear ticks.
    fn step(&self, wanted: usize) -> f64 {
        let raw = (self.high - self.low) / wanted as f64;
        let power = 10f64.powf(raw.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|m| m * power);
        steps.into_iter().find(|step| *step >= raw * (1.0 - 1e-9)).unwrap_or(10.0 * power)
    }

    fn linear_ticks(&self, wanted: usize) -> Vec<(f64, String)> {
        let step = self.tick_step.unwrap_or_else(|| self.step(wanted));
        let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        let first = (self.low / step - 1e-6).ceil() as i64;
        (first..)
            .map(|k| k as f64 * step)
            .take_while(|v| *v <= self.high + step * 1e-9)
            .map(|v| (v, label(v, decimals)))
            .collect()
    }

    fn power_ticks(&self, base: f64, wanted: usize) -> Vec<(f64, String)> {
        let exponent = |v: f64| v.ln() / base.ln();
        let (first, last) =
            (exponent(self.low * 0.999).ceil() as i32, exponent(self.high * 1.001).floor() as i32);
        let every = ((last - first).max(0) as usize + 1).div_ceil(wanted) as i32;
        // Both ends are ticks; one that is closer to the last than half of the distance is left out.
        (first..=last)
            .filter(|k| *k == last || ((k - first) % every == 0 && 2 * (last - k) >= every))
            .map(|k| {
                let v = base.powi(k);
                (v, label(v, if k < 0 { (-k).min(6) as usize } else { 0 }))
            })
            .collect()
    }
}

/// A tick label: `16k` for 16384, `2.5M`, plain below.
pub(super) fn label(value: f64, decimals: usize) -> String {
    let binary = value >= 1024.0 && value % 1024.0 == 0.0;
    let (size, k) = (value.abs(), if binary { 1024.0 } else { 1000.0 });
    match size {
        s if s >= k * k && (s / (k * k)).fract() == 0.0 => format!("{}M", value / (k * k)),
        s if s >= 1e6 => format!("{:.1}M", value / 1e6),
        s if s >= 1024.0 && (s / k).fract() == 0.0 => format!("{}k", value / k),
        s if s >= 1e4 => format!("{:.1}k", value / 1e3),
        _ => {
            let text = format!("{value:.decimals$}");
            if text.trim_start_matches('-').chars().all(|c| matches!(c, '0' | '.')) {
                text.trim_start_matches('-').to_string()
            } else {
                text
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(values: [f64; 2], scale: Scale, wanted: usize) -> Vec<String> {
        let axis = Axis::around(values.into_iter(), scale);
        axis.ticks(wanted).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn values_from_zero_have_no_negative_end() {
        let axis = |low: f64| Axis::around([low, 0.004].into_iter(), Scale::Linear).padded(0.02);
        assert_eq!((axis(0.0).low, axis(0.0).ending_at_ticks().low), (0.0, 0.0));
        assert!(axis(-0.001).low < -0.001 && axis(0.002).low < 0.002);
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(
            labels([0.0, 1.0], Scale::Linear, 5),
            ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
        );
        assert_eq!(labels([1.31, 1.52], Scale::Linear, 4), ["1.4", "1.5"]);
        assert_eq!(
            labels([-0.1, 0.1], Scale::Linear, 4),
            ["-0.10", "-0.05", "0.00", "0.05", "0.10"]
        );
        assert_eq!(labels([0.0, 4_000_000.0], Scale::Linear, 4), ["0", "1M", "2M", "3M", "4M"]);
    }

    #[test]
    fn drops_powers_that_do_not_fit() {
        assert_eq!(labels([512.0, 4096.0], Scale::Log2, 6), ["512", "1k", "2k", "4k"]);
        assert_eq!(
            labels([1.0, 65536.0], Scale::Log2, 6),
            ["1", "8", "64", "512", "4k", "64k"],
            "the last power is a tick"
        );
        assert_eq!(labels([0.01, 10.0], Scale::Log10, 6), ["0.01", "0.1", "1", "10"]);
    }

    #[test]
    fn axes_can_end_at_ticks() {
        let ends = |low: f64, high: f64, scale| {
            let axis = Axis::around([low, high].into_iter(), scale).ending_at_ticks();
            let ticks = axis.ticks(5);
            (axis.low, axis.high, ticks[0].0, ticks[ticks.len() - 1].0)
        };
        for (low, high, scale) in [
            (1.31, 1.52, Scale::Linear),
            (-0.1, 0.17, Scale::Linear),
            (1.44, 2.76, Scale::Linear),
            (-1.45, 1.2, Scale::Linear),
            (34.0, 980.0, Scale::Log2),
            (0.02, 7.0, Scale::Log10),
        ] {
            let (from, to, first, last) = ends(low, high, scale);
            assert!(from <= low && high <= to, "{from} {to}");
            assert!((first - from).abs() < 1e-9 && (last - to).abs() < 1e-9, "{first} {last}");
        }
        assert_eq!((ends(0.0, 1.0, Scale::Linear).0, ends(0.0, 1.0, Scale::Linear).1), (0.0, 1.0));
        assert_eq!(ends(34.0, 980.0, Scale::Log2).1, 1024.0);
    }

    #[test]
    fn maps_values_and_rejects_invalid_ones() {
        let axis = Axis::around([1.0, 100.0].into_iter(), Scale::Log10).placed(0.0, 10.0);
        assert!((axis.place(10.0).unwrap() - 5.0).abs() < 1e-12);
        assert_eq!(axis.place(0.0), None);
        let with_zero = Axis::around([0.0, 1.0, 100.0].into_iter(), Scale::Log10).placed(0.0, 10.0);
        assert_eq!(with_zero.place(10.0), axis.place(10.0), "a logarithmic axis leaves zero out");
        assert_eq!(axis.place(f64::NAN), None);
        let empty = Axis::around([f64::NAN].into_iter(), Scale::Linear);
        assert!(empty.place(1.5).is_some());
    }
}
