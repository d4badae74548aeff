//! Selective copying.
//!
//! Definition: Gu and Dao 2023, "Mamba: Linear-time sequence modeling with selective state spaces" (arXiv 2312.00752),
//! section 3.1. Some symbols stand at random places among noise; behind a marker they are asked for in order.

use fox_base::random::SplitMix64;

use super::{Case, Setting, Task};

/// Copying of what is not noise.
pub(super) struct SelectiveCopy;

const NOISE: u32 = 1;
const MARKER: u32 = 2;
/// The first symbol.
const FIRST: u32 = 3;

impl Task for SelectiveCopy {
    fn name(&self) -> &'static str {
        "selective-copy"
    }

    fn difficulty(&self) -> &'static str {
        "symbols"
    }

    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String> {
        setting.check_count(self.difficulty())?;
        if vocabulary < FIRST + 2 {
            return Err(format!("needs at least {} ids, not {vocabulary}", FIRST + 2));
        }
        setting.check_length(2 * setting.count() + 1)
    }

    fn case(&self, vocabulary: u32, setting: &Setting, random: &mut SplitMix64) -> Case {
        let mut case = Case::blank(setting.length);
        let symbols = setting.count();
        let marker = setting.length - symbols - 1;
        case.tokens[marker] = MARKER;
        let mut copied = 0;
        for at in 0..marker {
            // Every choice of places is equally likely.
            let is_symbol = random.below((marker - at) as u64) < (symbols - copied) as u64;
            case.tokens[at] = NOISE;
            if is_symbol {
                let symbol = FIRST + random.below(u64::from(vocabulary - FIRST)) as u32;
                case.tokens[at] = symbol;
                case.answer(marker + 1 + copied, symbol);
                copied += 1;
            }
        }
        case
    }

    fn chance(&self, vocabulary: u32) -> f64 {
        1.0 / f64::from(vocabulary - FIRST)
    }
}
