//! The guide's page `reference-cli.md`: every command with its options, written from the command line itself.

use std::fmt::Write as _;
use std::path::Path;

use clap::builder::StyledStr;
use clap::{Arg, Command};

use crate::help::{GROUPS, command};

const HEAD: &str = "\
# The command line

All commands and options of `fox`. This page is written from the command line itself: `FOX_UPDATE_SNAPSHOTS=1 cargo test
-p fox reference` updates it, and the same test fails when it is out of date. `fox COMMAND --help` prints the same, with
examples. Options that many commands share are [at the end](#shared-options).
";

/// Options under these headings are described once, at the end.
const SHARED: [&str; 2] = ["Device", "Engine"];

/// Help as one paragraph of Markdown: flags become code, and what Markdown would read is escaped.
fn plain(text: &str) -> String {
    let mut is_code = false;
    let word = |word: &str| {
        let was_code = is_code;
        is_code ^= word.matches('`').count() % 2 == 1;
        let flag = word.len() - word.trim_start_matches(['(', '[']).len();
        let (open, rest) = word.split_at(flag);
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && !"-.=_".contains(c));
        let (flag, close) = rest.split_at(end.unwrap_or(rest.trim_end_matches('.').len()));
        match !was_code && flag.starts_with("--") {
            true => format!("{open}`{flag}`{close}"),
            false => word.to_string(),
        }
    };
    let words = text.split_whitespace().map(word).collect::<Vec<_>>().join(" ");
    words.replace('<', "&lt;").replace('|', "\\|").replace('*', "\\*")
}

fn wrap(text: &str) -> String {
    let (mut wrapped, mut width) = (String::new(), 0);
    for word in text.split(' ') {
        if width > 0 && width + 1 + word.chars().count() > 120 {
            wrapped.push('\n');
            width = 0;
        } else if width > 0 {
            wrapped.push(' ');
            width += 1;
        }
        wrapped += word;
        width += word.chars().count();
    }
    wrapped
}

fn long(short: Option<&StyledStr>, long: Option<&StyledStr>) -> String {
    long.or(short).map(StyledStr::to_string).unwrap_or_default()
}

/// `-o`, `--out DIR`, or the name of a positional argument.
fn spelling(arg: &Arg) -> String {
    let names = arg.get_value_names().unwrap_or_default();
    let values: Vec<String> = names.iter().map(|name| name.replace('|', "\\|")).collect();
    if arg.is_positional() {
        return format!("`{}`", values.join(" "));
    }
    let mut text = arg.get_short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
    let _ = write!(text, "`--{}", arg.get_long().unwrap_or_default());
    if arg.get_action().takes_values() {
        let _ = write!(text, " {}", values.join(" "));
    }
    text + "`"
}

fn meaning(arg: &Arg) -> String {
    let mut text = plain(&long(arg.get_help(), arg.get_long_help()));
    let possible = arg.get_possible_values();
    let values: Vec<String> = (possible.iter().filter(|value| !value.is_hide_set()))
        .map(|value| match value.get_help() {
            Some(help) => format!("`{}` ({})", value.get_name(), plain(&help.to_string())),
            None => format!("`{}`", value.get_name()),
        })
        .collect();
    if arg.get_action().takes_values() && !values.is_empty() && !arg.is_hide_possible_values_set() {
        let _ = write!(text, ": {}", values.join(", "));
    }
    let defaults = arg.get_default_values();
    if !defaults.is_empty() && arg.get_action().takes_values() && !arg.is_hide_default_value_set() {
        let defaults: Vec<_> = defaults.iter().map(|value| value.to_string_lossy()).collect();
        let _ = write!(text, " (default: `{}`)", defaults.join(" "));
    }
    text
}

fn is_shared(arg: &Arg) -> bool {
    arg.get_help_heading().is_some_and(|heading| SHARED.contains(&heading))
}

fn table(text: &mut String, args: &[&Arg]) {
    if args.is_empty() {
        return;
    }
    *text += "| argument | meaning |\n|---|---|\n";
    for arg in args {
        let _ = writeln!(text, "| {} | {} |", spelling(arg), meaning(arg));
    }
    text.push('\n');
}

/// A command, and the commands below it.
fn section(text: &mut String, command: &Command, path: &str) {
    let _ = writeln!(text, "### {path}\n");
    for paragraph in long(command.get_about(), command.get_long_about()).split("\n\n") {
        let end = if paragraph.ends_with(['.', ':', '?']) { "" } else { "." };
        let _ = writeln!(text, "{}\n", wrap(&(plain(paragraph) + end)));
    }
    let usage = command.clone().bin_name(path).render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ = writeln!(text, "```text\n{usage}\n```\n");
    let is_listed = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help";
    let args: Vec<&Arg> = command.get_arguments().filter(is_listed).collect();
    let own: Vec<&Arg> = args.iter().copied().filter(|arg| !is_shared(arg)).collect();
    table(text, &own);
    let groups = SHARED
        .iter()
        .filter(|group| args.iter().any(|arg| arg.get_help_heading() == Some(**group)));
    let links: Vec<String> = groups
        .map(|group| format!("[{}](#{}-options)", group.to_lowercase(), group.to_lowercase()))
        .collect();
    if !links.is_empty() {
        let _ = writeln!(text, "Shared options: {}.\n", links.join(", "));
    }
    for below in command.get_subcommands().filter(|c| !c.is_hide_set() && c.get_name() != "help") {
        section(text, below, &format!("{path} {}", below.get_name()));
    }
}

/// Every option under a heading, once.
fn shared<'a>(command: &'a Command, heading: &str, found: &mut Vec<&'a Arg>) {
    for arg in command.get_arguments().filter(|arg| arg.get_help_heading() == Some(heading)) {
        if !found.iter().any(|other| spelling(other) == spelling(arg)) {
            found.push(arg);
        }
    }
    command.get_subcommands().for_each(|below| shared(below, heading, found));
}

fn page() -> String {
    let mut command = command();
    command.build();
    let mut text = HEAD.to_string();
    for (group, names) in GROUPS {
        let known = names.iter().filter(|name| **name != "help");
        let _ = writeln!(text, "\n## {group}\n");
        for name in known {
            let below = command.find_subcommand(name).expect(name);
            section(&mut text, below, &format!("fox {name}"));
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text += "\n## Shared options\n\n";
    for heading in SHARED {
        let _ = writeln!(text, "### {heading} options\n");
        let mut found = Vec::new();
        shared(&command, heading, &mut found);
        table(&mut text, &found);
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

#[test]
fn reference_page_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/src/reference-cli.md");
    if std::env::var_os("FOX_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let command = "FOX_UPDATE_SNAPSHOTS=1 cargo test -p fox reference";
    assert!(std::fs::read_to_string(&path).unwrap() == page(), "out of date; run {command}");
}
