//! The guide (`docs/guide`) and the README: their commands run, their flags, links and pictures exist, and their code
//! is that of files which are compiled.
//!
//! The fence of a block determines the check:
//!
//! | fence | check |
//! |---|---|
//! | `sh run` | run, in the order of the book, in one folder; a `text` block right behind it must be printed |
//! | `sh slow`, `sh gpu`, `sh more` | not run; every flag of `fox` in it must exist |
//! | any, behind `<!-- from FILE -->` | must stand in that file, whatever its indentation |
//!
//! In printed text numbers may differ, and lines may be left out.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::collections::HashMap;
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOX: &str = env!("CARGO_BIN_EXE_fox");

/// A file of the documentation.
struct Page {
    path: PathBuf,
    text: String,
}

/// A fenced block.
struct Block {
    /// Number of its first line, counted from 1.
    line: usize,
    /// Number of the line of its closing fence.
    end: usize,
    info: String,
    text: String,
    /// FILE of a `<!-- from FILE -->` in the line before.
    source: Option<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn book() -> PathBuf {
    root().join("docs/guide/src")
}

impl Page {
    fn read(path: PathBuf) -> Page {
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Page { path, text }
    }

    fn name(&self) -> String {
        self.path.strip_prefix(root()).unwrap_or(&self.path).display().to_string()
    }

    /// The lines outside of fenced blocks, with their numbers.
    fn prose(&self) -> Vec<(usize, &str)> {
        let mut inside = false;
        let numbered = self.text.lines().enumerate().map(|(i, line)| (i + 1, line));
        numbered
            .filter(|(_, line)| {
                let fence = line.starts_with("```");
                inside ^= fence;
                !fence && !inside
            })
            .collect()
    }

    fn blocks(&self) -> Vec<Block> {
        let lines: Vec<&str> = self.text.lines().collect();
        let mut blocks = Vec::new();
        let mut at = 0;
        while at < lines.len() {
            let Some(info) = lines[at].strip_prefix("```") else {
                at += 1;
                continue;
            };
            let length = lines[at + 1..].iter().position(|line| line.starts_with("```"));
            let length = length.unwrap_or_else(|| panic!("{}:{}: no end", self.name(), at + 1));
            let before = lines[..at].iter().rev().find(|line| !line.is_empty());
            let source = before.and_then(|line| line.strip_prefix("<!-- from "));
            blocks.push(Block {
                line: at + 2,
                end: at + 2 + length,
                info: info.trim().to_string(),
                text: lines[at + 1..at + 1 + length].join("\n"),
                source: source.and_then(|rest| rest.strip_suffix(" -->")).map(str::to_string),
            });
            at += length + 2;
        }
        blocks
    }

    /// `(line, target)` of every link and picture that names a file.
    fn links(&self) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for (number, line) in self.prose() {
            for part in line.split("](").skip(1) {
                let target = part.split(')').next().unwrap_or_default();
                if !target.contains("://") {
                    found.push((number, target.to_string()));
                }
            }
        }
        found
    }

    /// Anchors of the headings of this page.
    fn anchors(&self) -> Vec<String> {
        let headings = self.prose().into_iter().filter(|(_, line)| line.starts_with('#'));
        headings.map(|(_, line)| anchor(line.trim_start_matches('#').trim())).collect()
    }
}

/// A heading as the end of a link.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// The pages of the book in the order of SUMMARY.md.
fn chapters() -> Vec<Page> {
    let summary = Page::read(book().join("SUMMARY.md"));
    summary.links().into_iter().map(|(_, target)| Page::read(book().join(target))).collect()
}

/// README.md and the book.
fn pages() -> Vec<Page> {
    let mut pages = vec![Page::read(root().join("README.md"))];
    pages.extend(chapters());
    pages
}

#[test]
fn summary_lists_every_page_once() {
    let mut listed: Vec<PathBuf> = chapters().into_iter().map(|page| page.path).collect();
    let entries = fs::read_dir(book()).unwrap().map(|entry| entry.unwrap().path());
    let mut there: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|e| e == "md") && !path.ends_with("SUMMARY.md"))
        .collect();
    listed.sort();
    there.sort();
    assert_eq!(listed, there);
}

#[test]
fn links_resolve() {
    let mut wrong = Vec::new();
    for page in pages() {
        for (line, target) in page.links() {
            let (file, heading) = target.split_once('#').unwrap_or((target.as_str(), ""));
            let path = match file {
                "" => page.path.clone(),
                file => page.path.parent().unwrap().join(file),
            };
            let found = path.exists()
                && (heading.is_empty() || Page::read(path).anchors().iter().any(|a| a == heading));
            if !found {
                wrong.push(format!("{}:{line}: {target}", page.name()));
            }
        }
    }
    assert!(wrong.is_empty(), "links to nothing:\n{}", wrong.join("\n"));
}

#[test]
fn every_picture_is_shown() {
    let shown: Vec<PathBuf> = pages()
        .iter()
        .flat_map(|page| {
            let folder = page.path.parent().unwrap().to_path_buf();
            page.links().into_iter().map(move |(_, target)| folder.join(target))
        })
        .filter_map(|path| path.canonicalize().ok())
        .collect();
    for entry in fs::read_dir(book().join("pictures")).unwrap() {
        let path = entry.unwrap().path();
        assert!(shown.contains(&path), "{} is on no page", path.display());
    }
}

#[test]
fn prose_is_wrapped() {
    for page in pages() {
        for (number, line) in page.prose() {
            let free = line.starts_with('|') || line.starts_with('!') || line.contains("](");
            let width = line.chars().count();
            assert!(free || width <= 120, "{}:{number}: {width} columns", page.name());
        }
    }
}

#[test]
fn code_blocks_match_their_files() {
    let unindented = |text: &str| {
        let lines: Vec<&str> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        lines.join("\n")
    };
    let mut named = 0;
    for page in pages() {
        for block in page.blocks() {
            let place = format!("{}:{}", page.name(), block.line);
            let Some(source) = block.source else { continue };
            let file = Page::read(root().join(&source)).text;
            assert!(
                unindented(&file).contains(&unindented(&block.text)),
                "{place}: not in {source}"
            );
            named += 1;
        }
    }
    assert!(named >= 4, "only {named} blocks name the file that they are from");
}

/// What `fox COMMAND --help` prints.
fn help(cache: &mut HashMap<String, String>, command: &[&str]) -> String {
    let ask = || {
        let output = Command::new(FOX).args(command).arg("--help").output().unwrap();
        assert!(output.status.success(), "there is no `fox {}`", command.join(" "));
        String::from_utf8(output.stdout).unwrap()
    };
    cache.entry(command.join(" ")).or_insert_with(ask).clone()
}

/// The `fox` commands of a script: continued lines joined; comments, pipes and prefixes removed.
fn fox_commands(script: &str) -> Vec<Vec<String>> {
    let joined = script.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.split(" #").next().unwrap_or_default());
    let parts = lines.flat_map(|line| line.split(['|', '&', ';', '(', ')', '$']));
    let words = parts.map(|part| part.split_whitespace().map(str::to_string).collect::<Vec<_>>());
    words.filter(|words| words.first().is_some_and(|word| word == "fox")).collect()
}

#[test]
fn every_flag_exists() {
    let mut cache = HashMap::new();
    let mut checked = 0;
    for page in pages() {
        for block in page.blocks().iter().filter(|block| block.info.starts_with("sh")) {
            let place = format!("{}:{}", page.name(), block.line);
            let marks = ["sh", "sh run", "sh slow", "sh gpu", "sh more"];
            assert!(marks.contains(&block.info.as_str()), "{place}: `{}`", block.info);
            for words in fox_commands(&block.text) {
                // `fox launch ... -- train ...` is two commands.
                for words in words[1..].split(|word| word == "--") {
                    let Some(name) = words.first().filter(|name| !name.starts_with('-')) else {
                        continue;
                    };
                    let mut command = vec![name.as_str()];
                    if ["eval", "bench"].contains(&name.as_str()) {
                        command.push(&words[1]);
                    }
                    let help = help(&mut cache, &command);
                    for flag in words.iter().filter(|word| word.starts_with("--")) {
                        let flag = flag.split('=').next().unwrap();
                        let words = help.split(|c: char| c.is_whitespace() || ",=[".contains(c));
                        let known = words.collect::<Vec<_>>().contains(&flag);
                        assert!(known, "{place}: `fox {}` has no {flag}", command.join(" "));
                        checked += 1;
                    }
                }
            }
        }
    }
    assert!(checked > 50, "only {checked} flags were found");
}

/// A line without what differs between machines: numbers and column widths.
fn shape(line: &str) -> String {
    let mut shape = String::new();
    let mut rest = line.trim_end();
    while let Some(c) = rest.chars().next() {
        if c.is_ascii_digit() {
            let part = |c: char| c.is_ascii_digit() || ".,e+-".contains(c);
            let end = rest.find(|c| !part(c)).unwrap_or(rest.len());
            shape.push('#');
            rest = &rest[end..];
        } else {
            // Signs belong to numbers.
            if !"+-".contains(c) {
                shape.push(c);
            }
            rest = &rest[c.len_utf8()..];
        }
    }
    shape.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The first line of `shown` that `printed` does not have behind the ones before it.
fn missing<'a>(shown: &'a str, printed: &str) -> Option<&'a str> {
    let mut printed = printed.lines().map(shape);
    let shown = shown.lines().filter(|line| !line.trim().is_empty() && line.trim() != "...");
    let mut shown = shown.map(|line| (line, shape(line)));
    shown.find(|(_, shape)| !printed.any(|line| line == *shape)).map(|(line, _)| line)
}

#[test]
fn output_comparison_ignores_numbers_only() {
    let printed = "step    245  held-out loss 2.1821  (0.1 s)\nwritten: a.html\n";
    let shown = "step 5  held-out loss 1.9e-3  (12 s)\n...\nwritten: a.html";
    assert_eq!(missing(shown, printed), None);
    let swapped = "written: a.html\nstep 245  held-out loss 2.1  (1 s)";
    assert_eq!(missing(swapped, printed), Some("step 245  held-out loss 2.1  (1 s)"));
    assert_eq!(missing("written: b.html", printed), Some("written: b.html"));
}

/// Runs all `sh run` blocks in one folder that has the files of the repository that the book reads.
#[cfg(unix)]
#[test]
fn commands_print_documented_output() {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(FOX, bin.join("fox")).unwrap();
    for name in ["fixtures", "docs", "README.md"] {
        symlink(root().join(name), folder.path().join(name)).unwrap();
    }
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let mut run = 0;
    for page in pages() {
        let blocks = page.blocks();
        for (i, block) in blocks.iter().enumerate().filter(|(_, block)| block.info == "sh run") {
            let place = format!("{}:{}", page.name(), block.line);
            let output = Command::new("sh")
                .args(["-euc", &format!("exec 2>&1\n{}", block.text)])
                .current_dir(folder.path())
                .env("PATH", &path)
                .env("NO_COLOR", "1")
                // The documented output is that of a CPU.
                .env("CUDA_VISIBLE_DEVICES", "")
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{place} failed:\n{}\n{printed}", block.text);
            let next = blocks.get(i + 1).filter(|next| next.line <= block.end + 3);
            if let Some(shown) = next.filter(|next| next.info == "text") {
                let missing = missing(&shown.text, &printed);
                assert_eq!(missing, None, "{place} printed something else:\n{printed}");
            }
            run += 1;
        }
    }
    assert!(run >= 15, "only {run} blocks were run");
}
