//! The header of a safetensors file: parsed and checked before anything is believed.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

/// The format's own limit.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Type, shape and byte range of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    /// First byte, counted from the end of the header.
    pub start: u64,
    /// Number of bytes; fits the type and the extents.
    pub bytes: u64,
}

/// Reads the JSON of a header for a file with `data_bytes` behind it.
///
/// The safetensors crate checks that the tensors follow each other without gap or overlap, that
/// their sizes do not overflow and that they fit type and shape. Here: no name twice, and the end
/// of the last tensor is the end of the file.
pub(super) fn parse(json: &[u8], data_bytes: u64) -> Result<BTreeMap<String, Entry>, String> {
    let text = std::str::from_utf8(json).map_err(|e| format!("the header is not UTF-8: {e}"))?;
    let RawHeader(mut tensors) =
        serde_json::from_str(text).map_err(|e| format!("the header cannot be parsed: {e}"))?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let entries = tensors.iter().map(|(name, info)| (name.clone(), entry(info))).collect();
    let checked = Metadata::new(None, tensors).map_err(|e| format!("the header is wrong: {e}"))?;
    let described = checked.data_len() as u64;
    if described != data_bytes {
        return Err(format!(
            "the header describes {described} bytes of data, but the file has {data_bytes}"
        ));
    }
    Ok(entries)
}

fn entry(info: &TensorInfo) -> Entry {
    let (start, end) = info.data_offsets;
    Entry {
        dtype: info.dtype,
        dims: info.shape.clone(),
        start: start as u64,
        bytes: end.saturating_sub(start) as u64,
    }
}

/// The tensors of a header; a map type would silently keep the last of two equal names.
struct RawHeader(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let (mut tensors, mut seen) = (Vec::new(), HashSet::new());
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format!("`{name}` is there twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                tensors.push((name, map.next_value::<TensorInfo>()?));
            }
        }
        Ok(RawHeader(tensors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fails(json: &str, data: u64, with: &str) {
        let error = parse(json.as_bytes(), data).expect_err(json);
        assert!(error.contains(with), "{error}");
    }

    #[test]
    fn accepts_a_plain_header_and_ignores_metadata() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]},
            "a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}  "#;
        let entries = parse(json.as_bytes(), 32).unwrap();
        assert_eq!(entries["b"].dims, [2, 3]);
        assert_eq!((entries["b"].start, entries["b"].bytes), (8, 24));
        assert_eq!(entries["a"].dtype, Dtype::BF16);
    }

    #[test]
    fn refuses_hostile_headers() {
        let t = |dims: &str, offsets: &str| {
            format!(r#"{{"dtype":"F32","shape":{dims},"data_offsets":{offsets}}}"#)
        };
        let one = t("[2]", "[0,8]");
        fails("[]", 0, "object");
        fails("{", 0, "parsed");
        fails(&format!(r#"{{"a":{one},"a":{one}}}"#), 8, "twice");
        fails(&format!(r#"{{"a":{one},"b":{one}}}"#), 8, "offset");
        fails(&format!(r#"{{"a":{one},"b":{}}}"#, t("[1]", "[12,16]")), 16, "offset");
        fails(&format!(r#"{{"a":{}}}"#, t("[2]", "[8,0]")), 8, "offset");
        fails(&format!(r#"{{"a":{}}}"#, t("[3]", "[0,8]")), 8, "wrong");
        fails(&format!(r#"{{"a":{one}}}"#), 9, "describes 8 bytes");
        fails(&format!(r#"{{"a":{}}}"#, t("[4294967296,4294967296,16]", "[0,0]")), 0, "verflow");
        fails(&format!(r#"{{"a":{}}}"#, t("[-1]", "[0,4]")), 4, "parsed");
        fails(r#"{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}"#, 4, "F99");
        let end = u64::MAX;
        fails(&format!(r#"{{"a":{}}}"#, t("[1]", &format!("[{},{end}]", end - 4))), 4, "offset");
    }
}
