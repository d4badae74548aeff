//! Recall of the symbol N steps ago.
//!
//! Definition: the N-back task of psychology (Kirchner 1958, "Age differences in short-term retention of rapidly changing
//! information"), with the symbol itself as the answer. The first token says N, as the id N. Every step is a random symbol
//! and then the symbol of N steps before; the first N steps have padding instead. What must be kept is a queue of N
//! symbols.

use fox_base::random::SplitMix64;

use super::{Case, START, Setting, Task};

/// Recall by distance.
pub(super) struct NBack;

impl Task for NBack {
    fn name(&self) -> &'static str {
        "n-back"
    }

    fn difficulty(&self) -> &'static str {
        "steps back"
    }

    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String> {
        setting.check_count(self.difficulty())?;
        if vocabulary < 3 {
            return Err(format!("needs at least 3 ids, not {vocabulary}"));
        }
        if setting.count() >= vocabulary as usize {
            let back = setting.count();
            return Err(format!("goes {back} steps back, which {vocabulary} ids cannot say"));
        }
        setting.check_length(2 * setting.count() + 3)
    }

    fn case(&self, vocabulary: u32, setting: &Setting, random: &mut SplitMix64) -> Case {
        let mut case = Case::blank(setting.length);
        let back = setting.count();
        case.tokens[0] = back as u32;
        for step in 0..(setting.length - 1) / 2 {
            let at = 1 + 2 * step;
            case.tokens[at] = START + 1 + random.below(u64::from(vocabulary) - 1) as u32;
            if step >= back {
                case.answer(at + 1, case.tokens[at - 2 * back]);
            }
        }
        case
    }

    fn chance(&self, vocabulary: u32) -> f64 {
        1.0 / f64::from(vocabulary - 1)
    }
}
