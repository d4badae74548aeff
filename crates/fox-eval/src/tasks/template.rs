//! Jinja templates over the columns of a row.
//!
//! `{{ column }}` stands for a column, `{{ column.field }}` and `{{ column[0] }}` for a field or an element, and filters,
//! methods of Python's strings and tests work as in lm-evaluation-harness; the filters of [`super::filters`] come on top. A
//! template that is a single `{{ ... }}` keeps its value as it is, which may be a list; anything else is text.

use std::sync::OnceLock;

use fox_data::Record;
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use minijinja_contrib::pycompat;
use serde::Deserialize;
use serde_json::Value;

use super::filters;

/// Steps of the interpreter per value.
const MAX_STEPS: u64 = 1_000_000;

/// A valid template.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Template {
    source: String,
}

/// Why a template has no value for a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoValue {
    /// The row has no such column.
    Column(String),
    /// Anything else, in words.
    Other(String),
}

fn environment() -> &'static Environment<'static> {
    static ENVIRONMENT: OnceLock<Environment<'static>> = OnceLock::new();
    ENVIRONMENT.get_or_init(|| {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_keep_trailing_newline(true);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.set_formatter(|output, _, value| {
            let value = serde_json::to_value(value).map_err(|error| other(error.to_string()))?;
            output.write_str(&as_text(&value).map_err(other)?)?;
            Ok(())
        });
        filters::add(&mut environment);
        environment
    })
}

fn other(detail: String) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, detail)
}

/// What is wrong, without the name of the template.
fn words(error: &minijinja::Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), String::from)
}

impl TryFrom<String> for Template {
    type Error = String;

    fn try_from(source: String) -> Result<Self, String> {
        if let Some(name) = old_placeholder(&source) {
            return Err(format!(
                "{source:?} is not a Jinja template; write {{{{ {name} }}}} for {{{name}}}"
            ));
        }
        let checked = environment().template_from_str(&source).map(drop);
        checked
            .map_err(|error| format!("{source:?} is not a Jinja template: {}", words(&error)))?;
        Ok(Template { source })
    }
}

/// The contents of `{name}` in a template without any Jinja.
fn old_placeholder(source: &str) -> Option<&str> {
    if ["{{", "{%", "{#"].iter().any(|mark| source.contains(mark)) {
        return None;
    }
    let (_, rest) = source.split_once('{')?;
    let (name, _) = rest.split_once('}')?;
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_').then_some(name)
}

impl Template {
    /// The value for a row.
    pub fn value(&self, row: &Record) -> Result<Value, NoValue> {
        let Some(expression) = self.expression() else { return self.text(row).map(Value::String) };
        self.check(row)?;
        let failed = |error: minijinja::Error| NoValue::Other(words(&error));
        let value = environment().compile_expression(expression).map_err(failed)?;
        let value = value.eval(row).map_err(failed)?;
        if value.is_undefined() {
            return Err(NoValue::Other(format!("{{{{{expression}}}}} has no value")));
        }
        serde_json::to_value(&value).map_err(|error| NoValue::Other(error.to_string()))
    }

    /// The value as text.
    pub fn text(&self, row: &Record) -> Result<String, NoValue> {
        self.check(row)?;
        let failed = |error: minijinja::Error| NoValue::Other(words(&error));
        environment().template_from_str(&self.source).and_then(|t| t.render(row)).map_err(failed)
    }

    /// The value as a list of texts; a single text is a list of one, and null an empty list.
    pub fn list(&self, row: &Record) -> Result<Vec<String>, NoValue> {
        match self.value(row)? {
            Value::Array(values) => {
                values.iter().map(|value| as_text(value).map_err(NoValue::Other)).collect()
            }
            Value::Null => Ok(Vec::new()),
            other => Ok(vec![as_text(&other).map_err(NoValue::Other)?]),
        }
    }

    /// The expression of a template that is a single `{{ ... }}`.
    fn expression(&self) -> Option<&str> {
        let inside = self.source.strip_prefix("{{")?.strip_suffix("}}")?;
        (!inside.contains("{{") && !inside.contains("}}")).then_some(inside)
    }

    /// An error that names the first column which the template needs and the row does not have.
    fn check(&self, row: &Record) -> Result<(), NoValue> {
        let template = environment().template_from_str(&self.source);
        let mut names: Vec<String> = template
            .map_or_else(|_| Vec::new(), |t| t.undeclared_variables(true).into_iter().collect());
        names.sort();
        for name in names {
            let (column, fields) = name.split_once('.').unwrap_or((&name, ""));
            if environment().globals().any(|(global, _)| global == column) {
                continue;
            }
            let mut value = row.get(column).ok_or_else(|| NoValue::Column(column.into()))?;
            for field in fields.split('.').filter(|field| !field.is_empty()) {
                // A method of a text is not a field.
                let Value::Object(object) = value else { break };
                value = object.get(field).ok_or_else(|| NoValue::Column(name.clone()))?;
            }
        }
        Ok(())
    }
}

/// The text of a single value; a yes or no counts as 1 or 0, as labels do.
pub(super) fn as_text(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(yes) => Ok(u8::from(*yes).to_string()),
        Value::Null => Err("a value is null where text is needed".into()),
        Value::Array(_) | Value::Object(_) => {
            Err("a value is a list or an object where a single text is needed".into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn template(source: &str) -> Template {
        Template::try_from(source.to_string()).unwrap()
    }

    fn row() -> Record {
        let row = json!({
            "q": "why", "n": 3, "yes": true, "none": null, "l": [" a", "b "],
            "c": {"text": ["x", "y"], "label": ["A", "B"]},
        });
        row.as_object().unwrap().clone()
    }

    #[test]
    fn columns_fields_elements_and_methods() {
        let text = |source: &str| template(source).text(&row()).unwrap();
        assert_eq!(text("Question: {{ q }}?\nAnswer:\n"), "Question: why?\nAnswer:\n");
        assert_eq!(text("{{n}}{{yes}}{{l[0]}}{{l[-1]}}{{c.text[1]}}"), "31 ab y");
        assert_eq!(text("{{ q.upper() }} {{ '{}' }} <&>"), "WHY {} <&>");
        assert_eq!(text(""), "");
        assert_eq!(template("{{c.label}}").value(&row()).unwrap(), json!(["A", "B"]));
        assert_eq!(template("{{ l|map('trim')|list }}").list(&row()).unwrap(), ["a", "b"]);
        assert_eq!(template("{{ none }}").list(&row()).unwrap(), Vec::<String>::new());
        assert_eq!(template("{{ q }}").list(&row()).unwrap(), ["why"]);
        assert_eq!(template("{{ q }}{{ n }}").list(&row()).unwrap(), ["why3"]);
        assert_eq!(text("{% for i in range(n) %}{{ i }}{% endfor %}"), "012");
    }

    #[test]
    fn missing_column_is_named() {
        let missing = |source: &str| template(source).text(&row()).unwrap_err();
        assert_eq!(missing("{{ goal }}"), NoValue::Column("goal".into()));
        assert_eq!(missing("{{ goal.strip() }}"), NoValue::Column("goal".into()));
        assert_eq!(missing("{{ c.answer }}"), NoValue::Column("c.answer".into()));
        for other in
            ["{{ l[2] }}", "{{ l }}", "{{ none }}", "{{ q|before('_') }}", "{{ q|nonsense }}"]
        {
            assert!(matches!(missing(other), NoValue::Other(_)), "{other}");
        }
        assert!(matches!(template("{{ l[2] }}").value(&row()), Err(NoValue::Other(_))));
    }

    #[test]
    fn rejects_malformed_templates() {
        for bad in ["{{ q", "{{}}", "{{ q[ }}", "{% if %}"] {
            assert!(Template::try_from(bad.to_string()).is_err(), "{bad}");
        }
        let said = Template::try_from("Q: {question|strip}".to_string()).unwrap_err();
        assert!(said.ends_with("write {{ question|strip }} for {question|strip}"), "{said}");
    }

    /// A template that would run for hours stops with an error.
    #[test]
    fn endless_templates_stop() {
        let source =
            "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}";
        assert!(matches!(template(source).text(&row()), Err(NoValue::Other(_))));
    }
}
