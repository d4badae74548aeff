//! The small task of the guide (`docs/guide/src/extend.md`): what a new file of `src/task` would hold.
#![allow(clippy::unwrap_used)] // a test may panic

use fox_base::random::SplitMix64;
use fox_data::task::{Case, START, Setting, Task};

/// Symbols, a marker, and the first of the symbols again: what lies farthest back.
pub struct FirstSymbol;

const MARKER: u32 = 1;

impl Task for FirstSymbol {
    fn name(&self) -> &'static str {
        "first-symbol"
    }

    /// There is none, only the length.
    fn difficulty(&self) -> &'static str {
        ""
    }

    fn check(&self, vocabulary: u32, setting: &Setting) -> Result<(), String> {
        match vocabulary >= 4 && setting.length >= 3 && setting.difficulty == 0.0 {
            true => Ok(()),
            false => Err("needs 4 ids, 3 tokens and the difficulty 0".into()),
        }
    }

    fn case(&self, vocabulary: u32, setting: &Setting, random: &mut SplitMix64) -> Case {
        let mut symbol = || MARKER + 1 + random.below(u64::from(vocabulary) - 2) as u32;
        let mut tokens: Vec<u32> = (2..setting.length).map(|_| symbol()).collect();
        tokens.extend([MARKER, tokens[0]]);
        // The last token is the answer: it alone has a loss, and it alone is scored.
        let answers = (1..=setting.length).map(|i| i == setting.length).collect();
        Case { tokens, answers }
    }

    fn chance(&self, vocabulary: u32) -> f64 {
        1.0 / f64::from(vocabulary - 2)
    }
}

#[test]
fn registered_task_gives_cases() {
    let setting = Setting::from((20, 0.0));
    FirstSymbol.check(10, &setting).unwrap();
    let mut random = SplitMix64::new(1);
    let mut firsts = [0; 10];
    for _ in 0..800 {
        let case = FirstSymbol.case(10, &setting, &mut random);
        assert_eq!((case.tokens.len(), case.answers.len()), (20, 20));
        assert_eq!(case.answers.iter().position(|answer| *answer), Some(19));
        assert_eq!(case.tokens[19], case.tokens[0]);
        assert_eq!(case.tokens[18], MARKER);
        assert!(!case.tokens.contains(&START));
        firsts[case.tokens[0] as usize] += 1;
    }
    // All eight symbols come, none of them far more often than chance.
    assert!(firsts[2..].iter().all(|count| (50..150).contains(count)), "{firsts:?}");
    assert_eq!(FirstSymbol.chance(10), 0.125);
    assert!(FirstSymbol.check(3, &setting).is_err());
}
