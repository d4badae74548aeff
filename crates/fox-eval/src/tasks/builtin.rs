//! The tasks that come with the program.

use std::path::Path;

use fox_base::Setting;

use super::longbench::{self, LongBench};
use super::metrics::similarity;
use super::spec::TaskSpec;
use crate::{Error, Result};

/// Names and files, in the order of the paper's table.
const FILES: [(&str, &str); 11] = [
    ("wikitext", include_str!("../../tasks/wikitext.toml")),
    ("lambada_openai", include_str!("../../tasks/lambada_openai.toml")),
    ("piqa", include_str!("../../tasks/piqa.toml")),
    ("hellaswag", include_str!("../../tasks/hellaswag.toml")),
    ("winogrande", include_str!("../../tasks/winogrande.toml")),
    ("arc_easy", include_str!("../../tasks/arc_easy.toml")),
    ("arc_challenge", include_str!("../../tasks/arc_challenge.toml")),
    ("copa", include_str!("../../tasks/copa.toml")),
    ("openbookqa", include_str!("../../tasks/openbookqa.toml")),
    ("sciq", include_str!("../../tasks/sciq.toml")),
    ("boolq", include_str!("../../tasks/boolq.toml")),
];

/// Names that are less alike than this are not meant.
const ALIKE: f64 = 0.6;

/// Names of the short tasks, in the order of the paper's table.
pub fn names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

/// The task called `name`, or the one in the task file of that name. Tasks of LongBench need its
/// configuration.
pub fn find(name: &str, longbench: Option<&LongBench>) -> Result<TaskSpec> {
    if let Some((name, text)) = FILES.iter().find(|(known, _)| *known == name) {
        return TaskSpec::parse(text, name)
            .map_err(|detail| Error::BadFile { path: format!("{name}.toml").into(), detail });
    }
    if longbench::NAMES.contains(&name) {
        let configuration = longbench.ok_or_else(|| {
            let detail = format!(
                "{name} is a task of LongBench; name the folder of its dataset2prompt.json and dataset2maxlen.json"
            );
            Error::of_setting(Setting::LongBench, detail)
        })?;
        return configuration.task(name);
    }
    if name.ends_with(".toml") {
        return TaskSpec::from_file(Path::new(name));
    }
    let known = names().chain(longbench::NAMES);
    let nearest = known
        .map(|known| (similarity(name, known), known))
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(alike, _)| *alike >= ALIKE);
    let remedy = match nearest {
        Some((_, known)) => format!("did you mean {known}?"),
        None => "a file ending in .toml is a task of your own".into(),
    };
    Err(Error::of_setting(Setting::Task, format!("there is no task {name}; {remedy}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_task_files_are_valid() {
        for name in names() {
            let spec = find(name, None).unwrap();
            assert_eq!(spec.name, name);
            assert!(!spec.about.is_empty());
        }
    }

    #[test]
    fn unknown_names_get_the_nearest() {
        let said = |name: &str| find(name, None).unwrap_err().to_string();
        assert_eq!(said("helaswag"), "there is no task helaswag; did you mean hellaswag?");
        assert_eq!(said("arc-easy"), "there is no task arc-easy; did you mean arc_easy?");
        assert!(said("zzz").contains("a file ending in .toml"));
        assert!(said("trec").contains("dataset2prompt.json"));
        assert!(said("none.toml").starts_with("cannot read none.toml"));
    }
}
