//! The page in a real browser: type, click, wait for tokens, look. Left out of a plain test run, because it needs
//! Chromium:
//!
//! `FOX_SCREENSHOTS=FOLDER cargo test -p fox-serve --test browser -- --ignored` keeps the pictures.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/browser.rs"]
mod browser;
mod common;

use browser::Browser;
use common::{Running, client, model, serve, serve_model, serve_with};
use fox_infer::EngineOptions;
use fox_model::{Model, ModelConfig};
use fox_serve::ServeOptions;

/// A browser at a server's page, or `None` where there is no Chromium.
fn open(url: &str) -> Option<Browser> {
    let Some(program) = browser::find() else {
        eprintln!("skipped: no Chromium on the path; FOX_CHROMIUM names one");
        return None;
    };
    let mut page = Browser::start(&program);
    page.resize(1280, 900, "light");
    page.open(url);
    Some(page)
}

/// The text of the first element that a selector finds.
fn text(page: &mut Browser, selector: &str) -> String {
    let text = page.value(&format!("document.querySelector({selector:?}).textContent"));
    text.as_str().unwrap().to_string()
}

/// Waits until a part of the first pane has this text.
fn wait_for_text(page: &mut Browser, selector: &str, words: &str) {
    page.wait_for(&format!("document.querySelector({selector:?}).textContent.includes({words:?})"));
}

/// Puts a text into the prompt.
fn type_prompt(page: &mut Browser, words: &str) {
    page.click("#prompt");
    page.value("document.querySelector('#prompt').select()");
    page.write(words);
}

/// Waits until the text is looked into: a span for every position.
fn wait_for_memory(page: &mut Browser) {
    page.wait_for(
        "!document.querySelector('[data-part=memory]').hidden && document.querySelector('.text .chosen') !== null",
    );
}

const PARTS: &str =
    "[...document.querySelectorAll('.text span')].map((s) => s.style.getPropertyValue('--part'))";

#[test]
#[ignore = "needs Chromium"]
fn page_generates_and_inspects() {
    let server = serve();
    let Some(mut page) = open(&format!("http://{}/", server.address)) else { return };
    wait_for_text(&mut page, "[data-part=title]", "tiny");
    writes(&mut page);
    reports_true_speed(&mut page, &server);
    colours_by_memory(&mut page);
    links_pictures_and_text(&mut page);
    chooses_heads(&mut page);
    page.picture("desk-light.png");
    page.resize(1280, 900, "dark");
    page.picture("desk-dark.png");
    fits_a_phone(&mut page);
    writes_again_from_a_token(&mut page);
    stops(&mut page);
    assert_eq!(page.complaints, Vec::<String>::new());
    common::wait_for("nothing runs", || server.engine.stats().running == 0);
}

/// A text is typed, and its continuation comes token by token, coloured.
fn writes(page: &mut Browser) {
    type_prompt(page, "A fox with a long memory. ");
    page.click("summary");
    page.click("#ignore_eos");
    page.key("Enter", 13, 2);
    wait_for_text(page, "#status", "64 tokens");
    wait_for_text(page, "#status", "end: length");
    wait_for_memory(page);
    // The marker, the 26 bytes of the prompt, and what the text of the answer has.
    assert!(page.value("document.querySelectorAll('.text span').length").as_u64().unwrap() > 60);
    assert!(text(page, ".text").starts_with("A fox with a long memory. "));
    let doubts = "[...document.querySelectorAll('.text span')].filter((s) => s.style.getPropertyValue('--doubt') > 0.3).length";
    assert!(page.value(doubts).as_u64().unwrap() > 20, "a random model finds its text unlikely");
}

/// The speed is not above what the server measured from the request to the last token.
fn reports_true_speed(page: &mut Browser, server: &Running) {
    let status = text(page, "#status");
    let speed = status.split(", ").nth(1).and_then(|words| words.split(' ').next()).unwrap();
    let metrics = client::get(server.address, "/metrics").unwrap().text();
    let seconds = metrics.lines().find_map(|line| line.strip_prefix("fox_request_seconds_sum "));
    let (speed, seconds): (f64, f64) = (speed.parse().unwrap(), seconds.unwrap().parse().unwrap());
    assert!(speed > 0.0 && speed <= 64.0 / seconds + 0.1, "{status}, but {seconds} s");
}

/// Choosing a token shows its alternatives, and colours earlier tokens by their remaining weight.
fn colours_by_memory(page: &mut Browser) {
    page.value("document.querySelector('.text').focus()");
    page.key("Home", 36, 0);
    (0..4).for_each(|_| page.key("ArrowRight", 39, 0));
    page.wait_for("document.querySelectorAll('.token tr').length >= 5");
    assert_eq!(text(page, ".text .chosen"), "o");
    wait_for_text(page, ".token", "chosen");
    page.wait_for("document.querySelector('.text').dataset.mode === 'memory'");
    page.wait_for(&format!("{PARTS}[4] === '1'"));
    // The products of the gates grow towards the chosen token, and nothing is known of what comes after.
    let parts = page.value(PARTS);
    let part = |at: usize| parts[at].as_str().unwrap().parse::<f64>().ok();
    let row: Vec<f64> = (0..5).map(|at| part(at).unwrap()).collect();
    assert!(row[0] > 0.0 && row.windows(2).all(|pair| pair[0] < pair[1]), "{row:?}");
    assert_eq!((row[4], part(5)), (1.0, None));
    page.click(".mode[data-mode=attention]");
    page.wait_for(&format!("Math.max(...{PARTS}.slice(0, 5)) === 1 && {PARTS}[5] === ''"));
    wait_for_text(page, "[data-part=legendHigh]", "the most");
    page.click(".mode[data-mode=memory]");
}

/// A cell of a picture points to its tokens, and a token to its column.
fn links_pictures_and_text(page: &mut Browser) {
    let drawn = "(() => { const c = document.querySelector('[data-part=forget]'); \
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
        return c.width > 200 && d.some((x, i) => i % 4 === 3 && x > 100); })()";
    page.wait_for(drawn);
    // Near the lower left corner: the first tokens, seen by the last ones.
    page.hover("[data-part=forget]", 0.2, 0.9);
    wait_for_text(page, "[data-part=readout]", "decayed to ");
    wait_for_text(page, "[data-part=readout]", "gate ");
    assert_eq!(page.value("document.querySelectorAll('.text .hovered').length"), 2);
    page.hover("[data-part=forget]", 0.6, 0.1);
    page.wait_for("document.querySelectorAll('.text .hovered').length === 0");
    page.click_at("[data-part=gates]", 0.5, 0.5);
    page.wait_for("Number(document.querySelector('[data-part=position]').value) > 10");
    page.hover(".text span:nth-child(3)", 0.5, 0.5);
    wait_for_text(page, "[data-part=readout]", "2: “ ”");
    page.value("document.querySelector('[data-part=position]').focus()");
    page.key("Home", 36, 0);
    wait_for_text(page, "[data-part=at]", "0 of");
}

/// Every head has its place by half-life; keys move between them.
fn chooses_heads(page: &mut Browser) {
    assert_eq!(page.value("document.querySelectorAll('.heads button').length"), 4);
    page.click(".heads button[data-place='1,0']");
    wait_for_text(page, "[data-part=headTitle]", "Layer 1, head 0");
    page.value("document.querySelector('.heads [aria-pressed=true]').focus()");
    page.key("ArrowUp", 38, 0);
    wait_for_text(page, "[data-part=headTitle]", "Layer 0");
    page.click("[data-part=longer]");
    page.click("[data-part=shorter]");
    assert!(text(page, "[data-part=cache]").contains("KiB"));
}

/// Nothing is wider than a phone, and what is pressed often is big enough for a thumb.
fn fits_a_phone(page: &mut Browser) {
    page.resize(390, 844, "light");
    page.wait_for("innerWidth === 390");
    assert_eq!(page.value("document.documentElement.scrollWidth"), 390);
    let smallest = "Math.min(...[...document.querySelectorAll('button')].filter((b) => b.offsetParent).map((b) => b.offsetHeight))";
    assert!(page.value(smallest).as_f64().unwrap() >= 32.0);
    // The names of candidate tokens, of up to 12 characters, stay on one line.
    page.click(".text span:nth-child(5)");
    page.wait_for("document.querySelectorAll('.take').length >= 5");
    let tallest = "Math.max(...[...document.querySelectorAll('.take')].map((b) => b.offsetHeight))";
    assert!(page.value(tallest).as_f64().unwrap() < 40.0);
    page.picture("phone-light.png");
    page.resize(390, 844, "dark");
    page.picture("phone-dark.png");
    page.resize(1280, 900, "light");
}

fn writes_again_from_a_token(page: &mut Browser) {
    page.value("document.querySelector('.text').focus()");
    page.key("Home", 36, 0);
    (0..6).for_each(|_| page.key("ArrowRight", 39, 0));
    page.click(".token .row button");
    page.wait_for("document.querySelector('#prompt').value === 'A fox'");
    wait_for_text(page, "#status", "end: length");
    wait_for_memory(page);
    assert!(text(page, ".text").starts_with("A fox"));
}

/// Escape ends an answer, and the next one can begin.
fn stops(page: &mut Browser) {
    page.value("document.querySelector('#max_tokens').value = 60000");
    page.click("#go");
    page.wait_for("/^[1-9]/.test(document.querySelector('#status').textContent)");
    page.key("Escape", 27, 0);
    wait_for_text(page, "#status", "stopped");
    page.wait_for("document.querySelector('#stop').disabled");
    page.value("document.querySelector('#max_tokens').value = 8");
    page.click("#go");
    wait_for_text(page, "#status", "end: ");
}

#[test]
#[ignore = "needs Chromium"]
fn link_restores_settings_and_view() {
    let server = serve();
    let Some(mut page) = open(&format!("http://{}/", server.address)) else { return };
    wait_for_text(&mut page, "[data-part=title]", "tiny");
    page.click("summary");
    page.click("#max_tokens");
    page.value("document.querySelector('#max_tokens').select()");
    page.write("12");
    page.key("Tab", 9, 0);
    page.click("#ignore_eos");
    // Markup is text, also in links.
    type_prompt(&mut page, "<img src=x onerror=alert(1)> é😀&#<b>");
    page.click("#go");
    wait_for_text(&mut page, "#status", "12 tokens");
    wait_for_memory(&mut page);
    page.click(".heads button[data-place='0,1']");
    page.click(".text span:nth-child(9)");
    page.click("#link");
    page.wait_for("location.hash.includes('at=8')");
    let (link, before) = (page.value("location.href"), text(&mut page, ".text"));
    assert!(before.starts_with("<img src=x onerror=alert(1)> é😀&#<b>"), "{before}");
    assert_eq!(page.value("document.querySelectorAll('.text img, .text b').length"), 0);

    page.open("about:blank");
    page.open(link.as_str().unwrap());
    wait_for_memory(&mut page);
    assert_eq!(text(&mut page, ".text"), before);
    wait_for_text(&mut page, "[data-part=headTitle]", "Layer 0, head 1");
    page.wait_for("document.querySelector('[data-part=position]').value === '8'");
    assert_eq!(page.value("document.querySelector('#max_tokens').value"), "12");
    page.open("about:blank");
    page.open(&format!("http://{}/", server.address));
    wait_for_text(&mut page, "[data-part=title]", "tiny");
    assert_eq!(page.value("document.querySelector('#max_tokens').value"), "12");
    assert_eq!(page.value("document.querySelector('#ignore_eos').checked"), true);
    // A link with invalid settings.
    page.open("about:blank");
    page.open(&format!("http://{}/#prompt=x&head=99,99&at=1e9&temperature=<b>", server.address));
    wait_for_memory(&mut page);
    assert_eq!(page.complaints, Vec::<String>::new());
}

#[test]
#[ignore = "needs Chromium"]
fn page_compares_two_models() {
    let other = serve_with(
        EngineOptions::default(),
        ServeOptions { allow_origins: vec!["*".into()], ..ServeOptions::default() },
    );
    let options = ServeOptions {
        compare: Some(format!("http://{}", other.address)),
        ..ServeOptions::default()
    };
    let server = serve_model(model(), EngineOptions::default(), options);
    let Some(mut page) = open(&format!("http://{}/", server.address)) else { return };
    page.wait_for(
        "document.querySelectorAll('.pane').length === 2 && document.title === 'fox: tiny and tiny'",
    );
    page.click("summary");
    page.click("#ignore_eos");
    type_prompt(&mut page, "Side by side ");
    page.click("#go");
    page.wait_for("document.querySelectorAll('.text .chosen').length === 2");
    // A token that is chosen in one is chosen in the other.
    page.click(".text span:nth-child(4)");
    page.wait_for(
        "[...document.querySelectorAll('.text .chosen')].map((s) => s.textContent).join() === 'd,d'",
    );
    page.picture("two.png");
    assert_eq!(page.complaints, Vec::<String>::new());
}

/// A random model with 24 layers of 24 heads.
fn many_heads() -> Model {
    let config = ModelConfig::fox_pro(384, 24, 24).with_vocab(256);
    Model::init(&config, 7, &fox_cpu::device()).unwrap()
}

#[test]
#[ignore = "needs Chromium"]
fn head_map_fits_a_phone() {
    let server = serve_model(many_heads(), EngineOptions::default(), ServeOptions::default());
    let Some(mut page) = open(&format!("http://{}/#prompt=heads&mode=memory", server.address))
    else {
        return;
    };
    wait_for_memory(&mut page);
    page.resize(390, 844, "light");
    page.wait_for("innerWidth === 390");
    assert_eq!(page.value("document.documentElement.scrollWidth"), 390);
    assert_eq!(page.value("document.querySelectorAll('.heads button').length"), 576);
    let sorted = "[...Array(24).keys()].every((layer) => { \
        const row = [...document.querySelectorAll(`.heads [data-place^='${layer},']`)]; \
        const reach = row.map((b) => Number(b.style.getPropertyValue('--reach'))); \
        return row.length === 24 && reach.every((x, i) => i === 0 || reach[i - 1] <= x); })";
    assert_eq!(page.value(sorted), true);
    page.picture("phone-576-heads.png");
    assert_eq!(page.complaints, Vec::<String>::new());
}

#[test]
#[ignore = "needs Chromium"]
fn page_asks_for_a_key_and_shows_errors() {
    let options = ServeOptions {
        api_key: Some("secret".into()),
        max_inspect: 40,
        compare: Some("http://127.0.0.1:9".into()),
        ..ServeOptions::default()
    };
    let server = serve_with(EngineOptions::default(), options);
    let Some(mut page) = open(&format!("http://{}/", server.address)) else { return };
    page.wait_for("!document.querySelector('[data-part=keyForm]').hidden");
    wait_for_text(&mut page, "[data-part=error]", "Bearer");
    page.click("[data-part=key]");
    page.write("secret");
    page.key("Tab", 9, 0);
    wait_for_text(&mut page, "[data-part=title]", "tiny");
    page.wait_for("document.querySelector('[data-part=error]').hidden");
    // Too long to inspect; no server at the other address.
    type_prompt(&mut page, &"long ".repeat(20));
    page.click("#look");
    wait_for_text(&mut page, "[data-part=error]", "101 tokens exceed the limit of 40");
    assert_eq!(text(&mut page, ".text"), "long ".repeat(20));
    let hint = format!("start it with --allow-origin http://{}", server.address);
    wait_for_text(&mut page, ".pane:nth-child(2) [data-part=error]", &hint);
}
