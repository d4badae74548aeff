//! `fox train --list`: recipes, families, variants and sweeps, in sections.

use anyhow::Result;
use fox_train::recipe;

/// Columns of the list, and of its names.
const COLUMNS: usize = 80;
const NAMES: usize = 26;

/// Sections of single recipes: title, and how the names of its recipes begin.
const RECIPES: &[(&str, &[&str])] = &[
    ("Small, on the embedded corpus: fox train NAME", &["tiny-"]),
    ("Your own text: fox train NAME --data TEXT", &["books-"]),
    ("Published sizes: fox train NAME --data SHARDS", &["samba-", "transformer-llama-"]),
    ("Longer sequences for a checkpoint: fox train NAME --init CHECKPOINT", &["long-context"]),
    ("Small tasks: fox train NAME+MODEL, e.g. task-mqar+fox-pro", &["task-"]),
];
const NEEDS_CHECKPOINT: &str = "long-context";

/// Sections of variants: title, and how their names begin. The last one has all others.
const VARIANTS: &[(&str, &[&str])] = &[
    ("Models", &["fox-", "transformer-", "delta-net", "gated-delta", "hgrn2", "mamba2", "stick-"]),
    (
        "Forget gates",
        &[
            "forget-gate",
            "no-forget",
            "bias-only",
            "fixed",
            "shared-gate",
            "spread",
            "published",
            "memory",
        ],
    ),
    (
        "Parts of a block",
        &["kv-shift", "no-kv", "output-", "no-output", "qk-", "no-qk", "rope", "no-rope", "window"],
    ),
    ("Training", &[""]),
];

/// The list.
pub fn list() -> Result<String> {
    let mut text = String::new();
    let mut left: Vec<&str> = recipe::listed_names().collect();
    for (title, starts) in RECIPES {
        heading(&mut text, title);
        let belongs = |name: &&str| {
            let long = name.contains(NEEDS_CHECKPOINT);
            starts.iter().any(|start| {
                if *start == NEEDS_CHECKPOINT { long } else { !long && name.starts_with(start) }
            })
        };
        for name in left.iter().copied().filter(belongs) {
            entry(&mut text, name, &recipe::load(name, &[])?.description);
        }
        left.retain(|name| !belongs(name));
    }
    if !left.is_empty() {
        heading(&mut text, "Other recipes");
        for name in left {
            entry(&mut text, name, &recipe::load(name, &[])?.description);
        }
    }
    heading(&mut text, "Families: FAMILY-SIZE, e.g. fox-pro-125m");
    for family in recipe::families()? {
        let about = format!("{}: {}", family.description, family.sizes.join(", "));
        entry(&mut text, &family.name, &about);
    }
    variants(&mut text)?;
    heading(&mut text, "Sweeps: fox sweep NAME --out DIR");
    for (name, _) in fox_lab::sweep::SWEEPS {
        entry(&mut text, name, &fox_lab::sweep::SweepList::load(name)?.description);
    }
    Ok(text)
}

/// The variants; those that differ in a number alone are one entry.
fn variants(text: &mut String) -> Result<()> {
    let mut families: Vec<(String, Vec<u64>, String)> = Vec::new();
    for variant in recipe::variants()? {
        let number = variant
            .name
            .rsplit_once('-')
            .and_then(|(stem, end)| Some((stem.to_string(), end.parse::<u64>().ok()?)));
        let (stem, number) = number.map_or((variant.name.clone(), None), |(s, n)| (s, Some(n)));
        let same = |(name, numbers, _): &&mut (String, Vec<u64>, String)| {
            *name == stem && !numbers.is_empty() && number.is_some()
        };
        match (families.iter_mut().find(same), number) {
            (Some(family), Some(number)) => family.1.push(number),
            (_, number) => families.push((stem, number.into_iter().collect(), variant.about)),
        }
    }
    for (section, starts) in VARIANTS {
        heading(text, &format!("Variants, RECIPE+VARIANT: {section}"));
        let belongs = |name: &str| starts.iter().any(|start| name.starts_with(start));
        for (name, numbers, about) in families.iter_mut().filter(|family| belongs(&family.0)) {
            numbers.sort_unstable();
            match numbers.as_slice() {
                [] => entry(text, &format!("+{name}"), about),
                [one] => entry(text, &format!("+{name}-{one}"), about),
                many => {
                    let first = many.iter().find(|n| about.contains(&n.to_string()));
                    let about = first.map_or(about.clone(), |n| about.replace(&n.to_string(), "N"));
                    let all: Vec<String> = many.iter().map(u64::to_string).collect();
                    entry(text, &format!("+{name}-N"), &format!("{about} (N: {})", all.join(", ")));
                }
            }
        }
        families.retain(|family| !belongs(&family.0));
    }
    Ok(())
}

fn heading(text: &mut String, title: &str) {
    if !text.is_empty() {
        text.push('\n');
    }
    *text += &format!("{title}\n");
}

/// A name and its description, which wraps.
fn entry(text: &mut String, name: &str, about: &str) {
    let mut line = format!("  {name:<NAMES$}");
    // A long name has a separate line.
    if name.chars().count() > NAMES {
        *text += &format!("  {name}\n");
        line = " ".repeat(NAMES + 2);
    }
    let mut fresh = true;
    for word in about.split_whitespace() {
        if !fresh && line.chars().count() + 1 + word.chars().count() > COLUMNS {
            *text += &format!("{line}\n");
            line = " ".repeat(NAMES + 2);
        }
        line.push(' ');
        line.push_str(word);
        fresh = false;
    }
    *text += &format!("{}\n", line.trim_end());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_complete_and_narrow() {
        let text = list().unwrap();
        for line in text.lines() {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
        for name in recipe::listed_names() {
            assert_eq!(
                text.matches(&format!("\n  {name} ")).count()
                    + text.matches(&format!("\n  {name}\n")).count(),
                1,
                "{name}"
            );
        }
        assert!(text.contains("\n  +bias-only-N ") && text.contains("(N: 64, 256, 1024"), "{text}");
        assert!(text.contains("\n  +rope ") && text.contains("\n  +wsd "), "{text}");
        assert!(!text.contains("Other recipes"), "{text}");
        for base in ["published ", "shared-1m", "shared-26m"] {
            assert!(!text.contains(&format!("\n  {base}")), "{base} is only extended by others");
        }
    }
}
