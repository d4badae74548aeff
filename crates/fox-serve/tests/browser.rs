//! The page in a real browser: type, click, wait for tokens, look. Without Chromium there is nothing to test.
//!
//! `FOX_SCREENSHOTS=FOLDER cargo test -p fox-serve --test browser` keeps the pictures.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/browser.rs"]
mod browser;
mod common;

use browser::Browser;
use common::{serve, serve_with};
use fox_infer::EngineOptions;
use fox_serve::ServeOptions;

#[test]
fn the_page_writes_explains_and_looks_inside() {
    let Some(program) = browser::find() else {
        eprintln!("no Chromium here: nothing tested");
        return;
    };
    let server = serve();
    let mut page = Browser::start(&program);
    page.resize(1280, 900, "light");
    page.open(&format!("http://{}/", server.address));
    page.wait_for("document.querySelector('#model').textContent.startsWith('tiny: 2 layers')");

    writes(&mut page);
    explains(&mut page);
    looks_inside(&mut page);
    page.picture("desk-light.png");
    page.resize(1280, 900, "dark");
    page.picture("desk-dark.png");
    fits_a_phone(&mut page);
    stops(&mut page);
    assert_eq!(page.complaints, Vec::<String>::new());
    common::wait_for("nothing runs", || server.engine.stats().running == 0);
}

/// A text is typed, and its continuation comes token by token, coloured.
fn writes(page: &mut Browser) {
    page.click("#prompt");
    page.value("document.querySelector('#prompt').select()");
    page.write("A fox with a long memory. ");
    page.click("summary");
    page.click("#ignore_eos");
    page.key("Enter", 13, 2);
    page.wait_for("document.querySelector('#status').textContent.includes('end: length')");
    let status = page.value("document.querySelector('#status').textContent");
    assert!(status.as_str().unwrap().starts_with("64 tokens"), "{status}");
    // 26 bytes of the prompt, and what the answer shows of its 64.
    let spans = page.value("document.querySelectorAll('#text span').length").as_u64().unwrap();
    assert!(spans > 40, "{spans}");
    let text = page.value("document.querySelector('#text').textContent");
    assert!(text.as_str().unwrap().starts_with("A fox with a long memory. "), "{text}");
    let doubt = "getComputedStyle(document.querySelector('#text span:last-child')).backgroundColor";
    let color = page.value(doubt);
    assert_ne!(color, "rgba(0, 0, 0, 0)", "unlikely tokens have a colour");
}

/// Arrow keys move from token to token, and each shows its alternatives.
fn explains(page: &mut Browser) {
    page.value("document.querySelector('#text').focus()");
    page.key("ArrowRight", 39, 0);
    page.key("ArrowRight", 39, 0);
    page.wait_for("document.querySelectorAll('#token tr').length >= 5");
    let chosen = page.value("document.querySelector('#text .chosen').textContent");
    assert_eq!(chosen, " ");
    let row = page.value("document.querySelector('#token').innerText");
    assert!(row.as_str().unwrap().contains("chosen"), "{row}");
}

/// Every head has its half-life; choosing one shows its pictures.
fn looks_inside(page: &mut Browser) {
    page.wait_for("!document.querySelector('#memory').hidden");
    assert_eq!(page.value("document.querySelectorAll('#heads button').length"), 4);
    page.click("#heads button[data-place='1,0']");
    page.wait_for("document.querySelector('#head-title').textContent.startsWith('Layer 1, head 0: half-life')");
    page.wait_for("document.querySelectorAll('.strip').length === 2");
    let drawn = |id: &str| {
        format!(
            "(() => {{ const c = document.querySelector('#{id}'); \
             const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; \
             return c.width > 60 && d.some((x, i) => i % 4 === 3 && x > 100) \
             && d[4 * (c.width - 1) + 3] === 0; }})()"
        )
    };
    page.wait_for(&drawn("forget"));
    page.wait_for(&drawn("attention"));
    page.value("document.querySelector('#position').focus()");
    page.key("Home", 36, 0);
    page.wait_for("document.querySelector('#reading').textContent.startsWith('0: “token_id:255”')");
    assert!(
        page.value("document.querySelector('#cache').textContent")
            .as_str()
            .unwrap()
            .contains("KiB")
    );
    assert_eq!(page.value("document.querySelectorAll('.page-row').length"), 2);
}

/// Nothing is wider than a phone, and everything to press is big enough for a thumb.
fn fits_a_phone(page: &mut Browser) {
    page.resize(375, 740, "light");
    page.wait_for("innerWidth === 375");
    assert_eq!(page.value("document.documentElement.scrollWidth <= 375"), true);
    let smallest = "Math.min(...[...document.querySelectorAll('button')].map((b) => b.getBoundingClientRect().height))";
    assert!(page.value(smallest).as_f64().unwrap() >= 32.0);
    page.picture("phone-light.png");
    page.resize(375, 740, "dark");
    page.picture("phone-dark.png");
    page.resize(1280, 900, "light");
}

/// Escape ends an answer, and the next one can begin.
fn stops(page: &mut Browser) {
    page.value("document.querySelector('#max_tokens').value = 60000");
    page.click("#go");
    page.wait_for("/^[1-9]/.test(document.querySelector('#status').textContent)");
    page.key("Escape", 27, 0);
    page.wait_for("document.querySelector('#status').textContent.includes('stopped')");
    page.wait_for("document.querySelector('#stop').disabled");
    page.value("document.querySelector('#max_tokens').value = 8");
    page.value("document.querySelector('#stop_text').value = 'x'");
    page.value("document.querySelector('#seed').value = 1");
    page.click("#go");
    page.wait_for("document.querySelector('#status').textContent.includes('end: ')");
}

#[test]
fn the_page_asks_for_a_key_where_one_is_needed() {
    let Some(program) = browser::find() else { return };
    let options = ServeOptions { api_key: Some("secret".into()), ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let mut page = Browser::start(&program);
    page.open(&format!("http://{}/", server.address));
    page.wait_for("!document.querySelector('#key-form').hidden");
    page.wait_for("document.querySelector('#error').textContent.includes('Bearer')");
    page.click("#key");
    page.write("secret");
    page.key("Tab", 9, 0);
    page.wait_for("document.querySelector('#model').textContent.startsWith('tiny')");
    page.wait_for("document.querySelector('#error').hidden");
}
