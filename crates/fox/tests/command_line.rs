//! Version, completions and manual pages generated from the clap definition.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::{fox, succeed};
use std::process::Command;

/// Names of all commands, as the help lists them.
fn commands() -> Vec<String> {
    let help = succeed(&["--help"]);
    let (list, _) = help.split_once("Options:\n").unwrap();
    let is_name = |line: &&str| line.starts_with("  ") && !line.starts_with("   ");
    list.lines()
        .filter(is_name)
        .filter_map(|line| line.split_whitespace().next().map(String::from))
        .collect()
}

#[test]
fn version_names_commit_and_features() {
    let version = succeed(&["--version"]);
    let inside =
        version.trim().strip_prefix(concat!("fox ", env!("CARGO_PKG_VERSION"), " (")).unwrap();
    let facts: Vec<&str> = inside.strip_suffix(')').unwrap().split(", ").collect();
    let commit = facts[0].len() == 9 && facts[0].chars().all(|c| c.is_ascii_hexdigit());
    assert!(commit || facts[0] == "no commit", "{version}");
    assert_eq!(facts.contains(&"hf-tokenizers"), cfg!(feature = "hf-tokenizers"), "{version}");
}

/// NO_COLOR disables colours even where they are forced (no-color.org).
#[test]
fn colours_can_be_disabled() {
    let help = |no_color: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fox"));
        command
            .arg("--help")
            .env("CLICOLOR_FORCE", "1")
            .env_remove("NO_COLOR")
            .env("TERM", "xterm");
        if !no_color.is_empty() {
            command.env("NO_COLOR", no_color);
        }
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    assert!(help("").contains('\u{1b}'), "no colour to turn off");
    assert!(!help("1").contains('\u{1b}'));
}

/// Commands that print no figures (text, pages, services and scripts), or JSON alone (embed).
const WITHOUT_FIGURES: [&str; 8] =
    ["chat", "serve", "watch", "launch", "embed", "completions", "man", "help"];

#[test]
fn commands_with_figures_print_json() {
    for command in commands().iter().filter(|name| !WITHOUT_FIGURES.contains(&name.as_str())) {
        let help = succeed(&[command, "--help"]);
        let list = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest);
        let list = list.split_once("\nOptions:").map_or("", |(list, _)| list);
        let is_name = |line: &&str| line.starts_with("  ") && !line.starts_with("   ");
        let inner = list.lines().filter(is_name).filter_map(|line| line.split_whitespace().next());
        let inner: Vec<&str> = inner.filter(|name| *name != "help").collect();
        if inner.is_empty() {
            assert!(help.contains("--json"), "fox {command}");
        }
        for name in inner {
            let help = succeed(&[command, name, "--help"]);
            assert!(help.contains("--json"), "fox {command} {name}");
        }
    }
}

#[test]
fn json_has_the_figures_of_the_text() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let fixture =
        |name: &str| format!("{}/../../fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"));
    let (made, more, run) = (at("converted"), at("retrofitted"), at("run"));
    let (fla, llama) = (fixture("fla_fox"), fixture("hf_llama"));
    let dry =
        ["train", "tiny-fox-pro", "--dry-run", "-o", &run, "--tokens", "8192", "--device", "cpu"];
    for (args, keys) in [
        (&dry[..], &["steps", "memory_bytes", "tokens_per_second", "seconds", "config"][..]),
        (&["selftest", "--only", "glu", "--device", "cpu"], &["passed", "devices"]),
        (&["convert", &fla, &made, "--to", "fla"], &["parameters", "from", "to"]),
        (&["retrofit", &llama, &more], &["parameters", "added", "decay_per_token"]),
        (&["info", "fox-pro-125m"], &["parameters"]),
    ] {
        let text = succeed(&[args, &["--json"]].concat());
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        for key in keys {
            assert!(!json[key].is_null(), "fox {args:?} has no {key}: {text}");
        }
    }
    assert!(!dir.path().join("run").exists(), "of a dry run");
}

#[test]
fn completions_cover_every_command() {
    let commands = commands();
    assert!(commands.len() > 15, "{commands:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeed(&["completions", shell]);
        for command in &commands {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
    let refused = fox(&["completions", "nosh"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("possible values: bash"));
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man1");
    succeed(&["man", pages.to_str().unwrap()]);
    for command in commands().iter().filter(|command| *command != "help") {
        let page = std::fs::read_to_string(pages.join(format!("fox-{command}.1"))).unwrap();
        assert!(page.contains(".SH DESCRIPTION"), "{command}");
    }
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let refused = fox(&["man", file.join("x").to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("cannot write manual pages to"));
    assert_eq!(std::fs::read_to_string(file).unwrap(), "mine");
}
