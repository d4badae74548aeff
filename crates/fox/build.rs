//! Tells `fox --version` of which commit it is and with which features.

use std::path::Path;
use std::process::Command;

/// What git prints, without the line's end; nothing outside of a checkout.
fn git(words: &[&str]) -> Option<String> {
    let output = Command::new("git").args(words).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The log of HEAD grows with every commit and checkout.
    for name in ["HEAD", "logs/HEAD"] {
        if let Some(path) =
            git(&["rev-parse", "--git-path", name]).filter(|p| Path::new(p).exists())
        {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    // A folder unpacked inside somebody else's checkout is not of that commit.
    let own = git(&["ls-files", "--error-unmatch", "build.rs"]).is_some();
    let commit = own.then(|| git(&["rev-parse", "--short=9", "HEAD"])).flatten();
    let mut facts = vec![commit.unwrap_or_else(|| "no commit".to_owned())];
    for feature in ["hf-tokenizers", "parquet", "parquet-zstd"] {
        let variable = format!("CARGO_FEATURE_{}", feature.to_uppercase().replace('-', "_"));
        if std::env::var_os(variable).is_some() {
            facts.push(feature.to_owned());
        }
    }
    println!("cargo::rustc-env=FOX_BUILD={}", facts.join(", "));
}
