//! Tasks on whole models, against what their plain forward pass says.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod common;

use std::path::Path;

use common::{broken, dump, says_not_finite, subject};
use fox_data::{Record, Tokenizer};
use fox_eval::tasks::{
    Ending, Metric, Request, TaskOptions, TaskSpec, find, find_data, greedy, log_likelihoods,
    read_rows, result_on_file, run_task, with_shots,
};
use fox_model::{ForwardOptions, Model, ModelConfig, Pruning};
use fox_tensor::{Device, Segments, Tape};
use serde_json::json;

fn model(vocab: usize) -> Model {
    let config = ModelConfig::fox_pro(32, 2, 2).with_vocab(vocab).with_mlp_width(48);
    Model::init(&config, 5, &fox_cpu::device()).unwrap()
}

/// Log-probabilities after every token, from one plain forward pass.
fn log_probs(model: &Model, ids: &[u32]) -> Vec<Vec<f64>> {
    let inputs: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let device = model.device();
    let inputs = device.from_i32(&inputs, [ids.len()]).unwrap();
    let mut tape = Tape::inference(device);
    let (segments, options) = (Segments::uniform(1, ids.len()), ForwardOptions::default());
    let hidden = model.forward(&mut tape, &inputs, &segments, None, &options).unwrap();
    let logits = model.logits(&mut tape, &hidden.states).unwrap().value().to_f64().unwrap();
    let normalised = |row: &[f64]| {
        let norm = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        row.iter().map(|x| x - norm).collect()
    };
    logits.chunks(model.config().vocab_size).map(normalised).collect()
}

fn argmax(values: &[f64]) -> u32 {
    let best = (0..values.len()).max_by(|a, b| values[*a].total_cmp(&values[*b])).unwrap();
    best as u32
}

/// Contexts of many lengths, some shared by several continuations, in no order.
fn requests() -> Vec<Request> {
    let ids = |start: u32, len: u32| (0..len).map(|i| (start * 7 + i * i * 3 + i) % 60).collect();
    let mut requests = Vec::new();
    for (context, len) in [(1, 5), (2, 70), (3, 1), (4, 17), (5, 70)] {
        for choice in 0..context % 4 + 1 {
            let continuation = ids(20 + choice, 1 + (choice * 5 + context) % 7);
            requests.push(Request { context: ids(context, len), continuation });
        }
    }
    requests.swap(1, 8);
    requests
}

/// The greedy answer to one prompt.
fn answer(model: &Model, prompt: &[u32], ending: &Ending) -> Vec<u32> {
    let mut decoder = model.token_decoder(ForwardOptions::default());
    let prompts = [prompt.to_vec()];
    greedy(&subject(model), &mut decoder, &prompts, ending, |_| Ok(false)).unwrap().remove(0)
}

/// The oracle decodes attention in slots; other mixers decode op by op.
#[test]
fn greedy_in_slots_equals_op_by_op() {
    for name in ["fox_pro", "fox_llama", "transformer_pro", "mamba2"] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        let model = Model::from_checkpoint(&root.join(name), &Device::naive()).unwrap();
        let prompt =
            |n: usize| (0..[3, 61, 64, 30][n % 4]).map(|i| ((i * i + 7 * n) % 64) as u32).collect();
        let prompts: Vec<Vec<u32>> = (0..10).map(prompt).collect();
        let ending = Ending { max_tokens: 20, ids: vec![5], min_tokens: 2 };
        let enough = |said: &[u32]| Ok(said.len() == 12 && said[0].is_multiple_of(2));
        let mut decoder = model.token_decoder(ForwardOptions::default());
        assert_eq!(decoder.reserve(84).unwrap(), if name == "mamba2" { 1 } else { 8 });
        let got = greedy(&subject(&model), &mut decoder, &prompts, &ending, enough).unwrap();
        for (prompt, got) in prompts.iter().zip(got) {
            let mut cache = model.new_cache(1, 84).unwrap();
            let (mut want, mut new) =
                (Vec::<u32>::new(), prompt.iter().map(|id| *id as i32).collect());
            while want.len() < 20 && !(want.len() == 12 && want[0] % 2 == 0) {
                let step: &Vec<i32> = &new;
                let logits = model.decode(&[step], &mut cache, &ForwardOptions::default()).unwrap();
                let mut logits = logits.to_f64().unwrap();
                if want.len() < 2 {
                    logits[5] = f64::NEG_INFINITY;
                }
                let best = argmax(&logits);
                if best == 5 {
                    break;
                }
                want.push(best);
                new = vec![best as i32];
            }
            assert_eq!(got, want, "{name}, {} tokens", prompt.len());
        }
    }
}

#[test]
fn likelihoods_are_those_of_the_plain_forward_pass() {
    let models = ["fox_pro", "fox_llama", "transformer_pro", "delta_net", "hgrn2", "mamba2"];
    for (name, model) in models.map(|name| (name, dump(name))) {
        let mut requests = requests();
        // One continuation that greedy decoding says.
        let ending = Ending { max_tokens: 4, ..Ending::default() };
        let options = ForwardOptions::default();
        let context = requests[0].context.clone();
        let continuation = answer(&model, &context, &ending);
        // Two that it would only begin or only end so, one that stops in the middle of it.
        let mut begun = continuation.clone();
        begun[3] = (begun[3] + 1) % 64;
        requests.push(Request { context: context.clone(), continuation: begun });
        let ended = [&[(continuation[0] + 1) % 64], &continuation[1..]].concat();
        requests.push(Request { context: context.clone(), continuation: ended });
        let part = continuation[..2].to_vec();
        requests.push(Request { context: context.clone(), continuation: part });
        requests.push(Request { context, continuation });
        let mut reported = 0;
        let found =
            log_likelihoods(&subject(&model), &requests, &options, |done| reported = done).unwrap();
        assert_eq!((found.len(), reported), (requests.len(), requests.len()));
        assert!(found.last().unwrap().is_greedy, "{name}");
        for (request, found) in requests.iter().zip(&found) {
            let ids = [&request.context[..], &request.continuation].concat();
            let after = &log_probs(&model, &ids)[request.context.len() - 1..];
            let expected: f64 =
                request.continuation.iter().zip(after).map(|(id, row)| row[*id as usize]).sum();
            let error = (found.log_prob - expected).abs();
            assert!(error < 2e-5, "{name}: {} {expected}", found.log_prob);
            let said = request.continuation.iter().zip(after).all(|(id, row)| argmax(row) == *id);
            assert_eq!(found.is_greedy, said, "{name}");
        }
    }
}

fn rows(list: serde_json::Value) -> Vec<Record> {
    list.as_array().unwrap().iter().map(|row| row.as_object().unwrap().clone()).collect()
}

fn questions() -> Vec<Record> {
    rows(json!([
        {"goal": "boil water", "sol1": "use a kettle", "sol2": "use a sieve", "label": 0},
        {"goal": "cut paper", "sol1": "use a spoon", "sol2": "use scissors", "label": 1},
        {"goal": "dry hair", "sol1": "use water", "sol2": "use a towel", "label": 1},
    ]))
}

#[test]
fn figures_follow_from_the_likelihoods() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let (spec, options) = (find("piqa", None).unwrap(), TaskOptions::default());
    let (result, samples) =
        run_task(&subject(&model), &tokenizer, &spec, &questions(), &options, |_| ()).unwrap();
    let (mut right, mut right_norm) = (0.0, 0.0);
    for (row, sample) in questions().iter().zip(&samples) {
        let text = |name: &str| row[name].as_str().unwrap().to_string();
        let context = format!("Question: {}\nAnswer:", text("goal"));
        let choices = [text("sol1"), text("sol2")];
        let mut sums = Vec::new();
        for (i, choice) in choices.iter().enumerate() {
            let ids: Vec<u32> = format!("{context} {choice}").bytes().map(u32::from).collect();
            let after = log_probs(&model, &ids);
            let sum: f64 = (context.len()..ids.len()).map(|t| after[t - 1][ids[t] as usize]).sum();
            assert!((sample["log_probs"][i].as_f64().unwrap() - sum).abs() < 2e-5);
            sums.push(sum);
        }
        let label = row["label"].as_u64().unwrap() as u32;
        let norm = [sums[0] / choices[0].len() as f64, sums[1] / choices[1].len() as f64];
        right += f64::from(u8::from(argmax(&sums) == label)) / 3.0;
        right_norm += f64::from(u8::from(argmax(&norm) == label)) / 3.0;
    }
    assert!((result.figure(Metric::Acc).unwrap().value - right).abs() < 1e-12);
    assert!((result.figure(Metric::AccNorm).unwrap().value - right_norm).abs() < 1e-12);
    assert!(result.figures.iter().all(|f| f.items == 3 && f.stderr.is_some()));
}

#[test]
fn progress_ends_at_one() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let (spec, options) = (find("piqa", None).unwrap(), TaskOptions::default());
    let mut seen = Vec::new();
    run_task(&subject(&model), &tokenizer, &spec, &questions(), &options, |x| seen.push(x))
        .unwrap();
    assert!(seen.is_sorted() && seen[0] > 0.0 && seen.last() == Some(&1.0), "{seen:?}");
}

#[test]
fn pruning_reaches_the_model() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let spec = find("piqa", None).unwrap();
    // The model rejects a tolerance above 1 = e^0.
    let options = TaskOptions { pruning: Pruning::Tolerance(1.0), ..TaskOptions::default() };
    let result = run_task(&subject(&model), &tokenizer, &spec, &questions(), &options, |_| ());
    let error = result.unwrap_err().to_string();
    assert!(error.contains("log_tolerance is 1, but must be at most 0"), "{error}");
}

#[test]
fn whole_texts_are_judged_in_windows() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let spec = find("wikitext", None).unwrap();
    let data =
        rows(json!([{"page": "a short text"}, {"page": "and a longer one , of many words"}]));
    let run = |length| {
        let options = TaskOptions { max_length: Some(length), ..TaskOptions::default() };
        run_task(&subject(&model), &tokenizer, &spec, &data, &options, |_| ()).unwrap()
    };
    let (result, samples) = run(100);
    let mut total = 0.0;
    for (text, sample) in ["a short text", "and a longer one, of many words"].iter().zip(&samples) {
        let ids: Vec<u32> = std::iter::once(255).chain(text.bytes().map(u32::from)).collect();
        let after = log_probs(&model, &ids);
        let sum: f64 = (1..ids.len()).map(|t| after[t - 1][ids[t] as usize]).sum();
        assert!((sample["log_prob"].as_f64().unwrap() - sum).abs() < 2e-5);
        total += sum;
    }
    let value = |metric| result.figure(metric).unwrap().value;
    // 3 + 8 words and 12 + 32 bytes before the comma was moved.
    assert!(
        (value(Metric::WordPerplexity) - (-total / 11.0).exp()).abs()
            < 1e-3 * (-total / 11.0).exp()
    );
    assert!((value(Metric::BytePerplexity) - (-total / 44.0).exp()).abs() < 1e-3);
    assert!((value(Metric::BitsPerByte) + total / 44.0 / 2f64.ln()).abs() < 1e-5);
}

/// Greek letters have two bytes, emoji four: the same text has other lengths in bytes, characters and words.
#[test]
fn lengths_are_bytes_of_utf8() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let spec = find("wikitext", None).unwrap();
    let data = rows(json!([{"page": "η αλεπού τρέχει"}, {"page": "🦊🦊 fox"}]));
    let (result, samples) =
        run_task(&subject(&model), &tokenizer, &spec, &data, &TaskOptions::default(), |_| ())
            .unwrap();
    let total: f64 = samples.iter().map(|s| s["log_prob"].as_f64().unwrap()).sum();
    let (bytes, words) = ((2.0 * 13.0 + 2.0) + (8.0 + 4.0), 5.0);
    let value = |metric| result.figure(metric).unwrap().value;
    let close = |found: f64, expected: f64| (found / expected - 1.0).abs() < 1e-12;
    assert!(close(value(Metric::BitsPerByte), -total / bytes / 2f64.ln()));
    assert!(close(value(Metric::BytePerplexity), (-total / bytes).exp()));
    assert!(close(value(Metric::WordPerplexity), (-total / words).exp()));
    // The tokens of this tokenizer are bytes, so a model that knows nothing needs 8 bits for each.
    assert!((value(Metric::BitsPerByte) - 8.0).abs() < 0.2, "{}", value(Metric::BitsPerByte));

    // With other tokens than bytes the divisor stays.
    let (model, tokenizer) = (self::model(50257), Tokenizer::from_name("gpt2").unwrap());
    let (result, samples) =
        run_task(&subject(&model), &tokenizer, &spec, &data, &TaskOptions::default(), |_| ())
            .unwrap();
    let total: f64 = samples.iter().map(|s| s["log_prob"].as_f64().unwrap()).sum();
    let found = result.figure(Metric::BitsPerByte).unwrap().value;
    assert!(close(found, -total / bytes / 2f64.ln()), "{found}");
}

/// Choices in ASCII, in Greek and in emoji: sums of log-probabilities prefer the fewest bytes; divided by
/// characters, the choice with the fewest bytes per character; divided by bytes, neither.
#[test]
fn choices_are_normalised_by_characters_or_by_bytes() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let text = "metrics = ['acc', 'acc_norm', 'acc_bytes']\n[multiple_choice]\ncontext = '{{ q }}'\n\
                continuation = ['{{ a }}', '{{ b }}', '{{ c }}']\nanswer = '{{ right }}'\n";
    let spec = TaskSpec::parse(text, "t").unwrap();
    // One label: over all of them every metric is the same.
    let data = rows(json!([
        {"q": "why", "a": "because of it", "b": "αλεπού", "c": "🦊", "right": 0},
        {"q": "what", "a": "a long and winding answer", "b": "ναι", "c": "🐻🐻🐻", "right": 0},
        {"q": "who", "a": "she", "b": "η αλεπού", "c": "🦊🐻", "right": 0},
        {"q": "where", "a": "in a hole in the ground", "b": "εκεί", "c": "🕳", "right": 0},
    ]));
    let (result, samples) =
        run_task(&subject(&model), &tokenizer, &spec, &data, &TaskOptions::default(), |_| ())
            .unwrap();
    let mut right = [0.0; 3];
    for (row, sample) in data.iter().zip(&samples) {
        let (mut sums, mut characters, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
            let (sum, text) =
                (sample["log_probs"][i].as_f64().unwrap(), row[name].as_str().unwrap());
            sums.push(sum);
            characters.push(sum / text.chars().count() as f64);
            bytes.push(sum / text.len() as f64);
        }
        let label = row["right"].as_u64().unwrap() as u32;
        for (right, values) in right.iter_mut().zip([&sums, &characters, &bytes]) {
            *right += f64::from(u8::from(argmax(values) == label)) / data.len() as f64;
        }
        assert_eq!(argmax(&characters), 0, "{characters:?}");
    }
    // What the choices were made for.
    assert!(right[0] < right[1] && right[2] < right[1], "{right:?}");
    for (metric, right) in [Metric::Acc, Metric::AccNorm, Metric::AccBytes].into_iter().zip(right) {
        let found = result.figure(metric).unwrap().value;
        assert!((found - right).abs() < 1e-12, "{metric:?}: {found} {right}");
    }
}

/// Windows of 8 tokens: every token once, after as many tokens as fit, none of them from another text.
#[test]
fn windows_cover_a_text_once() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let spec = find("wikitext", None).unwrap();
    let texts = ["one two three four five", "another text of some length"];
    let data = rows(json!([{"page": texts[0]}, {"page": texts[1]}]));
    let options = TaskOptions { max_length: Some(8), ..TaskOptions::default() };
    let (result, samples) =
        run_task(&subject(&model), &tokenizer, &spec, &data, &options, |_| ()).unwrap();
    for (text, sample) in texts.iter().zip(&samples) {
        let ids: Vec<u32> = std::iter::once(255).chain(text.bytes().map(u32::from)).collect();
        let (mut sum, mut judged) = (0.0, 1);
        while judged < ids.len() {
            let end = ids.len().min(judged + 8);
            // What is read ends one before the last token that is judged, and has 8 tokens but at the start.
            let read = end.saturating_sub(9)..end - 1;
            let after = log_probs(&model, &ids[read.clone()]);
            sum += (judged..end).map(|t| after[t - 1 - read.start][ids[t] as usize]).sum::<f64>();
            judged = end;
        }
        let found = sample["log_prob"].as_f64().unwrap();
        assert!((found - sum).abs() < 5e-5, "{text}: {found} {sum}");
    }
    assert_eq!(result.figure(Metric::BitsPerByte).unwrap().items, 2);
}

/// A task of each kind.
fn kinds() -> Vec<(TaskSpec, Vec<Record>)> {
    let generate = "metrics = ['exact_match']\n[generate]\ncontext = '{{ q }}'\nanswers = '{{ a }}'\nmax_tokens = 3";
    vec![
        (find("piqa", None).unwrap(), questions()),
        (find("lambada_openai", None).unwrap(), rows(json!([{"text": "the last word"}]))),
        (find("wikitext", None).unwrap(), rows(json!([{"page": "a text"}]))),
        (TaskSpec::parse(generate, "said").unwrap(), rows(json!([{"q": "Why?", "a": ["x"]}]))),
    ]
}

#[test]
fn rejects_model_with_nan_logits() {
    let tokenizer = Tokenizer::from_name("bytes").unwrap();
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let model = broken(model(256), value);
        for (spec, rows) in kinds() {
            let folder = tempfile::tempdir().unwrap();
            let options = TaskOptions::default();
            let subject = subject(&model);
            let result =
                result_on_file(folder.path(), &subject, &tokenizer, &spec, &rows, &options, |_| ());
            let said = result.unwrap_err().to_string();
            assert!(says_not_finite(&said), "{}: {said}", spec.name);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{}", spec.name);
        }
    }
}

/// The choice whose likelihood is not a number would otherwise lose, and another would be right.
#[test]
fn rejects_a_single_nan_logit() {
    let mut model = model(256);
    let head = model.params().find("lm_head.weight").unwrap();
    let tensor = model.params().value(head).clone();
    for value in [f32::NAN, f32::NEG_INFINITY] {
        let mut rows = tensor.to_f32().unwrap();
        // No text has this byte.
        rows[192 * 32] = value;
        let poisoned = tensor.device().from_f32(&rows, tensor.shape()).unwrap();
        model.params_mut().set(head, poisoned).unwrap();
        let tokenizer = Tokenizer::from_name("bytes").unwrap();
        for (spec, rows) in kinds() {
            let options = TaskOptions::default();
            let result = run_task(&subject(&model), &tokenizer, &spec, &rows, &options, |_| ());
            let said = result.unwrap_err().to_string();
            assert!(says_not_finite(&said) && said.contains("token 192"), "{}: {said}", spec.name);
        }
    }
}

#[test]
fn answers_are_generated_cut_and_judged() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let spec = |extra: &str| {
        let text = format!(
            "metrics = ['exact_match', 'f1']\n[generate]\ncontext = '{{{{ q }}}}'\nanswers = '{{{{ a }}}}'\nmax_tokens = 6\n{extra}"
        );
        TaskSpec::parse(&text, "t").unwrap()
    };
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let ending = Ending { max_tokens: 6, ids: vec![255], min_tokens: 0 };
    let said = answer(&model, &ids("Why?"), &ending);
    // The same as the argmax of plain forward passes.
    let mut all = ids("Why?");
    for id in &said {
        assert_eq!(argmax(log_probs(&model, &all).last().unwrap()), *id);
        all.push(*id);
    }
    let text = tokenizer.decode(&said).unwrap();
    let data = rows(json!([{"q": "Why?", "a": ["no", text]}, {"q": "Why?", "a": ["no"]}]));
    let run = |spec: &TaskSpec| {
        let options = TaskOptions::default();
        run_task(&subject(&model), &tokenizer, spec, &data, &options, |_| ()).unwrap()
    };
    let (result, samples) = run(&spec(""));
    assert_eq!(samples[0]["said"], text.as_str());
    assert_eq!(result.figure(Metric::ExactMatch).unwrap().value, 0.5);
    let mut characters = text.chars();
    let stop = characters.nth(1).unwrap();
    let stop = serde_json::to_string(&[stop.to_string()]).unwrap();
    let (_, samples) = run(&spec(&format!("stop = {stop}")));
    assert!(text.starts_with(samples[0]["said"].as_str().unwrap()));
    assert!(samples[0]["said"].as_str().unwrap().chars().count() <= 1);
}

#[test]
fn results_are_taken_from_the_folder() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let folder = tempfile::tempdir().unwrap();
    let spec = find("piqa", None).unwrap();
    let run = |rows: &[Record], bos: bool| {
        let options = TaskOptions { bos, ..TaskOptions::default() };
        let mut asked = false;
        let subject = subject(&model);
        let ask = |_| asked = true;
        let result =
            result_on_file(folder.path(), &subject, &tokenizer, &spec, rows, &options, ask);
        (result.unwrap(), asked)
    };
    let (first, asked) = run(&questions(), false);
    assert!(asked);
    assert_eq!(run(&questions(), false), (first, false));
    // Other rows or options are another question.
    assert!(run(&questions()[..2], false).1);
    assert!(run(&questions()[..2], true).1);
    assert!(!run(&questions()[..2], true).1);
    let samples = std::fs::read_to_string(folder.path().join("tiny.piqa.samples.jsonl")).unwrap();
    assert_eq!(samples.lines().count(), 2);
}

#[test]
fn data_are_found_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let spec = find("piqa", None).unwrap();
    let said = find_data(&spec, Some(folder.path())).unwrap_err().to_string();
    assert!(said.contains("piqa.jsonl") && said.contains("piqa.parquet"), "{said}");
    assert_eq!(find_data(&spec, None).unwrap_err().setting(), Some(fox_base::Setting::TaskData));
    let path = folder.path().join("piqa.jsonl");
    std::fs::write(&path, "{\"goal\": \"g\"}\n{\"goal\": \"h\"}\n").unwrap();
    assert_eq!(find_data(&spec, Some(folder.path())).unwrap(), path);
    assert_eq!(read_rows(&path, Some(1)).unwrap().len(), 1);
    assert_eq!(read_rows(&path, None).unwrap()[1]["goal"], "h");
    std::fs::write(&path, "\n").unwrap();
    assert!(read_rows(&path, None).unwrap_err().to_string().ends_with("is empty"));
}

/// Examples come from the training part where there is one, and are never asked.
#[test]
fn examples_are_found_and_not_asked() {
    let folder = tempfile::tempdir().unwrap();
    let line = |goal: &str| {
        format!("{{\"goal\": \"{goal}\", \"sol1\": \"a\", \"sol2\": \"b\", \"label\": 0}}\n")
    };
    let write = |name: &str, goals: &[&str]| {
        let text: String = goals.iter().map(|goal| line(goal)).collect();
        std::fs::write(folder.path().join(name), text).unwrap();
    };
    let load = |shots, limit| {
        with_shots(find("piqa", None).unwrap(), shots, Some(folder.path()), limit)
            .map_err(|error| error.to_string())
    };
    write("piqa.jsonl", &["one", "two", "three"]);
    let (spec, rows) = load(0, None).unwrap();
    assert_eq!((spec.name.as_str(), spec.examples.as_str(), rows.len()), ("piqa", "", 3));
    let (spec, rows) = load(2, None).unwrap();
    assert_eq!((spec.name.as_str(), rows.len()), ("piqa 2-shot", 1));
    assert_eq!(rows[0]["goal"], "three");
    assert_eq!(spec.examples, "Question: one\nAnswer: a\n\nQuestion: two\nAnswer: a\n\n");
    assert_eq!(load(1, Some(1)).unwrap().1[0]["goal"], "two");
    let said = load(3, None).unwrap_err();
    assert!(
        said.ends_with("piqa.jsonl has too few rows for 3 examples and a question; ask for fewer"),
        "{said}"
    );
    write("piqa.train.jsonl", &["four"]);
    let (spec, rows) = load(1, None).unwrap();
    assert_eq!((spec.examples.as_str(), rows.len()), ("Question: four\nAnswer: a\n\n", 3));
    let said = load(2, None).unwrap_err();
    assert!(
        said.ends_with("piqa.train.jsonl has too few rows for 2 examples; ask for fewer"),
        "{said}"
    );
}

#[test]
fn bad_input_gets_one_sentence() {
    let (small, tokenizer) = (model(64), Tokenizer::from_name("bytes").unwrap());
    let (spec, options) = (find("piqa", None).unwrap(), TaskOptions::default());
    let said = |model: &Model, rows: &[Record]| {
        let result = run_task(&subject(model), &tokenizer, &spec, rows, &options, |_| ());
        result.unwrap_err().to_string()
    };
    assert_eq!(
        said(&small, &questions()),
        "the model tiny has 64 token ids, but the tokenizer has 256; evaluate it with the tokenizer it was trained with"
    );
    let model = model(256);
    assert_eq!(said(&model, &[]), "the data of task piqa is empty");
    let mut data = questions();
    data[1].remove("sol2");
    let missing = said(&model, &data);
    assert!(missing.starts_with("row 2 of task piqa has no column \"sol2\""), "{missing}");
    data[1].insert("sol2".into(), "long ".repeat(60).into());
    let long = said(&model, &data);
    assert!(long.starts_with("row 2 of task piqa: a continuation of 301 tokens"), "{long}");
    for (spec, rows) in kinds() {
        let options = TaskOptions { max_length: Some(0), ..options };
        let result = run_task(&subject(&model), &tokenizer, &spec, &rows, &options, |_| ());
        let none = result.unwrap_err().to_string();
        assert!(none.contains("allow a length above 0"), "{}: {none}", spec.name);
    }
}
