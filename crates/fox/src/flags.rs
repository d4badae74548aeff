//! The flags of settings that errors of the libraries are about.

use fox_base::Setting;

use crate::output;

/// The message of an error, with the flag or the command that helps.
pub fn error_message(error: &anyhow::Error) -> String {
    let message = output::error_message(error);
    match error.chain().find_map(setting).and_then(remedy) {
        Some(remedy) => format!("{message} ({remedy})"),
        None => message,
    }
}

fn setting(cause: &(dyn std::error::Error + 'static)) -> Option<Setting> {
    let of_training = || cause.downcast_ref::<fox_train::Error>()?.setting();
    let of_evaluation = || cause.downcast_ref::<fox_eval::Error>()?.setting();
    of_training().or_else(of_evaluation)
}

/// The only place that knows which flag stands for a setting.
fn remedy(setting: Setting) -> Option<&'static str> {
    match setting {
        Setting::RunFolder => Some("--out"),
        Setting::Recipe => Some("`fox train --list` shows all"),
        Setting::MaxLength => Some("--max-length"),
        Setting::Shots => Some("--shots"),
        Setting::TaskData => Some("--task-data"),
        Setting::Task => Some("`fox eval tasks --list` names all"),
        Setting::LongBench => Some("--longbench"),
        // Settings that are added later have no flag yet.
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_added_to_library_errors() {
        let error = || fox_train::Error::NotARun { path: "here".into() };
        let want = "here is not empty and holds no run of fox; choose another folder (--out)";
        assert_eq!(error_message(&error().into()), want);
        let inside = anyhow::Error::new(error()).context("first");
        assert!(error_message(&inside).ends_with("(--out)"));
        assert_eq!(error_message(&anyhow::anyhow!("plain")), "plain");
    }
}
