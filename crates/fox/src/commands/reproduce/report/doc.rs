//! A document that is written twice: as a self-contained page, and as Markdown with pictures beside it.

use std::path::Path;

use anyhow::Result;
use fox_eval::files::{file_stem, write_whole};
use fox_eval::report::Page;
use fox_plot::standalone;
use serde_json::Value;

/// A document under construction.
pub struct Doc {
    page: Page,
    markdown: String,
    pictures: Vec<(String, String)>,
}

impl Doc {
    /// An empty one with a title and a paragraph.
    pub fn new(title: &str, lead: &str) -> Doc {
        let markdown = format!("# {title}\n\n{lead}\n");
        Doc { page: Page::new(title, lead), markdown, pictures: Vec::new() }
    }

    /// A heading.
    pub fn heading(&mut self, text: &str) {
        self.page.heading(text);
        self.markdown += &format!("\n## {text}\n");
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) {
        self.page.text(text);
        self.markdown += &format!("\n{text}\n");
    }

    /// Figures that stand out.
    pub fn facts(&mut self, facts: &[(String, String)]) {
        self.page.facts(facts);
        self.markdown.push('\n');
        for (value, meaning) in facts {
            self.markdown += &format!("- **{value}** {meaning}\n");
        }
    }

    /// A table; the first row is its head.
    pub fn table(&mut self, rows: &[Vec<String>]) {
        self.page.table(rows);
        self.markdown.push('\n');
        for (r, row) in rows.iter().enumerate() {
            let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "/")).collect();
            self.markdown += &format!("| {} |\n", cells.join(" | "));
            if r == 0 {
                let columns = row.len().saturating_sub(1);
                self.markdown += &format!("|---|{}\n", "---:|".repeat(columns));
            }
        }
    }

    /// Pictures, each with a name for its file.
    pub fn pictures(&mut self, pictures: Vec<(String, String)>) {
        let fragments: Vec<String> = pictures.iter().map(|(_, svg)| svg.clone()).collect();
        self.page.charts(&fragments);
        for (name, svg) in pictures {
            let file = format!("pictures/{}.svg", file_stem(&name));
            self.markdown += &format!("\n![{name}]({file})\n");
            self.pictures.push((file, svg));
        }
    }

    /// Lines as they are.
    pub fn code(&mut self, text: &str) {
        self.page.code(text);
        self.markdown += &format!("\n```sh\n{text}\n```\n");
    }

    /// Writes all files.
    pub fn write(mut self, out: &Path, numbers: &Value) -> Result<()> {
        for (file, svg) in &self.pictures {
            write_whole(&out.join(file), standalone(svg).as_bytes())?;
        }
        self.page.footer("Made by fox reproduce. The numbers are in report.json beside this page.");
        write_whole(&out.join("report.html"), self.page.html().as_bytes())?;
        write_whole(&out.join("report.md"), self.markdown.as_bytes())?;
        Ok(write_whole(&out.join("report.json"), &serde_json::to_vec_pretty(numbers)?)?)
    }
}
