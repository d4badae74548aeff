//! What the first bytes of a text say about its encoding.

use std::path::Path;

use crate::error::{Error, Result};

/// Bytes that are looked at.
pub(super) const HEAD_BYTES: u64 = 1024;

const UTF8_MARK: &[u8] = b"\xef\xbb\xbf";

/// Bytes of a UTF-8 byte order mark at the start, which does not belong to the text; an error for UTF-16 and UTF-32, with a
/// mark or without.
pub(super) fn mark_len(path: &Path, head: &[u8]) -> Result<u64> {
    if head.starts_with(UTF8_MARK) {
        return Ok(UTF8_MARK.len() as u64);
    }
    match other_encoding(head) {
        None => Ok(0),
        Some(encoding) => Err(Error::OtherEncoding { path: path.to_path_buf(), encoding }),
    }
}

fn other_encoding(head: &[u8]) -> Option<&'static str> {
    // The mark of UTF-32, low byte first, starts like that of UTF-16.
    let marks: [(&[u8], &str); 4] = [
        (b"\xff\xfe\0\0", "UTF-32"),
        (b"\0\0\xfe\xff", "UTF-32"),
        (b"\xff\xfe", "UTF-16"),
        (b"\xfe\xff", "UTF-16"),
    ];
    if let Some((_, encoding)) = marks.iter().find(|(mark, _)| head.starts_with(mark)) {
        return Some(encoding);
    }
    // ASCII in UTF-16 is valid UTF-8 in which every other character is NUL.
    let zeros = |offset: usize| {
        let bytes = head.iter().skip(offset).step_by(2);
        (bytes.clone().filter(|&&byte| byte == 0).count(), bytes.count())
    };
    let mostly = |(zeros, all): (usize, usize)| all >= 2 && 2 * zeros >= all;
    match (mostly(zeros(0)), mostly(zeros(1))) {
        (false, false) => None,
        (true, true) => Some("UTF-32 or no text at all"),
        _ => Some("UTF-16 without a byte order mark"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_byte_order_marks() {
        let of = |head: &[u8]| mark_len(Path::new("x"), head).map_err(|e| e.to_string());
        let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>();
        let big = |text: &str| text.encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>();
        let utf32 =
            |text: &str| text.chars().flat_map(|c| (c as u32).to_le_bytes()).collect::<Vec<_>>();
        for (head, mark) in [
            (&b""[..], 0),
            (b"a", 0),
            (b"\0", 0),
            (b"a\0", 0),
            (b"one NUL \0 in a text", 0),
            ("\u{feff}a".as_bytes(), 3),
            ("\u{feff}".as_bytes(), 3),
            ("caf\u{e9} \u{4f60}\u{597d}".as_bytes(), 0),
        ] {
            assert_eq!(of(head), Ok(mark), "{head:?}");
        }
        for (head, word) in [
            (utf16("\u{feff}text"), "is UTF-16, not UTF-8"),
            (big("\u{feff}text"), "is UTF-16, not UTF-8"),
            (utf16("some text"), "is UTF-16 without"),
            (big("{\"text\": 1}"), "is UTF-16 without"),
            (utf32("\u{feff}text"), "is UTF-32, not UTF-8"),
            (utf32("text"), "is UTF-32 or"),
            (vec![0; 100], "no text at all"),
        ] {
            let error = of(&head).unwrap_err();
            assert!(error.contains(word) && error.contains("iconv"), "{error}");
        }
    }
}
