//! Where a report comes from: version, machine, date and command.

use std::sync::OnceLock;
use std::time::SystemTime;

use fox_base::utc;

static VERSION: OnceLock<&'static str> = OnceLock::new();

/// Sets the version that reports name: the program's, which knows its commit.
pub fn set_version(version: &'static str) {
    let _ = VERSION.set(version);
}

/// The command line of this process, as a shell would read it.
pub fn command() -> String {
    let words = std::env::args().skip(1).map(|word| quoted(&word));
    std::iter::once("fox".to_string()).chain(words).collect::<Vec<_>>().join(" ")
}

/// The last line of a report made now on `device` by `command`; `numbers` says where its figures are.
pub fn footer(device: &str, command: &str, numbers: &str) -> String {
    let version = VERSION.get().copied().unwrap_or(env!("CARGO_PKG_VERSION"));
    let date = utc::date(SystemTime::now());
    format!(
        "Made by fox {version} on {date}, on {}, with: {command} \u{2014} {numbers}",
        machine(device)
    )
}

/// The processor and the number of its cores, and the device if it is another one.
pub fn machine(device: &str) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = cpu_name(&info).unwrap_or(std::env::consts::ARCH);
    let cpu = format!("{cpu} ({cores} cores)");
    match device.starts_with("cpu") || device.is_empty() {
        true => cpu,
        false => format!("{device} beside {cpu}"),
    }
}

fn cpu_name(info: &str) -> Option<&str> {
    let line = info.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']).trim()).filter(|name| !name.is_empty())
}

/// A word in quotes if a shell would split or expand it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn footers_have_version_date_and_command() {
        let text = footer("cpu", "fox demo", "numbers beside it.");
        assert!(text.starts_with(concat!("Made by fox ", env!("CARGO_PKG_VERSION"), " on 2")));
        assert!(text.contains("cores), with: fox demo"), "{text}");
        assert!(machine("cuda:0 H100").starts_with("cuda:0 H100 beside "));
        assert_eq!(cpu_name("x: 1\nmodel name\t: A CPU \n"), Some("A CPU"));
        assert_eq!(
            [quoted("a b"), quoted("--x=1"), quoted("it's")],
            ["'a b'", "--x=1", "'it'\\''s'"]
        );
    }
}
