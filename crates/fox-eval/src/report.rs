//! One self-contained HTML page: text, tables and charts, readable on a phone and a desk, light and dark.

use std::fmt::Write as _;

use fox_plot::{STYLE, escape, ink_on, sequential};

const PAGE_STYLE: &str = "\
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);\
font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;-webkit-text-size-adjust:100%}\
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}h1{font-size:1.7rem;line-height:1.2;margin:.2em 0 .3em}\
h2{font-size:1.2rem;margin:2.2em 0 .5em;padding-top:.6em;border-top:1px solid var(--edge)}p{max-width:46em;margin:.5em 0}\
.lead{color:var(--dim)}.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:14px;margin:14px 0}\
.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px;min-width:0;max-width:640px}\
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:16px 0}\
.fact{border:1px solid var(--edge);border-radius:10px;padding:10px 12px;background:var(--card)}\
.fact b{display:block;font-size:1.35rem;line-height:1.25}.fact span{color:var(--dim);font-size:.85rem}\
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;margin:8px 0}\
th,td{padding:5px 12px 5px 0;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}\
th:first-child,td:first-child{text-align:left}th{color:var(--dim);font-weight:600}\
pre{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px;overflow-x:auto;\
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}pre.prose{white-space:pre-wrap}\
.tokens{font:13px/2 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}\
.tokens span{padding:2px 1px;border-radius:3px;white-space:pre-wrap}footer{color:var(--dim);font-size:.85rem;margin-top:3em}\
@media (max-width:480px){body{font-size:15px}main{padding:14px 12px 48px}.card{padding:8px}\
table{font-size:.8rem}th,td{white-space:normal;padding:5px 7px 5px 0}\
.wide,.wide tbody,.wide tr{display:block}.wide tr:first-child{display:none}.wide tr{padding:6px 0}\
.wide td{display:flex;justify-content:space-between;padding:2px 0}.wide td:first-child{font-weight:600}\
.wide td::before{content:attr(data-of);color:var(--dim);font-weight:400}}";

/// Tables of more columns are lists of figures on a phone.
const PHONE_COLUMNS: usize = 4;

/// A page under construction.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// An empty page with its title and a sentence under it.
    pub fn new(title: &str, lead: &str) -> Self {
        let body = format!("<h1>{}</h1>\n<p class=\"lead\">{}</p>\n", escape(title), escape(lead));
        Page { title: title.to_string(), body }
    }

    /// A heading.
    pub fn heading(&mut self, text: &str) -> &mut Self {
        let _ = writeln!(self.body, "<h2>{}</h2>", escape(text));
        self
    }

    /// A paragraph.
    pub fn text(&mut self, text: &str) -> &mut Self {
        let _ = writeln!(self.body, "<p>{}</p>", escape(text));
        self
    }

    /// Large figures, each with what it means.
    pub fn facts(&mut self, facts: &[(String, String)]) -> &mut Self {
        self.body.push_str("<div class=\"facts\">");
        for (value, meaning) in facts {
            let _ = write!(
                self.body,
                "<div class=\"fact\"><b>{}</b><span>{}</span></div>",
                escape(value),
                escape(meaning)
            );
        }
        self.body.push_str("</div>\n");
        self
    }

    /// Charts side by side where there is room. Each is an SVG fragment of [`fox_plot`].
    pub fn charts(&mut self, fragments: &[String]) -> &mut Self {
        self.body.push_str("<div class=\"cards\">");
        for fragment in fragments {
            let _ = write!(self.body, "<div class=\"card\">{fragment}</div>");
        }
        self.body.push_str("</div>\n");
        self
    }

    /// A table; the first row is its head. On a phone each row of a wide one is a list, with the words of the head.
    pub fn table(&mut self, rows: &[Vec<String>]) -> &mut Self {
        let head = rows.first().map_or(&[][..], Vec::as_slice);
        let wide = head.len() > PHONE_COLUMNS;
        self.body.push_str("<div class=\"scroll\">");
        self.body.push_str(if wide { "<table class=\"wide\">" } else { "<table>" });
        for (r, row) in rows.iter().enumerate() {
            self.body.push_str("<tr>");
            for (c, cell) in row.iter().enumerate() {
                let cell = escape(cell);
                let _ = match head.get(c).filter(|_| wide && r > 0) {
                    _ if r == 0 => write!(self.body, "<th>{cell}</th>"),
                    Some(of) => write!(self.body, "<td data-of=\"{}\">{cell}</td>", escape(of)),
                    None => write!(self.body, "<td>{cell}</td>"),
                };
            }
            self.body.push_str("</tr>");
        }
        self.body.push_str("</table></div>\n");
        self
    }

    /// Lines as they are, such as commands.
    pub fn code(&mut self, text: &str) -> &mut Self {
        let lines: Vec<String> = text.lines().map(escape).collect();
        let _ = writeln!(self.body, "<pre>{}</pre>", lines.join("\n"));
        self
    }

    /// Text as it was generated, broken where the screen ends.
    pub fn sample(&mut self, text: &str) -> &mut Self {
        let lines: Vec<String> = text.lines().map(escape).collect();
        let _ = writeln!(self.body, "<pre class=\"prose\">{}</pre>", lines.join("\n"));
        self
    }

    /// Words on a background that shows a value from 0 to 1 each.
    pub fn tokens(&mut self, tokens: &[(String, f64)]) -> &mut Self {
        self.body.push_str("<div class=\"card tokens\">");
        for (text, value) in tokens {
            let color = sequential(*value);
            let [r, g, b] = color;
            let shown = text.replace('\n', "\u{21b5}");
            let _ = write!(
                self.body,
                "<span style=\"background:rgb({r},{g},{b});color:{}\" title=\"{value:.3}\">{}</span>",
                ink_on(color),
                escape(&shown)
            );
        }
        self.body.push_str("</div>\n");
        self
    }

    /// A line at the end.
    pub fn footer(&mut self, text: &str) -> &mut Self {
        let _ = writeln!(self.body, "<footer>{}</footer>", escape(text));
        self
    }

    /// The whole file.
    pub fn html(&self) -> String {
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
             <style>{STYLE}{PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n{}</main>\n</body>\n</html>\n",
            escape(&self.title),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_needs_nothing_from_outside() {
        let mut page = Page::new("a <b>", "lead");
        page.heading("h").text("t & u").table(&[vec!["x".into()], vec!["1".into()]]);
        page.facts(&[("3".into(), "things".into())]).code("fox <x>\nfox y").footer("end");
        page.tokens(&[("word\n".into(), 0.5)]).charts(&["<svg class=\"plot\"></svg>".into()]);
        let html = page.html();
        assert!(html.contains("<title>a &lt;b&gt;</title>"));
        assert!(html.contains("<pre>fox &lt;x&gt;\nfox y</pre>"));
        assert!(html.contains("word\u{21b5}"));
        for outside in ["http:", "https:", "<script", "src="] {
            assert!(!html.contains(outside), "{outside}");
        }
    }
}
