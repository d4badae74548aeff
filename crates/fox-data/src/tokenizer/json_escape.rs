//! The JSON escape of LongCrawl64 and its two inverses: strict, and best-effort.

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

/// Characters and halves of surrogate pairs, joined where two halves meet. A half that stays alone
/// becomes U+FFFD, since Rust text cannot hold it.
#[derive(Default)]
struct Text {
    out: String,
    high: Option<u16>,
}

impl Text {
    fn push(&mut self, c: char) {
        self.flush();
        self.out.push(c);
    }

    fn push_unit(&mut self, unit: u16) {
        match (self.high, unit) {
            (Some(high), 0xdc00..=0xdfff) => {
                self.high = None;
                self.out.extend(char::decode_utf16([high, unit]).map(|c| c.unwrap_or('\u{fffd}')));
            }
            (_, 0xd800..=0xdbff) => {
                self.flush();
                self.high = Some(unit);
            }
            _ => self.push(char::from_u32(u32::from(unit)).unwrap_or('\u{fffd}')),
        }
    }

    fn flush(&mut self) {
        if self.high.take().is_some() {
            self.out.push('\u{fffd}');
        }
    }

    fn finish(mut self) -> String {
        self.flush();
        self.out
    }
}

/// The text whose JSON string body is `body`; `None` if it is not the body of one JSON string.
pub(super) fn unescape_strict(body: &str) -> Option<String> {
    let mut text = Text::default();
    let mut chars = body.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next()? {
                c @ ('"' | '\\' | '/') => text.push(c),
                'b' => text.push('\u{8}'),
                'f' => text.push('\u{c}'),
                'n' => text.push('\n'),
                'r' => text.push('\r'),
                't' => text.push('\t'),
                'u' => {
                    let digits = chars.as_str().get(..4)?;
                    if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
                        return None;
                    }
                    text.push_unit(u16::from_str_radix(digits, 16).ok()?);
                    chars = chars.as_str()[4..].chars();
                }
                _ => return None,
            },
            '"' | '\0'..='\u{1f}' => return None,
            _ => text.push(c),
        }
    }
    Some(text.finish())
}

/// Undoes backslash escapes the way Python's "unicode_escape" does with errors ignored: bytes outside
/// escapes are Latin-1, an unknown escape stays as it is, and a broken one is dropped up to the first character
/// that does not belong to it. (`\N{...}` is dropped whole: there is no table of character names here.)
pub(super) fn unescape_best_effort(bytes: &[u8]) -> String {
    let mut text = Text::default();
    let mut i = 0;
    while i < bytes.len() {
        if bytes[i] != b'\\' {
            text.push(char::from(bytes[i]));
            i += 1;
            continue;
        }
        i += 1;
        let Some(&kind) = bytes.get(i) else { break };
        i += 1;
        match kind {
            b'\n' => {}
            b'\\' | b'\'' | b'"' => text.push(char::from(kind)),
            b'a' => text.push('\u{7}'),
            b'b' => text.push('\u{8}'),
            b'f' => text.push('\u{c}'),
            b'n' => text.push('\n'),
            b'r' => text.push('\r'),
            b't' => text.push('\t'),
            b'v' => text.push('\u{b}'),
            b'0'..=b'7' => {
                i -= 1;
                let (value, used) = digits(&bytes[i..], 3, 8);
                i += used;
                text.push(char::from_u32(value).unwrap_or('\u{fffd}'));
            }
            b'x' => i += hexadecimal(&bytes[i..], 2, &mut text),
            b'u' => i += hexadecimal(&bytes[i..], 4, &mut text),
            b'U' => i += hexadecimal(&bytes[i..], 8, &mut text),
            b'N' => i += named_length(&bytes[i..]),
            _ => {
                text.push('\\');
                text.push(char::from(kind));
            }
        }
    }
    text.finish()
}

/// Reads up to `count` digits; the value and how many there were.
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

/// Reads an escape of exactly `count` digits and pushes its character; returns the digits used up.
fn hexadecimal(bytes: &[u8], count: usize, text: &mut Text) -> usize {
    let (value, used) = digits(bytes, count, 16);
    if used == count {
        match u16::try_from(value) {
            Ok(unit) => text.push_unit(unit),
            Err(_) => {
                if let Some(c) = char::from_u32(value) {
                    text.push(c);
                }
            }
        }
    }
    used
}

/// Length of the `{...}` after `\N`, 0 if there is none.
fn named_length(bytes: &[u8]) -> usize {
    if bytes.first() != Some(&b'{') {
        return 0;
    }
    bytes.iter().position(|&b| b == b'}').map_or(bytes.len(), |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clause_of_the_escape() {
        assert_eq!(escape("\"\\\n\t\r\u{c}\u{8}"), r#"\"\\\n\t\r\f\b"#);
        assert_eq!(escape("\0\u{1f}\u{b}"), r"\u0000\u001f\u000b");
        assert_eq!(escape("/\u{7f} ~"), "/\u{7f} ~");
        assert_eq!(escape("\u{80}éÿ—"), r"\u0080\u00e9\u00ff\u2014");
        assert_eq!(escape("😀"), r"\ud83d\ude00");
    }

    #[test]
    fn every_clause_of_the_strict_inverse() {
        let strict = |body: &str| unescape_strict(body);
        assert_eq!(strict(r#"\"\\\/\b\f\n\r\t"#).unwrap(), "\"\\/\u{8}\u{c}\n\r\t");
        assert_eq!(strict(r"\u00E9é").unwrap(), "éé");
        assert_eq!(strict(r"\ud83d\ude00\ud83dx").unwrap(), "😀\u{fffd}x");
        for bad in ["a\"b", "a\nb", "\\", r"\x41", r"\u12", r"\u+123", r"\u12é4", "\u{1f}"] {
            assert_eq!(strict(bad), None, "{bad:?}");
        }
    }

    /// Expected values printed by Python 3: `codecs.decode(body, "unicode_escape", "ignore")`.
    #[test]
    fn the_best_effort_inverse_agrees_with_python() {
        let best = |body: &[u8]| unescape_best_effort(body);
        assert_eq!(best(b"a\x5cnb\x5ct\x5ca\x5cv\x5cq"), "a\u{a}b\u{9}\u{7}\u{b}\u{5c}q");
        assert_eq!(best(b"\x5cx41\x5cx4g\x5cxg"), "Agg");
        assert_eq!(best(b"\x5c101\x5c0\x5c7778\x5c18"), "A\u{0}\u{1ff}8\u{1}8");
        assert_eq!(best(b"\x5cu00e9\x5cu00zz\x5cu12"), "\u{e9}zz");
        assert_eq!(best(b"\x5cU0001F600\x5cU00110000z\x5cU12"), "\u{1f600}z");
        assert_eq!(best(b"x\x5c\x0ay"), "xy");
        assert_eq!(best(b"\x5c"), "");
        assert_eq!(best(b"\x5cN"), "");
        assert_eq!(best(b"\x5cNx"), "x");
        assert_eq!(best(b"\x5c'\x5c\x22\x5c\x5c"), "'\u{22}\u{5c}");
        assert_eq!(best(b"\xc3\xa9\x22"), "\u{c3}\u{a9}\u{22}");
        assert_eq!(best(b"\x5cu"), "");
    }

    #[test]
    fn halves_of_a_pair_are_joined_or_replaced() {
        assert_eq!(unescape_best_effort(br"\ud83d\ude00"), "😀");
        assert_eq!(unescape_best_effort(br"\ud83d\ud83d\ude00"), "\u{fffd}😀");
        assert_eq!(unescape_best_effort(br"\ude00"), "\u{fffd}");
    }
}
