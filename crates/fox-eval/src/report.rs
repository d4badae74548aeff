//! A document of text, tables and charts, as HTML, Markdown, JSON and terminal text.
//!
//! The HTML is one self-contained file for phones and desks, light and dark. The Markdown refers to `pictures/*.svg`.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

use fox_plot::{STYLE, escape, ink_on, sequential, standalone};
use serde_json::Value;

use crate::Result;
use crate::files::{file_stem, write_whole};

const PAGE_STYLE: &str = "\
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);\
font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;-webkit-text-size-adjust:100%}\
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}h1{font-size:1.7rem;line-height:1.2;margin:.2em 0 .3em}\
h2{font-size:1.2rem;margin:2.2em 0 .5em;padding-top:.6em;border-top:1px solid var(--edge)}p{max-width:46em;margin:.5em 0}\
.lead{color:var(--dim)}.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px;margin:14px 0;align-items:start}\
.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px;min-width:0;max-width:640px}\
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0}\
.fact{border:1px solid var(--edge);border-radius:10px;padding:10px 12px;background:var(--card)}\
.fact b{display:block;font-size:1.35rem;line-height:1.25}.fact span{color:var(--dim);font-size:.85rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:8px 0}\
th,td{padding:5px 12px 5px 0;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid)}\
th:first-child,td:first-child{text-align:left}th{color:var(--dim);font-weight:600}\
pre{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px;overflow-x:auto;\
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}pre.prose{white-space:pre-wrap}\
.tokens{font:13px/2 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}\
.tokens span{padding:2px 1px;border-radius:3px;white-space:pre-wrap}footer{color:var(--dim);font-size:.85rem;margin-top:3em;overflow-wrap:anywhere}\
@media (max-width:480px){body{font-size:15px}main{padding:14px 12px 48px}.card{padding:8px}\
table{font-size:.8rem}th,td{padding:5px 7px 5px 0}\
.wide,.wide tbody,.wide tr{display:block}.wide tr:first-child{display:none}.wide tr{padding:6px 0}\
.wide td{display:flex;justify-content:space-between;gap:10px;padding:2px 0}.wide td:first-child{font-weight:600}\
.wide td::before{content:attr(data-of);color:var(--dim);font-weight:400}}";

/// Tables of more columns are lists of figures on a phone.
const PHONE_COLUMNS: usize = 4;

/// A table as rows of cells, its head first.
pub type Table = Vec<Vec<String>>;

#[derive(Clone, Debug)]
enum Block {
    Heading(String),
    Text(String),
    Facts(Vec<(String, String)>),
    Table(Table),
    /// Names and SVG fragments.
    Charts(Vec<(String, String)>),
    Code(String),
    Prose(String),
    Tokens(Vec<(String, f64)>),
    Footer(String),
}

/// A document.
#[derive(Clone, Debug, Default)]
pub struct Report {
    title: String,
    lead: String,
    blocks: Vec<Block>,
    numbers: Value,
}

impl Report {
    /// A report with a title and a first paragraph.
    pub fn new(title: &str, lead: &str) -> Report {
        Report { title: title.to_string(), lead: lead.to_string(), ..Report::default() }
    }

    /// Sets the numbers that the JSON file contains.
    pub fn set_numbers(&mut self, numbers: Value) -> &mut Self {
        self.numbers = numbers;
        self
    }

    fn add(&mut self, block: Block) -> &mut Self {
        self.blocks.push(block);
        self
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) -> &mut Self {
        self.add(Block::Heading(text.to_string()))
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.add(Block::Text(text.to_string()))
    }

    /// Adds large figures, each with its meaning.
    pub fn facts(&mut self, facts: &[(String, String)]) -> &mut Self {
        self.add(Block::Facts(facts.to_vec()))
    }

    /// Adds a table; the first row is its head. On a phone each row of a wide table becomes a list.
    pub fn table(&mut self, rows: &[Vec<String>]) -> &mut Self {
        self.add(Block::Table(rows.to_vec()))
    }

    /// Adds SVG fragments of [`fox_plot`], side by side where there is room.
    pub fn charts(&mut self, fragments: &[String]) -> &mut Self {
        let chart = |(i, svg): (usize, &String)| {
            (format!("figure {}-{}", self.blocks.len() + 1, i + 1), svg.clone())
        };
        self.named_charts(fragments.iter().enumerate().map(chart).collect())
    }

    /// The same with a name for each, which becomes that of its file; a name that is taken gets a number.
    pub fn named_charts(&mut self, mut charts: Vec<(String, String)>) -> &mut Self {
        let known = self.blocks.iter().filter_map(|block| match block {
            Block::Charts(charts) => Some(charts),
            _ => None,
        });
        let mut files: HashSet<String> =
            known.flatten().map(|(name, _)| picture_file(name)).collect();
        for (name, _) in &mut charts {
            let given = name.clone();
            let mut number = 1;
            while !files.insert(picture_file(name)) {
                number += 1;
                *name = format!("{given} {number}");
            }
        }
        self.add(Block::Charts(charts))
    }

    /// Adds preformatted lines, such as commands.
    pub fn code(&mut self, text: &str) -> &mut Self {
        self.add(Block::Code(text.to_string()))
    }

    /// Adds generated text, wrapped at the width of the screen.
    pub fn sample(&mut self, text: &str) -> &mut Self {
        self.add(Block::Prose(text.to_string()))
    }

    /// Adds tokens, each on a background color for its value from 0 to 1.
    pub fn tokens(&mut self, tokens: &[(String, f64)]) -> &mut Self {
        self.add(Block::Tokens(tokens.to_vec()))
    }

    /// Adds a footer.
    pub fn footer(&mut self, text: &str) -> &mut Self {
        self.add(Block::Footer(text.to_string()))
    }

    /// Writes `report.html`, `report.md`, `report.json` and `pictures/` into a folder.
    pub fn write(&self, folder: &Path) -> Result<()> {
        for block in &self.blocks {
            let Block::Charts(charts) = block else { continue };
            for (name, svg) in charts {
                write_whole(&folder.join(picture_file(name)), standalone(svg).as_bytes())?;
            }
        }
        write_whole(&folder.join("report.html"), self.html().as_bytes())?;
        write_whole(&folder.join("report.md"), self.markdown().as_bytes())?;
        write_whole(&folder.join("report.json"), self.json().as_bytes())
    }

    /// The numbers as JSON.
    pub fn json(&self) -> String {
        format!("{:#}\n", self.numbers)
    }

    /// The self-contained page.
    pub fn html(&self) -> String {
        let (title, lead) = (escape(&self.title), escape(&self.lead));
        let mut body = format!("<h1>{title}</h1>\n<p class=\"lead\">{lead}</p>\n");
        self.blocks.iter().for_each(|block| block.html(&mut body));
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
             <style>{STYLE}{PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        )
    }

    /// The Markdown; charts are links to their files. A report without a title starts with its first block.
    pub fn markdown(&self) -> String {
        let mut text = match self.title.as_str() {
            "" => String::new(),
            title => format!("# {title}\n\n{}\n", self.lead),
        };
        for block in &self.blocks {
            if !text.is_empty() {
                text.push('\n');
            }
            block.markdown(&mut text);
        }
        text
    }

    /// Tables and paragraphs for a terminal.
    pub fn terminal(&self) -> String {
        let mut text = String::new();
        for block in &self.blocks {
            match block {
                Block::Heading(line) | Block::Text(line) => text += &format!("{line}\n"),
                Block::Table(rows) => text += &text_table(rows),
                _ => {}
            }
        }
        text
    }
}

impl Block {
    // Writing to a String cannot fail.
    fn html(&self, body: &mut String) {
        match self {
            Block::Heading(text) => _ = writeln!(body, "<h2>{}</h2>", escape(text)),
            Block::Text(text) => _ = writeln!(body, "<p>{}</p>", escape(text)),
            Block::Footer(text) => _ = writeln!(body, "<footer>{}</footer>", escape(text)),
            Block::Code(text) => _ = writeln!(body, "<pre>{}</pre>", escape_lines(text)),
            Block::Prose(text) => {
                let _ = writeln!(body, "<pre class=\"prose\">{}</pre>", escape_lines(text));
            }
            Block::Facts(facts) => {
                body.push_str("<div class=\"facts\">");
                for (value, meaning) in facts {
                    let (value, meaning) = (escape(value), escape(meaning));
                    let _ = write!(
                        body,
                        "<div class=\"fact\"><b>{value}</b><span>{meaning}</span></div>"
                    );
                }
                body.push_str("</div>\n");
            }
            Block::Charts(charts) => {
                body.push_str("<div class=\"cards\">");
                for ((_, svg), rows) in charts.iter().zip(row_spans(charts)) {
                    let span = match rows {
                        1 => String::new(),
                        rows => format!(" style=\"grid-row:span {rows}\""),
                    };
                    let _ = write!(body, "<div class=\"card\"{span}>{svg}</div>");
                }
                body.push_str("</div>\n");
            }
            Block::Table(rows) => html_table(rows, body),
            Block::Tokens(tokens) => {
                body.push_str("<div class=\"card tokens\">");
                for (text, value) in tokens {
                    let color = sequential(*value);
                    let ([r, g, b], ink) = (color, ink_on(color));
                    let text = escape(&text.replace('\n', "\u{21b5}"));
                    let _ = write!(
                        body,
                        "<span style=\"background:rgb({r},{g},{b});color:{ink}\" title=\"{value:.3}\">{text}</span>",
                    );
                }
                body.push_str("</div>\n");
            }
        }
    }

    fn markdown(&self, out: &mut String) {
        match self {
            Block::Heading(text) => _ = writeln!(out, "## {text}"),
            Block::Text(text) | Block::Footer(text) => _ = writeln!(out, "{text}"),
            Block::Code(text) => _ = writeln!(out, "```sh\n{}\n```", text.trim_end()),
            Block::Prose(text) => _ = writeln!(out, "```\n{}\n```", text.trim_end()),
            Block::Facts(facts) => {
                for (value, meaning) in facts {
                    let _ = writeln!(out, "- **{value}** {meaning}");
                }
            }
            Block::Charts(charts) => {
                let links =
                    charts.iter().map(|(name, _)| format!("![{name}]({})\n", picture_file(name)));
                *out += &links.collect::<Vec<_>>().join("\n");
            }
            Block::Table(rows) => markdown_table(rows, out),
            Block::Tokens(tokens) => {
                let text: String = tokens.iter().map(|(text, _)| text.as_str()).collect();
                let _ = writeln!(out, "```\n{text}\n```");
            }
        }
    }
}

fn html_table(rows: &[Vec<String>], body: &mut String) {
    let head = rows.first().map_or(&[][..], Vec::as_slice);
    let wide = head.len() > PHONE_COLUMNS;
    body.push_str("<div class=\"scroll\">");
    body.push_str(if wide { "<table class=\"wide\">" } else { "<table>" });
    for (r, row) in rows.iter().enumerate() {
        body.push_str("<tr>");
        for (c, cell) in row.iter().enumerate() {
            let cell = escape(cell);
            let _ = match head.get(c).filter(|_| wide && r > 0) {
                _ if r == 0 => write!(body, "<th>{cell}</th>"),
                Some(of) => write!(body, "<td data-of=\"{}\">{cell}</td>", escape(of)),
                None => write!(body, "<td>{cell}</td>"),
            };
        }
        body.push_str("</tr>");
    }
    body.push_str("</table></div>\n");
}

fn markdown_table(rows: &[Vec<String>], out: &mut String) {
    for (r, row) in rows.iter().enumerate() {
        let cell = |cell: &String| match cell.as_str() {
            "" => " |".to_string(),
            text => format!(" {} |", text.replace('|', "/")),
        };
        let _ = writeln!(out, "|{}", row.iter().map(cell).collect::<String>());
        if r == 0 {
            let _ = writeln!(out, "|---|{}", "---:|".repeat(row.len().saturating_sub(1)));
        }
    }
}

/// Rows of the grid that each chart takes, from its height: small charts fill the space beside a tall one.
fn row_spans(charts: &[(String, String)]) -> Vec<usize> {
    let height = |svg: &str| -> Option<f64> {
        svg.split(" height=\"").nth(1)?.split('"').next()?.parse().ok()
    };
    let heights: Vec<f64> = charts.iter().map(|(_, svg)| height(svg).unwrap_or(1.0)).collect();
    let least = heights.iter().copied().fold(f64::INFINITY, f64::min).max(1.0);
    heights.iter().map(|height| ((height / least).round() as usize).clamp(1, 12)).collect()
}

/// Columns of a terminal that tables fit into.
const COLUMNS: usize = 80;

/// A table with aligned columns: the first to the left, the others to the right. One that is too wide for a terminal has
/// cells of several lines; where even single words are too wide, rows become columns, or else lists below their first
/// cells.
pub fn text_table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest = |c: usize, measure: &dyn Fn(&str) -> usize| {
        rows.iter().filter_map(|row| row.get(c)).map(|cell| measure(cell)).max().unwrap_or(0)
    };
    let longest_word = |cell: &str| cell.split(' ').map(width).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..columns).map(|c| widest(c, &width)).collect();
    let least: Vec<usize> = (0..columns).map(|c| widest(c, &longest_word)).collect();
    // Two columns are names and values, which may be paths.
    while columns > 2 && widths.iter().sum::<usize>() + 2 * (columns - 1) > COLUMNS {
        let wide = (0..columns).filter(|c| widths[*c] > least[*c]).max_by_key(|c| widths[*c]);
        match wide {
            Some(c) => widths[c] -= 1,
            None => return turned_table(rows).unwrap_or_else(|| text_lists(rows)),
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: Vec<Vec<String>> =
            row.iter().enumerate().map(|(c, cell)| broken(cell, widths[c])).collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(0).max(1);
        for l in 0..height {
            let aligned = cells.iter().enumerate().map(|(c, lines)| {
                let line = lines.get(l).map_or("", String::as_str);
                match c {
                    0 => format!("{line:<width$}", width = widths[c]),
                    _ => format!("{line:>width$}", width = widths[c]),
                }
            });
            text.push_str(aligned.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
    }
    text
}

/// The table with rows as columns, if it is narrow enough.
fn turned_table(rows: &[Vec<String>]) -> Option<String> {
    let columns = rows.iter().map(Vec::len).max()?;
    let cell = |row: &Vec<String>, c: usize| row.get(c).cloned().unwrap_or_default();
    let turned: Vec<Vec<String>> =
        (0..columns).map(|c| rows.iter().map(|row| cell(row, c)).collect()).collect();
    let widest = |c: usize| turned.iter().map(|row| width(&row[c])).max().unwrap_or(0);
    let total: usize = (0..rows.len()).map(widest).sum::<usize>() + 2 * (rows.len() - 1);
    (total <= COLUMNS).then(|| text_table(&turned))
}

/// A table as a list per row, with the names of the columns from the first row.
fn text_lists(rows: &[Vec<String>]) -> String {
    let Some((head, rows)) = rows.split_first() else { return String::new() };
    let names = head.iter().skip(1).map(|name| width(name)).max().unwrap_or(0);
    let mut text = String::new();
    for row in rows {
        let (kind, name) = (head.first(), row.first());
        let first = [kind, name].into_iter().flatten().map(String::as_str).collect::<Vec<_>>();
        text += &format!("{}\n", first.join(" ").trim());
        for (name, cell) in head.iter().zip(row).skip(1) {
            text += format!("  {name:<names$}  {cell}").trim_end();
            text.push('\n');
        }
    }
    text
}

fn width(text: &str) -> usize {
    text.chars().count()
}

/// The lines of a text that is broken at spaces.
fn broken(text: &str, columns: usize) -> Vec<String> {
    if width(text) <= columns {
        return vec![text.to_string()];
    }
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if width(line) + 1 + width(word) <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines
}

fn picture_file(name: &str) -> String {
    format!("pictures/{}.svg", file_stem(name))
}

fn escape_lines(text: &str) -> String {
    text.lines().map(escape).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(ToString::to_string).collect()
    }

    fn sample() -> Report {
        let mut report = Report::new("a <b>", "lead");
        report.heading("h").text("t & u").table(&[row(&["x", "y"]), row(&["1|2", ""])]);
        report.facts(&[("3".into(), "things".into())]).code("fox <x>\nfox y\n");
        report.tokens(&[("word\n".into(), 0.5)]).charts(&["<svg class=\"plot\"></svg>".into()]);
        report.footer("end").set_numbers(serde_json::json!({"x": 1}));
        report
    }

    #[test]
    fn html_needs_nothing_from_outside() {
        let html = sample().html();
        assert!(html.contains("<title>a &lt;b&gt;</title>"));
        assert!(html.contains("<pre>fox &lt;x&gt;\nfox y</pre>"));
        assert!(html.contains("word\u{21b5}"));
        for outside in ["http:", "https:", "<script", "src="] {
            assert!(!html.contains(outside), "{outside}");
        }
    }

    #[test]
    fn markdown_has_every_block() {
        let want = "# a <b>\n\nlead\n\n## h\n\nt & u\n\n| x | y |\n|---|---:|\n| 1/2 | |\n\n- **3** things\n\n\
                    ```sh\nfox <x>\nfox y\n```\n\n```\nword\n\n```\n\n\
                    ![figure 7-1](pictures/figure-7-1.svg)\n\nend\n";
        assert_eq!(sample().markdown(), want);
        let mut untitled = Report::default();
        untitled.table(&[row(&["x"])]);
        assert_eq!(untitled.markdown(), "| x |\n|---|\n");
    }

    #[test]
    fn terminal_tables_are_aligned() {
        let mut report = Report::default();
        report.table(&[row(&["a", "1"]), row(&["bcd", "22"])]).text("a line");
        assert_eq!(report.terminal(), "a     1\nbcd  22\na line\n");
    }

    #[test]
    fn wide_tables_fit_80_columns() {
        let value = "1.4833 (1.4603..1.5088)";
        let head = ["model", "held-out loss (16 x 1024 tokens)", "slope", "another", "more", "one"];
        let table = text_table(&[row(&head), row(&["fox", value, value, value, value, value])]);
        assert!(table.lines().all(|line| line.chars().count() <= COLUMNS), "{table}");
        assert!(table.lines().count() > 2 && table.contains("(1.4603..1.5088)"), "{table}");
        let (x, y) = ("x".repeat(50), "y".repeat(50));
        let turned = text_table(&[row(&[&x, &y, "z"]), row(&["1", "2", "3"])]);
        assert_eq!(turned, format!("{x}  1\n{y}  2\n{:<50}  3\n", "z"));
        let w = "w".repeat(30);
        let lists = text_table(&[row(&[&x, &y, "z"]), row(&[&w, &w, &w])]);
        assert_eq!(lists, format!("{x} {w}\n  {y}  {w}\n  {:<50}  {w}\n", "z"));
        // Names and values stay in their line.
        let path = "p".repeat(90);
        assert_eq!(text_table(&[row(&["folder", &path])]), format!("folder  {path}\n"));
    }

    #[test]
    fn tall_charts_span_rows() {
        let chart = |height: f64| (String::new(), format!("<svg height=\"{height}\">"));
        assert_eq!(row_spans(&[chart(670.0), chart(170.0), chart(180.0)]), [4, 1, 1]);
        assert_eq!(row_spans(&[chart(300.0), chart(400.0)]), [1, 1]);
    }

    #[test]
    fn charts_of_equal_names_are_different_files() {
        let folder = tempfile::tempdir().unwrap();
        let chart = |id: &str| ("a chart".to_string(), format!("<svg id=\"{id}\"></svg>"));
        let mut report = Report::new("title", "lead");
        report.named_charts(vec![chart("x"), chart("y")]).named_charts(vec![chart("z")]);
        report.write(folder.path()).unwrap();
        for (file, id) in [("a-chart", "x"), ("a-chart-2", "y"), ("a-chart-3", "z")] {
            let path = folder.path().join(format!("pictures/{file}.svg"));
            assert!(std::fs::read_to_string(path).unwrap().contains(&format!("id=\"{id}\"")));
            assert!(report.markdown().contains(&format!("(pictures/{file}.svg)")), "{file}");
        }
    }

    #[test]
    fn writes_all_files() {
        let folder = tempfile::tempdir().unwrap();
        sample().write(folder.path()).unwrap();
        for file in ["report.html", "report.md", "report.json", "pictures/figure-7-1.svg"] {
            assert!(folder.path().join(file).exists(), "{file}");
        }
        assert_eq!(sample().json(), "{\n  \"x\": 1\n}\n");
    }
}
