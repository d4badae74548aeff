//! The help of the command line: commands in groups, and at the end of each help two examples and the guide's chapter.

use std::fmt::Write as _;

use clap::builder::StyledStr;
use clap::{Arg, Command, CommandFactory};

use crate::Cli;

/// Columns of all help texts; a narrower terminal gets fewer.
const COLUMNS: usize = 80;

/// The groups of commands, in the order in which a newcomer meets them.
pub(crate) const GROUPS: &[(&str, &[&str])] = &[
    ("Use a model", &["generate", "chat", "serve", "inspect", "embed"]),
    ("Train", &["train", "prepare", "watch", "launch"]),
    ("Evaluate", &["eval", "compare"]),
    ("Experiments", &["demo", "sweep", "reproduce"]),
    ("Checkpoints", &["info", "convert", "retrofit", "verify"]),
    ("This machine", &["bench", "selftest"]),
    ("Command line", &["completions", "man", "help"]),
];

/// Two examples of a command, and its chapter in `docs/guide/src`.
struct Usage {
    command: &'static str,
    chapter: &'static str,
    examples: [&'static str; 2],
}

const fn usage(command: &'static str, chapter: &'static str, examples: [&'static str; 2]) -> Usage {
    Usage { command, chapter, examples }
}

#[rustfmt::skip] // a row per command
const USAGES: &[Usage] = &[
    usage("demo", "demo", ["fox demo", "fox demo --tokens 2e5 --seeds 1 --out quick"]),
    usage("prepare", "own-text", [
        "fox prepare books/ shards --tokenizer bytes",
        "fox prepare novel.txt shards --tokenizer bytes --heldout-ends 0.05",
    ]),
    usage("train", "own-text", [
        "fox train --data my.txt",
        "fox train tiny-fox-pro -o runs/tiny --tokens 1e6 --baseline",
    ]),
    usage("watch", "own-text", ["fox watch runs/my", "fox watch runs/my --out page.html"]),
    usage("launch", "many-gpus", [
        "fox launch --gpus 8 -- train fox-pro-125m --data shards",
        "fox launch --ranks 2 -- train tiny-fox-pro --device cpu",
    ]),
    usage("sweep", "experiments", [
        "fox sweep tiny-table3 --out table3",
        "fox sweep tiny-fox-pro tiny-transformer --set training.seed=0..4 --out seeds",
    ]),
    usage("reproduce", "experiments", ["fox reproduce --dry-run", "fox reproduce --only main,gates --out report"]),
    usage("eval", "inspect", ["fox eval loss runs/tiny", "fox eval needle runs/tiny --lengths 256,512"]),
    usage("eval loss", "inspect", [
        "fox eval loss runs/tiny --length 1024",
        "fox eval loss FoX=runs/a RoPE=runs/b --data shards",
    ]),
    usage("eval needle", "tasks", [
        "fox eval needle runs/tiny --lengths 256,512,1024",
        "fox eval needle runs/my --haystack novel.txt --json",
    ]),
    usage("eval ruler", "tasks", [
        "fox eval ruler runs/my --lengths 1024,2048,4096",
        "fox eval ruler runs/my --file niah.jsonl --json",
    ]),
    usage("eval boundaries", "tasks", [
        "fox eval boundaries runs/code --boundary \"^}$\"",
        "fox eval boundaries runs/novel --boundary \"^CHAPTER\" --data novel.txt",
    ]),
    usage("eval tasks", "tasks", ["fox eval tasks --list", "fox eval tasks runs/my --tasks piqa --task-data tasks"]),
    usage("eval accuracy", "tasks", [
        "fox eval accuracy runs/mqar",
        "fox eval accuracy runs/flip-flop --settings 512x0.98 --cases 200",
    ]),
    usage("inspect", "inspect", ["fox inspect --text novel.txt", "fox inspect runs/tiny --length 512 --heads 0:0,1:1"]),
    usage("embed", "encoders", [
        "fox embed runs/encoder --text \"The fox\"",
        "fox embed runs/encoder --file texts.jsonl --normalize > vectors.jsonl",
    ]),
    usage("generate", "generate", [
        "fox generate -p \"The fox\"",
        "fox generate runs/my \"Once upon a time\" --max-tokens 200 --seed 1",
    ]),
    usage("chat", "generate", ["fox chat", "fox chat runs/my"]),
    usage("serve", "serving", ["fox serve", "fox serve runs/my --port 8000 --api-key secret"]),
    usage("compare", "experiments", [
        "fox compare runs/fox runs/transformer",
        "fox compare A=runs/a B=runs/b --length 1024 --out a-and-b",
    ]),
    usage("bench", "speed", ["fox bench train", "fox bench attention --seq 16384 --acp=-10"]),
    usage("bench attention", "speed", [
        "fox bench attention --seq 8192",
        "fox bench attention --seq 16384 --acp=-10 --json",
    ]),
    usage("bench train", "speed", ["fox bench train --arch fox-pro", "fox bench train --seq 2048 --batch 2 --json"]),
    usage("bench hybrid", "speed", ["fox bench hybrid fox-window-125m", "fox bench hybrid --seq 1024 --batch 1"]),
    usage("bench decode", "speed", ["fox bench decode fox-pro-125m", "fox bench decode runs/my/export --tokens 64"]),
    usage("bench throughput", "speed", [
        "fox bench throughput fox-pro-125m",
        "fox bench throughput fox-pro-125m --sequences 1,16 --context 64",
    ]),
    usage("bench capacity", "speed", [
        "fox bench capacity fox-pro-125m --memory 64,4096",
        "fox bench capacity runs/my/export --context 8192",
    ]),
    usage("bench greedy", "speed", ["fox bench greedy", "fox bench greedy --arch mamba2 --layers 4"]),
    usage("bench logprobs", "speed", [
        "fox bench logprobs fox-pro-125m",
        "fox bench logprobs runs/my/export --weights bf16",
    ]),
    usage("bench compare", "speed", ["fox bench compare", "fox bench compare --seq 4096 --json"]),
    usage("verify", "correctness", [
        "fox verify fixtures/models/fox_pro",
        "fox verify fixtures/models/fox_pro --device cpu --json",
    ]),
    usage("selftest", "correctness", ["fox selftest", "fox selftest --only attention --verbose"]),
    usage("info", "formats", ["fox info runs/my", "fox info fox-pro-760m --seq 16384 --batch 4"]),
    usage("convert", "fine-tuning", [
        "fox convert runs/my/export for-fla --to fla",
        "fox convert runs/my/export small --to hf --dtype bf16",
    ]),
    usage("retrofit", "fine-tuning", [
        "fox retrofit llama-folder with-gates",
        "fox retrofit llama-folder with-gates --memory 4096 --output-gate",
    ]),
    usage("completions", "install", ["fox completions bash > fox.bash", "fox completions zsh > _fox"]),
    usage("man", "install", ["fox man man1", "fox man ~/.local/share/man/man1"]),
];

/// The whole command line.
pub fn command() -> Command {
    let command = Cli::command().max_term_width(COLUMNS).disable_help_subcommand(false);
    let command = finish(command, "");
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}{}:\n{{options}}{{after-help}}",
        groups(&command),
        heading(&command, "Options"),
    );
    let first = "Start with `fox demo` (four minutes), or `fox generate -p \"The fox\"`.\n\
                 `fox COMMAND --help` has examples. Guide: docs/guide/src/introduction.md";
    command.help_template(StyledStr::from(template)).after_help(first)
}

/// Adds examples and a chapter to a command and its subcommands, and lets their flags take negative numbers, so that
/// these are refused by the flag's own rule and not as an unknown flag.
fn finish(mut command: Command, path: &str) -> Command {
    let names: Vec<String> = command.get_subcommands().map(|c| c.get_name().to_string()).collect();
    for name in names {
        let below = if path.is_empty() { name.clone() } else { format!("{path} {name}") };
        command = command.mut_subcommand(&name, |command| finish(command, &below));
    }
    command = command.mut_args(|arg: Arg| {
        let takes_values = arg.get_action().takes_values() && !arg.is_positional();
        if takes_values && !arg.is_allow_hyphen_values_set() {
            arg.allow_negative_numbers(true)
        } else {
            arg
        }
    });
    match USAGES.iter().find(|usage| usage.command == path) {
        Some(usage) => {
            let text = after_help(&command, usage);
            command.after_help(text)
        }
        None => command,
    }
}

fn after_help(command: &Command, usage: &Usage) -> StyledStr {
    let mut text = format!("{}:\n", heading(command, "Examples"));
    for example in usage.examples {
        let _ = writeln!(text, "  {example}");
    }
    let _ = write!(text, "\n{}: docs/guide/src/{}.md", heading(command, "Guide"), usage.chapter);
    StyledStr::from(text)
}

/// The commands by group, each with its one-line description.
fn groups(command: &Command) -> String {
    let mut text = String::new();
    for (group, names) in GROUPS {
        let _ = writeln!(text, "{}:", heading(command, group));
        for name in *names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = match (about, *name) {
                (Some(about), _) => about.to_string(),
                (None, "help") => "Print the help of a command".to_string(),
                (None, _) => continue,
            };
            let style = command.get_styles().get_literal();
            let _ = writeln!(text, "  {style}{name:<12}{style:#} {about}");
        }
        text.push('\n');
    }
    text
}

fn heading(command: &Command, text: &str) -> String {
    let style = command.get_styles().get_header();
    format!("{style}{text}{style:#}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// All commands with their paths.
    fn all(command: &Command, path: &str, found: &mut Vec<(String, Command)>) {
        for below in command.get_subcommands().filter(|c| !c.is_hide_set()) {
            if below.get_name() == "help" {
                continue;
            }
            let path = format!("{path} {}", below.get_name()).trim().to_string();
            all(below, &path, found);
            found.push((path, below.clone()));
        }
    }

    fn commands() -> Vec<(String, Command)> {
        let mut command = command();
        command.build();
        let mut found = Vec::new();
        all(&command, "", &mut found);
        found
    }

    #[test]
    fn help_fits_80_columns() {
        let mut texts = vec![("fox".to_string(), command())];
        texts.extend(commands());
        for (name, mut command) in texts {
            // Subcommands that are taken out of their parent lose its width.
            command = command.max_term_width(COLUMNS);
            for help in [command.render_help(), command.render_long_help()] {
                for line in help.to_string().lines() {
                    // A flag's own name is not broken.
                    let flag = line.trim_start().starts_with('-');
                    assert!(line.chars().count() <= COLUMNS || flag, "{name}: {line}");
                }
            }
        }
    }

    #[test]
    fn every_command_is_grouped_with_examples() {
        for (path, command) in commands() {
            let help = command.clone().render_help().to_string();
            assert!(help.contains("Examples:\n  fox "), "{path} has no row in USAGES");
            let grouped = GROUPS.iter().filter(|(_, names)| names.contains(&path.as_str())).count();
            assert!(path.contains(' ') || grouped == 1, "{path} is in {grouped} groups");
        }
    }

    #[test]
    fn examples_parse_and_chapters_exist() {
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/src");
        let known = commands();
        for usage in USAGES.iter().filter(|usage| known.iter().any(|(p, _)| p == usage.command)) {
            assert!(guide.join(format!("{}.md", usage.chapter)).is_file(), "{}", usage.chapter);
            for example in usage.examples {
                let start = format!("fox {}", usage.command);
                assert!(example.starts_with(&start), "{example}: not {start}");
                let line = example.split(" > ").next().unwrap_or_default();
                let mut words: Vec<String> = Vec::new();
                for (i, part) in line.split('"').enumerate() {
                    match i % 2 {
                        0 => words.extend(part.split_whitespace().map(String::from)),
                        _ => words.push(part.to_string()),
                    }
                }
                if let Err(error) = command().try_get_matches_from(words) {
                    panic!("{example}: {error}");
                }
            }
        }
    }
}
