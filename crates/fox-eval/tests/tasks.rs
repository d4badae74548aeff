//! Tasks on whole models, against what their plain forward pass says.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::path::PathBuf;

use fox_data::{Record, Tokenizer};
use fox_eval::Subject;
use fox_eval::tasks::{
    Ending, Metric, Request, TaskOptions, TaskSpec, find, find_data, greedy, log_likelihoods,
    read_rows, result_on_file, run_task,
};
use fox_model::{ForwardOptions, Model, ModelConfig};
use fox_tensor::{Segments, Tape};
use serde_json::json;

fn model(vocab: usize) -> Model {
    let mut config = ModelConfig::fox_pro(32, 2, 2);
    config.vocab_size = vocab;
    config.mlp.intermediate_size = Some(48);
    Model::init(&config, 5, &fox_cpu::device()).unwrap()
}

fn dump(name: &str) -> Model {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
    Model::from_checkpoint(&path, &fox_cpu::device()).unwrap()
}

fn subject(model: &Model) -> Subject<'_> {
    Subject { name: "tiny", model, training_length: Some(256) }
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

#[test]
fn likelihoods_are_those_of_the_plain_forward_pass() {
    let models = ["fox_pro", "fox_llama", "transformer_pro", "delta_net", "hgrn2", "mamba2"];
    for (name, model) in models.map(|name| (name, dump(name))) {
        let mut requests = requests();
        // One continuation that greedy decoding says.
        let ending = Ending { max_tokens: 4, ..Ending::default() };
        let options = ForwardOptions::default();
        let context = requests[0].context.clone();
        let continuation = greedy(&model, &context, &ending, &options, |_| Ok(false)).unwrap();
        requests.push(Request { context, continuation });
        let mut told = 0;
        let found = log_likelihoods(&model, &requests, &options, |done| told = done).unwrap();
        assert_eq!((found.len(), told), (requests.len(), requests.len()));
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
    // Windows of 8 tokens judge the same tokens with less context.
    let (short, _) = run(8);
    assert!(short.figure(Metric::BitsPerByte).unwrap().value != value(Metric::BitsPerByte));
}

#[test]
fn answers_are_generated_cut_and_judged() {
    let (model, tokenizer) = (model(256), Tokenizer::from_name("bytes").unwrap());
    let spec = |extra: &str| {
        let text = format!(
            "metrics = ['exact_match', 'f1']\n[generate]\ncontext = '{{q}}'\nanswers = '{{a}}'\nmax_tokens = 6\n{extra}"
        );
        TaskSpec::parse(&text, "t").unwrap()
    };
    let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let ending = Ending { max_tokens: 6, ids: vec![255], min_tokens: 0 };
    let options = ForwardOptions::default();
    let said = greedy(&model, &ids("Why?"), &ending, &options, |_| Ok(false)).unwrap();
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
    let samples = std::fs::read_to_string(folder.path().join("tiny.piqa.samples.jsonl")).unwrap();
    assert_eq!(samples.lines().count(), 2);
}

#[test]
fn data_are_found_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let spec = find("piqa", None).unwrap();
    let said = find_data(&spec, Some(folder.path())).unwrap_err().to_string();
    assert!(said.contains("piqa.jsonl") && said.contains("piqa.parquet"), "{said}");
    assert!(find_data(&spec, None).unwrap_err().to_string().contains("--task-data"));
    let path = folder.path().join("piqa.jsonl");
    std::fs::write(&path, "{\"goal\": \"g\"}\n{\"goal\": \"h\"}\n").unwrap();
    assert_eq!(find_data(&spec, Some(folder.path())).unwrap(), path);
    assert_eq!(read_rows(&path, Some(1)).unwrap().len(), 1);
    assert_eq!(read_rows(&path, None).unwrap()[1]["goal"], "h");
    std::fs::write(&path, "\n").unwrap();
    assert!(read_rows(&path, None).unwrap_err().to_string().ends_with("is empty"));
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
}
