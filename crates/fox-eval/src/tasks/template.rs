//! How texts are made from the columns of a row.
//!
//! `{column}` stands for a column, `{column.field}` for a field of an object, `{column[0]}` and
//! `{column[-1]}` for an element of a list; `{column|filter|filter:argument}` passes it through filters (see
//! [`Filter`]). `{{` and `}}` are braces. A template that is a single `{...}` keeps its value as it is, which
//! may be a list; anything else is text.

use fox_data::Record;
use serde::Deserialize;
use serde_json::Value;

use super::filters::Filter;

/// A parsed template.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Template {
    source: String,
    fragments: Vec<Fragment>,
}

#[derive(Clone, Debug, PartialEq)]
enum Fragment {
    Text(String),
    Value(Expression),
}

#[derive(Clone, Debug, PartialEq)]
struct Expression {
    column: String,
    steps: Vec<Step>,
    filters: Vec<Filter>,
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Field(String),
    Index(i64),
}

/// Why a template has no value for a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoValue {
    /// The row has no such column.
    Column(String),
    /// Anything else, in words.
    Other(String),
}

impl TryFrom<String> for Template {
    type Error = String;

    fn try_from(source: String) -> Result<Self, String> {
        let mut fragments = Vec::new();
        let mut text = String::new();
        let mut rest = source.as_str();
        while let Some(at) = rest.find(['{', '}']) {
            text.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(behind) = rest.strip_prefix(brace) {
                text.push_str(brace);
                rest = behind;
                continue;
            }
            let end = rest.find('}').filter(|_| brace == "{");
            let end = end.ok_or_else(|| {
                format!("a brace without its partner in {source:?}; {{{{ and }}}} are braces")
            })?;
            if !text.is_empty() {
                fragments.push(Fragment::Text(std::mem::take(&mut text)));
            }
            fragments.push(Fragment::Value(Expression::parse(&rest[..end])?));
            rest = &rest[end + 1..];
        }
        text.push_str(rest);
        if !text.is_empty() {
            fragments.push(Fragment::Text(text));
        }
        Ok(Template { source, fragments })
    }
}

impl Template {
    /// The value for a row.
    pub fn value(&self, row: &Record) -> Result<Value, NoValue> {
        match &self.fragments[..] {
            [Fragment::Value(expression)] => expression.value(row),
            _ => self.text(row).map(Value::String),
        }
    }

    /// The value as text.
    pub fn text(&self, row: &Record) -> Result<String, NoValue> {
        let mut text = String::new();
        for part in &self.fragments {
            match part {
                Fragment::Text(part) => text.push_str(part),
                Fragment::Value(expression) => text.push_str(&as_text(&expression.value(row)?)?),
            }
        }
        Ok(text)
    }

    /// The value as a list of texts; a single text is a list of one, and null an empty list.
    pub fn list(&self, row: &Record) -> Result<Vec<String>, NoValue> {
        match self.value(row)? {
            Value::Array(values) => values.iter().map(as_text).collect(),
            Value::Null => Ok(Vec::new()),
            other => Ok(vec![as_text(&other)?]),
        }
    }

    /// As it was written.
    pub fn source(&self) -> &str {
        &self.source
    }
}

/// The text of a single value; a yes or no counts as 1 or 0, as labels do.
fn as_text(value: &Value) -> Result<String, NoValue> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(yes) => Ok(u8::from(*yes).to_string()),
        Value::Null => Err(NoValue::Other("is null where text is needed".into())),
        Value::Array(_) | Value::Object(_) => {
            Err(NoValue::Other("is a list or an object where a single text is needed".into()))
        }
    }
}

impl Expression {
    fn parse(text: &str) -> Result<Self, String> {
        let mut fragments = text.split('|');
        let path = fragments.next().unwrap_or_default().trim();
        let end = path.find(['.', '[']).unwrap_or(path.len());
        let (column, mut rest) = path.split_at(end);
        if column.is_empty() {
            return Err(format!("{{{text}}} names no column"));
        }
        let mut steps = Vec::new();
        while !rest.is_empty() {
            if let Some(behind) = rest.strip_prefix('.') {
                let end = behind.find(['.', '[']).unwrap_or(behind.len());
                steps.push(Step::Field(behind[..end].to_string()));
                rest = &behind[end..];
            } else {
                let inside = rest.strip_prefix('[').and_then(|r| r.split_once(']'));
                let index = inside.and_then(|(i, r)| Some((i.parse().ok()?, r)));
                let (index, behind) =
                    index.ok_or_else(|| format!("{{{text}}}: an index is a number in [ ]"))?;
                steps.push(Step::Index(index));
                rest = behind;
            }
        }
        let filters = fragments.map(Filter::parse).collect::<Result<_, _>>()?;
        Ok(Expression { column: column.to_string(), steps, filters })
    }

    fn value(&self, row: &Record) -> Result<Value, NoValue> {
        let mut value =
            row.get(&self.column).ok_or_else(|| NoValue::Column(self.column.clone()))?;
        for step in &self.steps {
            let next = match (step, value) {
                (Step::Field(name), Value::Object(fields)) => fields.get(name),
                (Step::Index(i), Value::Array(values)) => {
                    let from_end = if *i < 0 { values.len() as i64 } else { 0 };
                    usize::try_from(i + from_end).ok().and_then(|i| values.get(i))
                }
                _ => None,
            };
            value = next.ok_or_else(|| match step {
                Step::Field(name) => NoValue::Column(format!("{}.{name}", self.column)),
                Step::Index(i) => NoValue::Other(format!("{:?} has no element {i}", self.column)),
            })?;
        }
        let mut value = value.clone();
        for filter in &self.filters {
            value = filtered(filter, &value).map_err(|why| {
                NoValue::Other(format!("column {:?} {}", self.column, words(why)))
            })?;
        }
        Ok(value)
    }
}

/// Lists are filtered element by element.
fn filtered(filter: &Filter, value: &Value) -> Result<Value, NoValue> {
    match value {
        Value::Array(values) => values.iter().map(|v| filtered(filter, v)).collect(),
        single => filter.apply(&as_text(single)?).map(Value::String).map_err(NoValue::Other),
    }
}

fn words(why: NoValue) -> String {
    match why {
        NoValue::Column(name) => format!("has no field {name:?}"),
        NoValue::Other(words) => words,
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
    fn columns_fields_elements_and_braces() {
        let text = |source: &str| template(source).text(&row()).unwrap();
        assert_eq!(text("Question: {q}?\nAnswer:"), "Question: why?\nAnswer:");
        assert_eq!(text("{n}{yes}{l[0]}{l[-1]}{c.text[1]}"), "31 ab y");
        assert_eq!(text("{{{q}}} {{}}"), "{why} {}");
        assert_eq!(text(""), "");
        assert_eq!(template("{c.label}").value(&row()).unwrap(), json!(["A", "B"]));
        assert_eq!(template("{l|strip}").list(&row()).unwrap(), ["a", "b"]);
        assert_eq!(template("{none}").list(&row()).unwrap(), Vec::<String>::new());
        assert_eq!(template("{q}").list(&row()).unwrap(), ["why"]);
    }

    #[test]
    fn missing_column_is_named() {
        let missing = |source: &str| template(source).text(&row()).unwrap_err();
        assert_eq!(missing("{goal}"), NoValue::Column("goal".into()));
        assert_eq!(missing("{c.answer}"), NoValue::Column("c.answer".into()));
        assert_eq!(missing("{l[2]}"), NoValue::Other("\"l\" has no element 2".into()));
        assert!(matches!(missing("{l}"), NoValue::Other(_)));
        assert!(matches!(missing("{none}"), NoValue::Other(_)));
        assert!(matches!(missing("{q|before:_}"), NoValue::Other(_)));
    }

    #[test]
    fn rejects_malformed_templates() {
        for bad in ["{q", "q}", "{}", "{q[x]}", "{q|nonsense}", "{q[0}"] {
            assert!(Template::try_from(bad.to_string()).is_err(), "{bad}");
        }
    }
}
