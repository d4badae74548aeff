//! CSV files: names are quoted, numbers are written in the shortest form that reads back as the same value.

use std::fmt::Display;

/// A CSV file under construction.
#[derive(Clone, Debug)]
pub struct Csv {
    text: String,
    row_start: bool,
}

impl Default for Csv {
    fn default() -> Csv {
        Csv { text: String::new(), row_start: true }
    }
}

impl Csv {
    /// A file whose first line is `header`.
    pub fn new(header: &str) -> Csv {
        Csv { text: format!("{header}\n"), row_start: true }
    }

    /// Adds a quoted cell.
    pub fn name(&mut self, name: &str) -> &mut Csv {
        self.value(format_args!("\"{}\"", name.replace('"', "\"\"")))
    }

    /// Adds a cell that needs no quotes: a number, a truth value or a plain word.
    pub fn value(&mut self, value: impl Display) -> &mut Csv {
        if !self.row_start {
            self.text.push(',');
        }
        self.row_start = false;
        self.text += &value.to_string();
        self
    }

    /// Adds a cell that is empty without a value.
    pub fn optional(&mut self, value: Option<impl Display>) -> &mut Csv {
        match value {
            Some(value) => self.value(value),
            None => self.value(""),
        }
    }

    /// Ends the row.
    pub fn end_row(&mut self) {
        self.text.push('\n');
        self.row_start = true;
    }

    /// The whole file.
    pub fn finish(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_names_and_leaves_missing_values_empty() {
        let mut csv = Csv::new("a,b,c,d");
        csv.name("x, \"y\"").value(1.5).optional(None::<f64>).optional(Some(3)).end_row();
        csv.value(1).value(true).end_row();
        assert_eq!(csv.finish(), "a,b,c,d\n\"x, \"\"y\"\"\",1.5,,3\n1,true\n");
    }
}
