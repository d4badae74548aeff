//! Parity: whether the number of ones is odd.
//!
//! Random bits, a marker, and the answer. No fixed number of attention layers computes it for all lengths (Hahn 2020,
//! "Theoretical limitations of self-attention in neural sequence models"), and models of many kinds that are trained on
//! short cases fail on longer ones (Delétang et al. 2023, "Neural networks and the Chomsky hierarchy", trained to 40 bits).
//! Here it is the known failure: a model that were right would be a reason to look for a mistake.

use fox_base::random::SplitMix64;

use super::{Case, Setting, Task};

/// The parity of a string of bits.
pub(super) struct Parity;

const MARKER: u32 = 1;
/// The bit 0; the bit 1 comes after it.
const ZERO: u32 = 2;
const VOCABULARY: u32 = 4;

impl Task for Parity {
    fn name(&self) -> &'static str {
        "parity"
    }

    fn difficulty(&self) -> &'static str {
        ""
    }

    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String> {
        if vocabulary != VOCABULARY {
            return Err(format!("needs {VOCABULARY} ids, not {vocabulary}"));
        }
        if setting.difficulty != 0.0 {
            return Err(format!("has the difficulty {}; give 0", setting.difficulty));
        }
        setting.check_length(3)
    }

    fn case(&self, _: u32, setting: &Setting, random: &mut SplitMix64) -> Case {
        let mut case = Case::blank(setting.length);
        let bits = setting.length - 2;
        let mut odd = 0;
        for token in &mut case.tokens[..bits] {
            let bit = random.below(2) as u32;
            *token = ZERO + bit;
            odd ^= bit;
        }
        case.tokens[bits] = MARKER;
        case.answer(bits + 1, ZERO + odd);
        case
    }

    fn chance(&self, _: u32) -> f64 {
        0.5
    }
}
