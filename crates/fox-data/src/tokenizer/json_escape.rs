//! JSON string escaping as LongCrawl64 uses it, and its incremental inverse.

use std::fmt::Write;

/// `text` as the body of an ASCII-only JSON string, without the quotes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            '\u{c}' => out.push_str("\\f"),
            '\u{8}' => out.push_str("\\b"),
            ' '..='\u{7f}' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out
}

/// Undoes [`escape`] incrementally.
///
/// The body is read as that of a JSON string for as long as it is one. From the first violation (a bare quote, a raw
/// control character, an unknown or truncated escape) on, escapes are undone as Python's `unicode_escape` codec does
/// with `errors="ignore"`: bytes outside of escapes are Latin-1, an unknown escape is copied, a broken one is dropped
/// up to the first character that cannot belong to it, and so is `\N{...}` (a table of character names is missing).
/// Text that was given out never changes. An unpaired surrogate becomes U+FFFD.
#[derive(Debug, Clone, Default)]
pub(super) struct Unescaper {
    /// The body so far was not that of a JSON string.
    lenient: bool,
    /// Inside of `\N{...}`.
    in_name: bool,
    /// An escape that is incomplete so far.
    pending: Vec<u8>,
    /// The first half of a surrogate pair.
    high: Option<u16>,
}

/// The escape at the start of some bytes; numbers are its length in bytes.
enum Escape {
    Char(char, usize),
    Utf16(u16, usize),
    Dropped(usize),
    /// `\N{`: everything up to the closing brace is dropped.
    Name,
    Incomplete,
    Invalid,
}

impl Unescaper {
    /// Appends the text of the next bytes of the body to `out`.
    pub(super) fn push(&mut self, body: &str, out: &mut String) {
        self.read(body, false, out);
    }

    /// Ends the body: appends the text of an incomplete escape and resets the state.
    pub(super) fn finish(&mut self, out: &mut String) {
        self.read("", true, out);
        self.flush(out);
        *self = Self::default();
    }

    fn read(&mut self, body: &str, last: bool, out: &mut String) {
        let mut joined = std::mem::take(&mut self.pending);
        joined.extend_from_slice(body.as_bytes());
        let mut rest = joined.as_slice();
        while let Some(&byte) = rest.first() {
            if self.in_name {
                let end = rest.iter().position(|&b| b == b'}');
                self.in_name = end.is_none();
                rest = &rest[end.map_or(rest.len(), |end| end + 1)..];
                continue;
            }
            if byte != b'\\' {
                rest = self.read_plain(rest, out);
                continue;
            }
            let escape = if self.lenient { lenient_escape(rest, last) } else { json_escape(rest) };
            let length = match escape {
                Escape::Char(c, length) => {
                    self.push_char(c, out);
                    length
                }
                Escape::Utf16(unit, length) => {
                    self.push_utf16(unit, out);
                    length
                }
                Escape::Dropped(length) => length,
                Escape::Name => {
                    self.in_name = true;
                    3
                }
                Escape::Incomplete if !last => {
                    self.pending = rest.to_vec();
                    return;
                }
                Escape::Incomplete | Escape::Invalid => {
                    self.lenient = true;
                    0
                }
            };
            rest = &rest[length..];
        }
    }

    /// Copies text up to the next escape or violation and returns the rest.
    fn read_plain<'a>(&mut self, bytes: &'a [u8], out: &mut String) -> &'a [u8] {
        if self.lenient {
            self.push_char(char::from(bytes[0]), out);
            return &bytes[1..];
        }
        let special = |&b: &u8| matches!(b, b'\\' | b'"' | 0..=0x1f);
        let (plain, rest) = bytes.split_at(bytes.iter().position(special).unwrap_or(bytes.len()));
        if !plain.is_empty() {
            self.flush(out);
            out.push_str(&String::from_utf8_lossy(plain));
        }
        self.lenient = rest.first().is_some_and(|&b| b != b'\\');
        rest
    }

    fn push_char(&mut self, c: char, out: &mut String) {
        self.flush(out);
        out.push(c);
    }

    /// Joins the two halves of a surrogate pair.
    fn push_utf16(&mut self, unit: u16, out: &mut String) {
        match (self.high, unit) {
            (Some(high), 0xdc00..=0xdfff) => {
                self.high = None;
                out.extend(char::decode_utf16([high, unit]).map(|c| c.unwrap_or('\u{fffd}')));
            }
            (_, 0xd800..=0xdbff) => {
                self.flush(out);
                self.high = Some(unit);
            }
            _ => self.push_char(char::from_u32(u32::from(unit)).unwrap_or('\u{fffd}'), out),
        }
    }

    fn flush(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push('\u{fffd}');
        }
    }
}

/// The escape of a JSON string at the start of `bytes`.
fn json_escape(bytes: &[u8]) -> Escape {
    let Some(&kind) = bytes.get(1) else { return Escape::Incomplete };
    let c = match kind {
        b'"' | b'\\' | b'/' => char::from(kind),
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let (value, used) = digits(&bytes[2..], 4, 16);
            return match u16::try_from(value) {
                Ok(unit) if used == 4 => Escape::Utf16(unit, 6),
                _ if bytes.len() == 2 + used => Escape::Incomplete,
                _ => Escape::Invalid,
            };
        }
        _ => return Escape::Invalid,
    };
    Escape::Char(c, 2)
}

/// The escape of Python's `unicode_escape` at the start of `bytes`. `last`: nothing follows them.
fn lenient_escape(bytes: &[u8], last: bool) -> Escape {
    let Some(&kind) = bytes.get(1) else {
        return if last { Escape::Dropped(1) } else { Escape::Incomplete };
    };
    let c = match kind {
        b'\n' => return Escape::Dropped(2),
        b'\\' | b'\'' | b'"' => char::from(kind),
        b'a' => '\u{7}',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'v' => '\u{b}',
        b'0'..=b'7' => {
            let (value, used) = digits(&bytes[1..], 3, 8);
            if used < 3 && bytes.len() == 1 + used && !last {
                return Escape::Incomplete;
            }
            return Escape::Char(char::from_u32(value).unwrap_or('\u{fffd}'), 1 + used);
        }
        b'x' => return hexadecimal(bytes, 2, last),
        b'u' => return hexadecimal(bytes, 4, last),
        b'U' => return hexadecimal(bytes, 8, last),
        b'N' => {
            return match bytes.get(2) {
                None if !last => Escape::Incomplete,
                Some(b'{') => Escape::Name,
                _ => Escape::Dropped(2),
            };
        }
        // The character after the backslash is read as plain text next.
        _ => return Escape::Char('\\', 1),
    };
    Escape::Char(c, 2)
}

/// An escape of exactly `count` hexadecimal digits.
fn hexadecimal(bytes: &[u8], count: usize, last: bool) -> Escape {
    let (value, used) = digits(&bytes[2..], count, 16);
    let length = 2 + used;
    if used < count {
        let incomplete = bytes.len() == length && !last;
        return if incomplete { Escape::Incomplete } else { Escape::Dropped(length) };
    }
    match (u16::try_from(value), char::from_u32(value)) {
        (Ok(unit), _) => Escape::Utf16(unit, length),
        (_, Some(c)) => Escape::Char(c, length),
        _ => Escape::Dropped(length),
    }
}

/// Reads up to `count` digits and returns their value and number.
fn digits(bytes: &[u8], count: usize, radix: u32) -> (u32, usize) {
    let mut value = 0_u32;
    let mut used = 0;
    while let Some(digit) =
        bytes.get(used).filter(|_| used < count).and_then(|&b| char::from(b).to_digit(radix))
    {
        value = value.wrapping_mul(radix).wrapping_add(digit);
        used += 1;
    }
    (value, used)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of `body`, and whether it was the body of a JSON string.
    fn unescape(body: &str) -> (String, bool) {
        let (mut text, mut unescaper) = (String::new(), Unescaper::default());
        unescaper.push(body, &mut text);
        let valid = !unescaper.lenient && unescaper.pending.is_empty();
        unescaper.finish(&mut text);
        let mut streamed = String::new();
        for c in body.chars() {
            unescaper.push(c.encode_utf8(&mut [0; 4]), &mut streamed);
        }
        unescaper.finish(&mut streamed);
        assert_eq!(streamed, text, "{body:?}");
        (text, valid)
    }

    #[test]
    fn escapes_every_class_of_character() {
        assert_eq!(escape("\"\\\n\t\r\u{c}\u{8}"), r#"\"\\\n\t\r\f\b"#);
        assert_eq!(escape("\0\u{1f}\u{b}"), r"\u0000\u001f\u000b");
        assert_eq!(escape("/\u{7f} ~"), "/\u{7f} ~");
        assert_eq!(escape("\u{80}éÿ—"), r"\u0080\u00e9\u00ff\u2014");
        assert_eq!(escape("😀"), r"\ud83d\ude00");
    }

    #[test]
    fn json_strings_are_unescaped_strictly() {
        for (body, text) in [
            (r#"\"\\\/\b\f\n\r\t"#, "\"\\/\u{8}\u{c}\n\r\t"),
            (r"\u00E9é", "éé"),
            (r"\ud83d\ude00\ud83dx", "😀\u{fffd}x"),
        ] {
            assert_eq!(unescape(body), (text.to_owned(), true));
        }
        for bad in ["a\"b", "a\nb", "\\", r"\x41", r"\u12", r"\u+123", r"\u12é4", "\u{1f}"] {
            assert!(!unescape(bad).1, "{bad:?}");
        }
    }

    /// Expected values printed by Python 3: `codecs.decode(body, "unicode_escape", "ignore")`. The quote in front
    /// makes every body invalid JSON from the start.
    #[test]
    fn invalid_json_is_unescaped_as_python_does() {
        for (body, text) in [
            (r"a\nb\t\a\v\q", "a\nb\t\u{7}\u{b}\\q"),
            (r"\x41\x4g\xg", "Agg"),
            (r"\101\0\7778\18", "A\0\u{1ff}8\u{1}8"),
            (r"\u00e9\u00zz\u12", "\u{e9}zz"),
            (r"\U0001F600\U00110000z\U12", "\u{1f600}z"),
            ("x\\\ny", "xy"),
            (r"\", ""),
            (r"\N", ""),
            (r"\Nx", "x"),
            (r"a\N{DASH}b\N{", "ab"),
            (r#"\'\"\\"#, "'\"\\"),
            ("é\"", "\u{c3}\u{a9}\""),
            (r"\u", ""),
            (r"\ud83d\ude00", "😀"),
            (r"\ud83d\ud83d\ude00", "\u{fffd}😀"),
            (r"\ude00", "\u{fffd}"),
        ] {
            assert_eq!(unescape(&format!("\"{body}")), (format!("\"{text}"), false));
        }
    }

    #[test]
    fn violations_keep_earlier_text() {
        assert_eq!(unescape("é\"é").0, "é\"Ã©");
    }
}
