//! Version, completions and manual pages generated from the clap definition.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::process::{Command, Output};

fn fox(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fox")).args(args).output().unwrap()
}

fn printed(args: &[&str]) -> String {
    let output = fox(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Names of all commands, as the help lists them.
fn commands() -> Vec<String> {
    let help = printed(&["--help"]);
    let (list, _) = help.split_once("Options:\n").unwrap();
    let is_name = |line: &&str| line.starts_with("  ") && !line.starts_with("   ");
    list.lines()
        .filter(is_name)
        .filter_map(|line| line.split_whitespace().next().map(String::from))
        .collect()
}

#[test]
fn version_names_commit_and_features() {
    let version = printed(&["--version"]);
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

#[test]
fn completions_cover_every_command() {
    let commands = commands();
    assert!(commands.len() > 15, "{commands:?}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&["completions", shell]);
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
    printed(&["man", pages.to_str().unwrap()]);
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
