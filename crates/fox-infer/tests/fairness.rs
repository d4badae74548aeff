//! Prefill order: short prompts before long ones, without starvation.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::sync::mpsc::channel;

use common::{fixture, prompt, read};
use fox_infer::{Engine, EngineOptions, Event, Request};

/// Numbers of the requests in the order in which their first tokens came.
fn order_of_first_tokens(engine: &Engine, requests: Vec<Request>) -> Vec<usize> {
    let (sender, events) = channel();
    let submit = |(i, request): (usize, Request)| {
        let sender = sender.clone();
        engine.submit_to(request, move |event| drop(sender.send((i, event)))).unwrap()
    };
    let tickets: Vec<_> = requests.into_iter().enumerate().map(submit).collect();
    let (mut order, mut ended) = (Vec::new(), 0);
    for (i, event) in events {
        match event {
            Event::Token(_) if !order.contains(&i) => order.push(i),
            Event::Finished(_) => ended += 1,
            _ => {}
        }
        if ended == tickets.len() {
            break;
        }
    }
    order
}

#[test]
fn short_prompt_passes_long_ones() {
    let options = EngineOptions { prefill_chunk: 16, ..EngineOptions::default() };
    let engine = Engine::start(fixture("fox_pro"), options).unwrap();
    let mut requests: Vec<Request> = (0..3).map(|i| Request::greedy(prompt(i, 3000), 2)).collect();
    requests.push(Request::greedy(prompt(9, 10), 2));
    requests.push(Request::greedy(prompt(10, 40), 2));
    assert_eq!(order_of_first_tokens(&engine, requests), [3, 4, 0, 1, 2]);
}

/// Short prompts come one after the other, so that there is always one; the long one ends all the same.
#[test]
fn long_prompt_does_not_starve() {
    let options = EngineOptions { prefill_chunk: 16, share_prefixes: false, ..Default::default() };
    let engine = Engine::start(fixture("fox_pro"), options).unwrap();
    let mut long = engine.submit(Request::greedy(prompt(0, 800), 1)).unwrap();
    let mut shorts = 0;
    while long.try_next().is_none() {
        let answers: Vec<_> = (0..4)
            .map(|i| engine.submit(Request::greedy(prompt(shorts + i, 12), 1)).unwrap())
            .collect();
        shorts += answers.into_iter().map(|answer| read(answer).1.len()).sum::<usize>();
        assert!(shorts < 4000, "the long prompt is not read");
    }
}

/// Log-probabilities of a prompt whose chunks alternate with decode batches and other chunks.
#[test]
fn interleaved_prefill_is_bit_exact() {
    for name in ["fox_pro", "mamba2"] {
        let options = EngineOptions { prefill_chunk: 16, ..EngineOptions::default() };
        let alone = Engine::start(fixture(name), options.clone()).unwrap();
        let busy = Engine::start(fixture(name), options).unwrap();
        let request = || Request { echo: true, ..Request::greedy(prompt(3, 333), 20) };
        let want = read(alone.submit(request()).unwrap());
        for count in [1, 7, 64] {
            let batch: Vec<_> = (0..count)
                .map(|i| {
                    busy.submit(Request::greedy(prompt(50 + i, 5 + 29 * i % 300), 30)).unwrap()
                })
                .collect();
            let got = read(busy.submit(request()).unwrap());
            assert_eq!((&got.0, &got.1), (&want.0, &want.1), "{name} among {count}");
            batch.into_iter().for_each(|answer| assert_eq!(read(answer).1.len(), 30));
        }
    }
}
