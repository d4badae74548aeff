//! Flip-flop language modelling.
//!
//! Definition: Liu et al. 2023, "Exposing attention glitches with flip-flop language modeling" (arXiv 2306.00946),
//! FFL(p). A case is a sequence of instructions, each followed by a bit: `write`, `ignore` or `read`. The bit behind a
//! `read` is that of the last `write`; the others are random. The first instruction is a `write`, the last a `read`; the
//! others are `ignore` with probability p, and otherwise `write` or `read` evenly. Published: training at p = 0.8 with 512
//! tokens, tests at 0.8 (in distribution), 0.98 (sparse) and 0.1 (dense). Only bits behind a `read` are answers.

use fox_base::random::SplitMix64;

use super::{Case, Setting, Task};

/// One bit of memory.
pub(super) struct FlipFlop;

const WRITE: u32 = 1;
const READ: u32 = 2;
const IGNORE: u32 = 3;
/// The bit 0; the bit 1 comes after it.
const ZERO: u32 = 4;
const VOCABULARY: u32 = 6;

impl Task for FlipFlop {
    fn name(&self) -> &'static str {
        "flip-flop"
    }

    fn difficulty(&self) -> &'static str {
        "ignored"
    }

    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String> {
        if vocabulary != VOCABULARY {
            return Err(format!("needs {VOCABULARY} ids, not {vocabulary}"));
        }
        if !(0.0..=1.0).contains(&setting.difficulty) {
            return Err(format!("ignores a fraction of {}; it must be 0 to 1", setting.difficulty));
        }
        if !setting.length.is_multiple_of(2) {
            return Err(format!("has cases of {} tokens; give an even number", setting.length));
        }
        setting.check_length(4)
    }

    fn case(&self, _: u32, setting: &Setting, random: &mut SplitMix64) -> Case {
        let mut case = Case::blank(setting.length);
        let ignored = (setting.difficulty * f64::from(1u32 << 31)) as u64;
        let steps = setting.length / 2;
        let mut stored = ZERO;
        for step in 0..steps {
            let instruction = match step {
                0 => WRITE,
                step if step + 1 == steps => READ,
                _ if random.below(1 << 31) < ignored => IGNORE,
                _ if random.below(2) == 0 => WRITE,
                _ => READ,
            };
            case.tokens[2 * step] = instruction;
            let bit = ZERO + random.below(2) as u32;
            match instruction {
                READ => case.answer(2 * step + 1, stored),
                _ => case.tokens[2 * step + 1] = bit,
            }
            if instruction == WRITE {
                stored = bit;
            }
        }
        case
    }

    fn chance(&self, _: u32) -> f64 {
        0.5
    }
}
