//! The files of the page, without a browser: `tests/browser.rs` has the rest.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use common::client::get;
use common::{serve, serve_with};
use fox_infer::EngineOptions;
use fox_serve::ServeOptions;
use serde_json::json;

const SCRIPTS: [&str; 6] =
    ["/app.js", "/state.js", "/server.js", "/pane.js", "/memory.js", "/draw.js"];

#[test]
fn page_has_no_external_resources() {
    let server = serve();
    let files = [("/", "text/html"), ("/style.css", "text/css")];
    for (path, kind) in files.into_iter().chain(SCRIPTS.map(|path| (path, "text/javascript"))) {
        let reply = get(server.address, path).unwrap();
        assert_eq!(reply.status, 200);
        assert!(reply.header("content-type").unwrap().starts_with(kind));
        let policy = reply.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'"));
        assert!(policy.contains("connect-src 'self';"), "{policy}");
        assert!(!reply.text().contains("http://") && !reply.text().contains("https://"), "{path}");
        // Text of models and links must never become markup.
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!reply.text().contains(word), "{path}: {word}");
        }
    }
    assert_eq!(get(server.address, "/page.json").unwrap().json(), json!({ "compare": null }));
}

#[test]
fn page_connects_to_the_compared_server_only() {
    let other = "http://127.0.0.1:8081".to_string();
    let options = ServeOptions { compare: Some(other.clone()), ..ServeOptions::default() };
    let server = serve_with(EngineOptions::default(), options);
    let page = get(server.address, "/").unwrap();
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("connect-src 'self' http://127.0.0.1:8081;"), "{policy}");
    assert_eq!(get(server.address, "/page.json").unwrap().json(), json!({ "compare": other }));
}

/// What stands between `before` and the next character of `end`, everywhere in a text.
fn between<'a>(text: &'a str, before: &str, end: &[char]) -> BTreeSet<&'a str> {
    let after = text.split(before).skip(1);
    after.map(|rest| rest.split(end).next().unwrap()).collect()
}

#[test]
fn page_has_all_elements_of_its_scripts() {
    let server = serve();
    let read = |path: &str| get(server.address, path).unwrap().text();
    let html = read("/");
    let ids = between(&html, " id=\"", &['"']);
    let parts = between(&html, "data-part=\"", &['"']);
    let scripts: String = SCRIPTS.iter().map(|path| read(path)).collect();
    let asked: BTreeSet<&str> = between(&scripts, "$(\"", &['"'])
        .into_iter()
        .chain(between(&scripts, "getElementById(\"", &['"']))
        .collect();
    assert!(asked.len() >= 6 && asked.is_subset(&ids), "{:?}", asked.difference(&ids));
    let word = |c: char| !c.is_ascii_alphanumeric();
    let used: BTreeSet<String> = scripts
        .split("parts.")
        .skip(1)
        .map(|rest| rest.split(word).next().unwrap().to_string())
        .chain(
            scripts
                .split("} = this.parts;")
                .filter_map(|before| before.rsplit_once("const { "))
                .filter(|(_, names)| !names.contains(';') && !names.contains('='))
                .flat_map(|(_, names)| names.split(", ").map(|name| name.trim().to_string())),
        )
        .filter(|name| !["map", "set", "get", "has", "pop"].contains(&name.as_str()))
        .filter(|name| !name.is_empty())
        .collect();
    let missing: Vec<&String> = used.iter().filter(|name| !parts.contains(name.as_str())).collect();
    assert!(used.len() >= 20 && missing.is_empty(), "{missing:?}");
    // And nothing is there that no script uses.
    let unused: Vec<&&str> = parts.iter().filter(|part| !used.contains(**part)).collect();
    assert!(unused.is_empty(), "{unused:?}");
    // Settings are fields of the form.
    let fields = between(&scripts, "const NUMBERS = [", &[']']);
    let fields = fields.first().unwrap().split(", ").map(|name| name.trim_matches('"'));
    fields.for_each(|name| assert!(ids.contains(name), "{name}"));
}

#[test]
fn scripts_parse_in_node() {
    if Command::new("node").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: no node on the path");
        return;
    }
    let server = serve();
    let folder = std::env::temp_dir().join(format!("fox-scripts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for path in SCRIPTS {
        let file = folder.join(&path[1..]).with_extension("mjs");
        std::fs::write(&file, get(server.address, path).unwrap().body).unwrap();
        let checked = Command::new("node").arg("--check").arg(&file).output().unwrap();
        assert!(checked.status.success(), "{path}: {}", String::from_utf8_lossy(&checked.stderr));
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
