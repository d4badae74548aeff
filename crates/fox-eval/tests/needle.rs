//! The needle test on readers whose result is known beforehand.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use common::{broken, says_not_finite};
use fox_data::{SyntheticConfig, SyntheticTokenizer, Tokenizer};
use fox_eval::needle::{
    Case, Cases, Grid, Mode, ModelReader, Needle, Reader, Reading, SyntheticCases, TextCases,
    run_needle,
};
use fox_eval::{Result, Subject};
use fox_model::{Model, ModelConfig, Pruning};

/// Copies: continues the longest suffix of the prompt that occurred before, as it went on then.
struct Copier;

impl Reader for Copier {
    fn read(
        &mut self,
        prompt: &[u32],
        continuations: &[Vec<u32>],
        greedy: usize,
    ) -> Result<Reading> {
        let matched = |end: usize| {
            let pairs = prompt[..end].iter().rev().zip(prompt.iter().rev());
            pairs.take_while(|(a, b)| a == b).count()
        };
        let at = (1..prompt.len()).max_by_key(|end| matched(*end)).unwrap();
        let greedy: Vec<u32> = prompt[at..].iter().copied().take(greedy).collect();
        let log_prob = |c: &Vec<u32>| if greedy.starts_with(c) { 0.0 } else { -9.0 };
        Ok(Reading { log_probs: continuations.iter().map(log_prob).collect(), greedy })
    }
}

fn synthetic() -> SyntheticCases {
    SyntheticCases { config: SyntheticConfig::default() }
}

fn words(ids: &[u32]) -> Result<String> {
    Ok(SyntheticTokenizer.decode(ids)?)
}

#[test]
fn copying_reader_finds_every_needle() {
    let grid = Grid { lengths: vec![64, 300], depths: Grid::even_depths(5), cases: 8 };
    let map = run_needle("copier", &mut Copier, &synthetic(), &grid, &words, None, |_| ()).unwrap();
    assert_eq!(map.cells.len(), 10);
    for cell in &map.cells {
        assert_eq!((cell.accuracy, cell.preferred, cell.margin), (1.0, Some(1.0), Some(9.0)));
    }
    let tokenizer = Tokenizer::from_name("bytes").unwrap();
    let text = "A long walk by the sea. ".repeat(100);
    let cases = TextCases::new(&text, &Needle::default(), Mode::Easy, &tokenizer).unwrap();
    let grid = Grid { lengths: vec![1500], ..grid };
    let decode = |ids: &[u32]| Ok(tokenizer.decode(ids)?);
    let map = run_needle("copier", &mut Copier, &cases, &grid, &decode, None, |_| ()).unwrap();
    assert!(map.cells.iter().all(|c| c.accuracy == 1.0), "{map:?}");
}

fn named(model: &Model) -> Subject<'_> {
    Subject { name: "tiny", model, training_length: None }
}

fn random_model(vocab: usize) -> Model {
    let config = ModelConfig::fox_pro(32, 1, 2).with_vocab(vocab).with_mlp_width(48);
    Model::init(&config, 3, &fox_cpu::device()).unwrap()
}

#[test]
fn random_model_is_right_by_chance() {
    let model = random_model(256);
    let mut reader = ModelReader::new(named(&model), Pruning::Off);
    let (cases, count) = (synthetic(), 960);
    let grid = Grid { lengths: vec![17], depths: vec![0.5], cases: count };
    let map = run_needle("random", &mut reader, &cases, &grid, &words, None, |_| ()).unwrap();
    let (preferred, chance) = (map.cells[0].preferred.unwrap(), cases.chance());
    let error = (chance * (1.0 - chance) / count as f64).sqrt();
    assert!((preferred - chance).abs() < 4.0 * error, "{preferred}, chance {chance}");
    assert!(map.cells[0].accuracy < 0.05);
    // Untrained logits are almost even over the 256 ids.
    assert!((map.cells[0].log_prob + 256f64.ln()).abs() < 0.2, "{}", map.cells[0].log_prob);
}

#[test]
fn continuation_score_is_sum_of_log_probabilities() {
    let model = random_model(64);
    let prompt = [5, 9, 2, 33];
    let mut reader = ModelReader::new(named(&model), Pruning::Off);
    let first = reader.read(&prompt, &[vec![7]], 3).unwrap();
    let longer = reader.read(&[5, 9, 2, 33, 7], &[vec![8]], 1).unwrap();
    let both = reader.read(&prompt, &[vec![7, 8], vec![7]], 0).unwrap();
    let sum = first.log_probs[0] + longer.log_probs[0];
    assert!((both.log_probs[0] - sum).abs() < 1e-5, "{} {sum}", both.log_probs[0]);
    assert_eq!(both.log_probs[1], first.log_probs[0]);
    // The greedy answer is the most likely token each time.
    let everything: Vec<Vec<u32>> = (0..64).map(|id| vec![id]).collect();
    let all = reader.read(&prompt, &everything, 1).unwrap();
    let total: f64 = all.log_probs.iter().map(|l| l.exp()).sum();
    assert!((total - 1.0).abs() < 1e-6, "{total}");
    let best = all.log_probs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    assert_eq!(all.log_probs[first.greedy[0] as usize], best);
    assert!(reader.read(&[], &[], 1).unwrap_err().to_string().contains("empty"));
}

#[test]
fn resume_asks_only_missing_cases() {
    struct Counting<'a>(Copier, &'a mut u32);
    impl Reader for Counting<'_> {
        fn read(&mut self, prompt: &[u32], c: &[Vec<u32>], greedy: usize) -> Result<Reading> {
            *self.1 += 1;
            self.0.read(prompt, c, greedy)
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("needle.jsonl");
    let mut asked = 0;
    for (cases, expected) in [(2, 4), (3, 6), (3, 6)] {
        let grid = Grid { lengths: vec![64], depths: vec![0.0, 1.0], cases };
        let mut reader = Counting(Copier, &mut asked);
        let file = Some((path.as_path(), 7));
        let cases = synthetic();
        run_needle("m", &mut reader, &cases, &grid, &words, file, |_| ()).unwrap();
        assert_eq!(asked, expected);
    }
}

#[test]
fn rejects_small_vocabulary() {
    let model = random_model(64);
    let subject = Subject { name: "m", model: &model, training_length: None };
    let said = subject.check_vocabulary("tokenizer", 256).unwrap_err().to_string();
    assert_eq!(
        said,
        "the model m has 64 token ids, but the tokenizer has 256; evaluate it with the tokenizer it was trained with"
    );
}

/// Says the right answer up to a token, and then something else.
struct Beginner {
    answer: Vec<u32>,
    right: usize,
}

impl Reader for Beginner {
    fn read(&mut self, _: &[u32], all: &[Vec<u32>], greedy: usize) -> Result<Reading> {
        let known = &self.answer[..self.right];
        let said = known.iter().copied().chain(std::iter::repeat(b'#'.into()));
        Ok(Reading { greedy: said.take(greedy).collect(), log_probs: vec![-1.0; all.len()] })
    }
}

/// A case whose answer is compared by ids.
struct ByIds;

impl Cases for ByIds {
    fn case(&self, length: usize, _: f64, _: u64) -> Result<Case> {
        let answer = vec![70, 71, 72];
        Ok(Case { prompt: vec![1; length], answer, wrong: Vec::new(), expected: None })
    }
    fn identity(&self) -> String {
        "ids".into()
    }
    fn vocab_size(&self) -> usize {
        256
    }
    fn answer_tokens(&self) -> usize {
        3
    }
    fn chance(&self) -> f64 {
        0.0
    }
}

#[test]
fn partial_answer_is_not_a_match() {
    let tokenizer = Tokenizer::from_name("bytes").unwrap();
    let decode = |ids: &[u32]| Ok(tokenizer.decode(ids)?);
    let needle = Needle::default();
    let text = "A long walk by the sea. ".repeat(100);
    let in_words = TextCases::new(&text, &needle, Mode::Standard, &tokenizer).unwrap();
    let grid = Grid { lengths: vec![1000], depths: vec![0.5], cases: 1 };
    // The full stop behind the answer is not asked for.
    let words = tokenizer.encode(&needle.answer).unwrap();
    for (cases, answer, enough) in
        [(&in_words as &dyn Cases, words.clone(), words.len() - 1), (&ByIds, vec![70, 71, 72], 3)]
    {
        for right in [0, 1, enough - 1, enough] {
            let mut reader = Beginner { answer: answer.clone(), right };
            let map = run_needle("m", &mut reader, cases, &grid, &decode, None, |_| ()).unwrap();
            let found = f64::from(u8::from(right == enough));
            assert_eq!(map.cells[0].accuracy, found, "{} {right}", cases.identity());
            assert_eq!(map.cells[0].log_prob, -1.0 / answer.len() as f64);
        }
    }
}

#[test]
fn rejects_model_with_nan_logits_in_needles() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scores.jsonl");
    let grid = Grid { lengths: vec![64], depths: vec![0.0, 1.0], cases: 1 };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let model = broken(random_model(256), value);
        let mut reader = ModelReader::new(named(&model), Pruning::Off);
        let (cases, file) = (synthetic(), Some((path.as_path(), 1)));
        let result = run_needle("tiny", &mut reader, &cases, &grid, &words, file, |_| ());
        let said = result.unwrap_err().to_string();
        assert!(says_not_finite(&said), "{said}");
        // The file names the test and has no score.
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 1);
    }
    // A single logit is enough, also while an answer is generated.
    let mut model = random_model(64);
    let table = model.params().find("model.embeddings.weight").unwrap();
    let tensor = model.params().value(table).clone();
    let mut rows = tensor.to_f32().unwrap();
    let first = ModelReader::new(named(&model), Pruning::Off).read(&[5, 9], &[], 1).unwrap();
    let said = first.greedy[0] as usize;
    rows[said * 32..(said + 1) * 32].fill(f32::NAN);
    let poisoned = tensor.device().from_f32(&rows, tensor.shape()).unwrap();
    model.params_mut().set(table, poisoned).unwrap();
    let mut reader = ModelReader::new(named(&model), Pruning::Off);
    assert_eq!(reader.read(&[5, 9], &[vec![3]], 1).unwrap().greedy, first.greedy);
    let said = reader.read(&[5, 9], &[vec![3]], 2).unwrap_err().to_string();
    assert!(says_not_finite(&said), "{said}");
}
