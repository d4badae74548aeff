//! GPU generations and what their instructions allow.

/// A generation of NVIDIA GPUs, in order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Generation {
    /// Volta, Turing and earlier: compute capability below 8.0.
    PreAmpere,
    /// 8.0 to 8.8.
    Ampere,
    /// 8.9.
    Ada,
    /// 9.x.
    Hopper,
    /// 10.0 and later.
    Blackwell,
}

impl Generation {
    /// Whether tensor cores multiply bf16 and `cp.async` exists.
    pub(crate) fn has_bf16_mma(self) -> bool {
        self >= Generation::Ampere
    }

    /// Whether a launch may begin before its predecessor has ended (programmatic dependent launch).
    pub(crate) fn has_dependent_launch(self) -> bool {
        self >= Generation::Hopper
    }

    /// Whether the warpgroup instructions of Hopper (`wgmma`) exist. They do not on its successors.
    pub(crate) fn has_wgmma(self) -> bool {
        self == Generation::Hopper
    }
}

/// The compute capability of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeCapability {
    /// Before the dot.
    pub major: i32,
    /// After the dot.
    pub minor: i32,
}

impl ComputeCapability {
    /// The generation it belongs to.
    pub fn generation(self) -> Generation {
        match (self.major, self.minor) {
            (..8, _) => Generation::PreAmpere,
            (8, ..=8) => Generation::Ampere,
            (8, _) => Generation::Ada,
            (9, _) => Generation::Hopper,
            _ => Generation::Blackwell,
        }
    }

    /// The compiler's `--gpu-architecture`; `sm_90a` on Hopper, which enables `wgmma`.
    pub fn target(self) -> String {
        let suffix = if self.generation().has_wgmma() { "a" } else { "" };
        format!("sm_{}{}{suffix}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_have_a_generation_and_a_target() {
        use Generation::*;
        let cases = [
            ((7, 5), PreAmpere, "sm_75", [false, false, false]),
            ((8, 0), Ampere, "sm_80", [true, false, false]),
            ((8, 9), Ada, "sm_89", [true, false, false]),
            ((9, 0), Hopper, "sm_90a", [true, true, true]),
            ((10, 0), Blackwell, "sm_100", [true, true, false]),
            ((12, 0), Blackwell, "sm_120", [true, true, false]),
        ];
        for ((major, minor), generation, target, abilities) in cases {
            let capability = ComputeCapability { major, minor };
            let own = capability.generation();
            assert_eq!((own, capability.target().as_str()), (generation, target));
            let found = [own.has_bf16_mma(), own.has_dependent_launch(), own.has_wgmma()];
            assert_eq!(found, abilities, "{generation:?}");
        }
    }
}
