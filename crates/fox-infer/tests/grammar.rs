//! Answers of a random model that must match a schema, an expression, a choice or a grammar.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::time::{Duration, Instant};

use common::{prompt, read, reference};
use fox_data::Tokenizer;
use fox_infer::{
    Engine, EngineOptions, FinishReason, Grammar, GrammarCompiler, GrammarError, GrammarSpec,
    Request, Sampling,
};
use fox_model::{Model, ModelConfig};
use serde_json::{Value, json};

const END: i32 = 255;

fn model() -> Model {
    let config = ModelConfig::fox_pro(32, 2, 2).with_vocab(260);
    Model::init(&config, 7, &fox_cpu::device()).unwrap()
}

fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(&Tokenizer::from_name("bytes").unwrap(), 260).unwrap()
}

fn compile(spec: &GrammarSpec) -> Grammar {
    compiler().compile(spec).unwrap()
}

fn request(grammar: &Grammar, seed: u64) -> Request {
    Request {
        sampling: Sampling { seed, ..Sampling::default() },
        stop_ids: vec![END],
        grammar: Some(grammar.clone()),
        ..Request::greedy(prompt(seed as usize, 9), 600)
    }
}

/// The text of an answer, which must have ended by itself.
fn text(engine: &Engine, request: Request) -> String {
    let (_, tokens, finished) = read(engine.submit(request).unwrap());
    let bytes: Vec<u8> = tokens.iter().map(|token| u8::try_from(token.id).unwrap()).collect();
    let text = String::from_utf8(bytes).expect("characters are complete");
    assert_eq!(finished.reason, FinishReason::Stop, "{text}");
    text
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 8 },
            "age": { "type": "integer", "minimum": 0, "maximum": 130 },
            "mood": { "enum": ["glad", "sad", null] },
            "tags": { "type": "array", "items": { "$ref": "#/$defs/tag" }, "maxItems": 3 },
        },
        "required": ["name", "age", "mood", "tags"],
        "additionalProperties": false,
        "$defs": { "tag": { "type": "string", "pattern": "^[a-z]{2,4}$" } },
    })
}

fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let object = value.as_object().unwrap();
    assert_eq!(object.len(), 4, "{text}");
    assert!(object["name"].as_str().unwrap().chars().count() <= 8, "{text}");
    assert!(object["age"].as_i64().is_some_and(|age| (0..=130).contains(&age)), "{text}");
    assert!([json!("glad"), json!("sad"), Value::Null].contains(&object["mood"]), "{text}");
    let tags = object["tags"].as_array().unwrap();
    let is_tag = |tag: &Value| {
        let tag = tag.as_str().unwrap();
        (2..=4).contains(&tag.len()) && tag.bytes().all(|byte| byte.is_ascii_lowercase())
    };
    assert!(tags.len() <= 3 && tags.iter().all(is_tag), "{text}");
}

#[test]
fn every_sample_is_valid_against_its_schema() {
    let engine = Engine::start(model(), EngineOptions::default()).unwrap();
    let grammar = compile(&GrammarSpec::JsonSchema(schema()));
    let answers: Vec<_> =
        (0..100).map(|seed| engine.submit(request(&grammar, seed)).unwrap()).collect();
    let mut texts = Vec::new();
    for answer in answers {
        let (_, tokens, finished) = read(answer);
        let bytes = tokens.iter().map(|token| u8::try_from(token.id).unwrap()).collect();
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(finished.reason, FinishReason::Stop, "{text}");
        assert_valid(&text);
        texts.push(text);
    }
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 100, "different seeds give different texts");
    // Greedy, filtered and penalized sampling see the same mask.
    for sampling in [
        Sampling::greedy(),
        Sampling { top_k: 1, ..Sampling::default() },
        Sampling { top_p: 0.3, repetition_penalty: 1.3, ..Sampling::default() },
    ] {
        assert_valid(&text(&engine, Request { sampling, ..request(&grammar, 3) }));
    }
}

#[test]
fn expressions_choices_and_grammars_match() {
    let engine = Engine::start(model(), EngineOptions::default()).unwrap();
    let lark = "start: term (\" + \" term){0,3}\nterm: /[0-9]{1,3}/ | \"(\" term \")\"";
    for seed in 0..20 {
        let regex = compile(&GrammarSpec::Regex("(é|[a-c]{3})-[0-9]{2}/x?".into()));
        let answer = text(&engine, request(&regex, seed));
        let (head, tail) = answer.split_once('-').unwrap();
        assert!(head == "é" || (head.len() == 3 && head.bytes().all(|b| b"abc".contains(&b))));
        assert!(tail[..2].parse::<u32>().is_ok() && ["/", "/x"].contains(&&tail[2..]), "{tail}");
        let choices = ["yes".to_string(), "no \"never\"".into(), "né\n".into()];
        let choice = compile(&GrammarSpec::Choice(choices.to_vec()));
        assert!(choices.contains(&text(&engine, request(&choice, seed))));
        let sum = text(&engine, request(&compile(&GrammarSpec::Lark(lark.into())), seed));
        for term in sum.split(" + ") {
            let digits = term.trim_matches(['(', ')']);
            assert!(digits.parse::<u32>().is_ok(), "{sum}");
        }
    }
    let object = text(&engine, request(&compile(&GrammarSpec::Regex("a{3}".into())), 1));
    assert_eq!(object, "aaa", "ends without a stop id where nothing may follow");
}

#[test]
fn stop_ids_end_complete_texts_only() {
    let engine = Engine::start(model(), EngineOptions::default()).unwrap();
    let grammar = compile(&GrammarSpec::Regex("(ab)*".into()));
    for seed in 0..30 {
        let answer = text(&engine, request(&grammar, seed));
        assert_eq!(answer.replace("ab", ""), "");
    }
    // Without stop ids, and with a minimal length, the text goes on.
    let endless = Request { stop_ids: Vec::new(), max_tokens: 50, ..request(&grammar, 1) };
    assert_eq!(read(engine.submit(endless).unwrap()).2.reason, FinishReason::Length);
    let long = Request { min_tokens: 41, ..request(&grammar, 1) };
    assert!(text(&engine, long).len() > 41);
    let short =
        Request { min_tokens: 41, ..request(&compile(&GrammarSpec::Regex("ab?".into())), 1) };
    assert_eq!(text(&engine, short), "ab");
}

#[test]
fn logprobs_are_those_of_the_model() {
    let engine = Engine::start(model(), EngineOptions::default()).unwrap();
    let grammar = compile(&GrammarSpec::JsonSchema(schema()));
    let constrained = Request { top_logprobs: 2, ..request(&grammar, 5) };
    let mut ids = constrained.prompt.clone();
    let first = ids.len();
    let (_, tokens, _) = read(engine.submit(constrained).unwrap());
    ids.extend(tokens.iter().map(|token| token.id));
    let expected = reference(&model(), &ids);
    for (token, expected) in tokens.iter().zip(&expected[first - 1..]) {
        assert!((f64::from(token.logprob) - expected).abs() < 1e-4);
        assert_eq!(token.top.len(), 2);
    }
}

/// Each is refused, or compiles and generates, within a second or so of an optimized build.
#[test]
fn hostile_grammars_are_refused_or_bounded() {
    let engine = Engine::start(model(), EngineOptions::default()).unwrap();
    let compiler = compiler();
    let nested = |count: usize| (0..count).fold(json!({}), |inner, _| json!({ "items": inner }));
    let any_of: Vec<Value> = (0..12)
        .map(|i| json!({ "anyOf": [{ "minLength": i }, { "pattern": format!("a{i}") }] }))
        .collect();
    let many: serde_json::Map<String, Value> =
        (0..1500).map(|i| (format!("p{i}"), json!({ "type": "string" }))).collect();
    let words: Vec<String> = (0..5000).map(|i| format!("word{}", i * 7919 % 10_007)).collect();
    for (name, spec) in [
        ("deep", GrammarSpec::JsonSchema(nested(200))),
        ("deep regex", GrammarSpec::Regex("(".repeat(5000) + &")".repeat(5000))),
        ("product", GrammarSpec::JsonSchema(json!({ "allOf": any_of }))),
        ("properties", GrammarSpec::JsonSchema(json!({ "properties": many }))),
        ("self reference", GrammarSpec::JsonSchema(json!({ "$ref": "#" }))),
        ("no target", GrammarSpec::JsonSchema(json!({ "$ref": "#/$defs/none" }))),
        ("other site", GrammarSpec::JsonSchema(json!({ "$ref": "http://127.0.0.1:9/x" }))),
        ("long", GrammarSpec::JsonSchema(json!({ "type": "string", "minLength": 1_000_000_000 }))),
        ("items", GrammarSpec::JsonSchema(json!({ "items": {}, "minItems": 1_000_000_000 }))),
        ("nested counts", GrammarSpec::Regex("((a{1000}){1000}){1000}".into())),
        ("ambiguous", GrammarSpec::Regex("(a|a)*(a?){500}b".into())),
        ("states", GrammarSpec::Regex("(.*a.{20})|(.*b.{21})|(.*c.{22})".into())),
        ("choices", GrammarSpec::Choice(words)),
        ("none", GrammarSpec::Choice(Vec::new())),
        ("left recursion", GrammarSpec::Lark("start: start start | \"a\"".into())),
        ("no start", GrammarSpec::Lark("begin: \"a\"".into())),
        ("no text", GrammarSpec::Regex("[^\\x00-\\x{10ffff}]".into())),
        ("bad regex", GrammarSpec::Regex("(".into())),
        ("type", GrammarSpec::JsonSchema(json!({ "type": "fox" }))),
        ("list", GrammarSpec::JsonSchema(json!([1]))),
        ("false", GrammarSpec::JsonSchema(json!(false))),
        ("huge", GrammarSpec::Regex("a".repeat(100_000))),
    ] {
        let start = Instant::now();
        match compiler.compile(&spec) {
            Err(error) => {
                let words = error.to_string();
                assert!(!words.contains('\n') && words.len() < 400, "{name}: {words}");
                eprintln!("{name}: {words} ({:?})", start.elapsed());
            }
            Ok(grammar) => {
                let compiled = start.elapsed();
                let request = Request { max_tokens: 40, ..request(&grammar, 1) };
                let (_, tokens, finished) = read(engine.submit(request).unwrap());
                let total = start.elapsed();
                eprintln!(
                    "{name}: {compiled:?}, {total:?}, {} {:?}",
                    tokens.len(),
                    finished.reason
                );
                assert!(!matches!(finished.reason, FinishReason::Failed(_)), "{name}");
            }
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{name}: {:?}", start.elapsed());
    }
    let words = Tokenizer::from_name("synthetic").unwrap();
    assert!(matches!(GrammarCompiler::new(&words, 90), Err(GrammarError::Tokenizer(_))));
}

#[test]
fn byte_level_bpe_tokens_match() {
    let tokenizer = Tokenizer::from_name("gpt2").unwrap();
    let config = ModelConfig::fox_pro(32, 1, 2).with_vocab(tokenizer.vocab_size() + 47);
    let model = Model::init(&config, 7, &fox_cpu::device()).unwrap();
    let compiler = GrammarCompiler::new(&tokenizer, config.vocab_size).unwrap();
    let grammar = compiler.compile(&GrammarSpec::JsonSchema(schema())).unwrap();
    let engine = Engine::start(model, EngineOptions::default()).unwrap();
    for seed in 0..10 {
        let request = Request { stop_ids: vec![50_256], ..request(&grammar, seed) };
        let (_, tokens, finished) = read(engine.submit(request).unwrap());
        assert_eq!(finished.reason, FinishReason::Stop);
        let ids: Vec<u32> =
            tokens.iter().map(|token| token.id as u32).filter(|&id| id != 50_256).collect();
        assert_valid(&tokenizer.decode(&ids).unwrap());
    }
}
