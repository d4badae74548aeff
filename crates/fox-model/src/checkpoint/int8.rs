//! Matrices stored in 8 bits: integers `[rows, cols]` and f32 scales `[rows, ceil(cols / 64)]`.
//!
//! The blocks are those of [`fox_tensor::WeightFormat::Int8`], so that a model that is read from 8 bits and runs in 8
//! bits is rounded once.

use fox_tensor::{INT8_BLOCK, quantize_int8};

const SUFFIX: &str = ".int8_scale";

/// Name of the scales of a matrix.
pub(super) fn scale_name(matrix: &str) -> String {
    format!("{matrix}{SUFFIX}")
}

/// The matrix that scales of this name belong to.
pub(super) fn matrix_name(scale: &str) -> Option<&str> {
    scale.strip_suffix(SUFFIX)
}

/// Shape of the scales of a matrix `[rows, cols]`.
pub(super) fn scale_dims(dims: &[usize]) -> Vec<usize> {
    vec![dims[0], dims[1].div_ceil(INT8_BLOCK)]
}

/// Rounds a matrix with rows of `cols` values; the scales are little-endian f32.
pub(super) fn quantize(values: &[f32], cols: usize) -> (Vec<i8>, Vec<u8>) {
    let (mut quantized, mut scales) = (vec![0; values.len()], Vec::new());
    let rows = quantized.chunks_mut(cols.max(1)).zip(values.chunks(cols.max(1)));
    for (out, row) in rows {
        for (out, block) in out.chunks_mut(INT8_BLOCK).zip(row.chunks(INT8_BLOCK)) {
            scales.extend(quantize_int8(block, out).to_le_bytes());
        }
    }
    (quantized, scales)
}

/// The values of a matrix `[rows, cols]`.
pub(super) fn dequantize(quantized: &[i8], scales: &[f32], cols: usize, out: &mut [f32]) {
    let blocks = |len: usize| len.div_ceil(INT8_BLOCK).max(1);
    let cols = cols.max(1);
    for (row, (out, quantized)) in out.chunks_mut(cols).zip(quantized.chunks(cols)).enumerate() {
        let scales = &scales[row * blocks(cols)..][..blocks(cols)];
        let pairs = out.chunks_mut(INT8_BLOCK).zip(quantized.chunks(INT8_BLOCK));
        for ((out, quantized), scale) in pairs.zip(scales) {
            out.iter_mut().zip(quantized).for_each(|(out, q)| *out = f32::from(*q) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{FileDtype, SafetensorsFile, SafetensorsWriter};
    use super::*;

    #[test]
    fn quantizes_blocks_by_their_largest_value() {
        // Two blocks per row, of 64 and 6 columns, with different ranges.
        let (rows, cols) = (3, 70);
        let value = |i: usize| match (i / cols, i % cols) {
            (2, _) => 0.0,
            (row, col) if col < 64 => (col as f32 - 31.5) * (1.0 + row as f32),
            (row, col) => 1e-3 * (col as f32 - 66.0) * (1.0 + row as f32),
        };
        let values: Vec<f32> = (0..rows * cols).map(value).collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        let tensors: [(&str, &[usize]); 2] = [("w", &[rows, cols]), ("norm", &[3])];
        let mut writer = SafetensorsWriter::create(&path, FileDtype::Int8, &tensors).unwrap();
        writer.write(&values).unwrap();
        writer.write(&[0.1, 0.2, 0.3]).unwrap();
        writer.finish().unwrap();
        let mut file = SafetensorsFile::open(&path).unwrap();
        assert_eq!(file.names().collect::<Vec<_>>(), ["norm", "w"]);
        assert_eq!(file.read_f32("norm").unwrap(), [0.1, 0.2, 0.3], "vectors are exact");
        let read = file.read_f32("w").unwrap();
        for (i, (x, y)) in values.iter().zip(&read).enumerate() {
            let first = i % cols < 64;
            let largest = if first { 32.5 } else { 3e-3 } * (1.0 + (i / cols) as f32);
            assert!((x - y).abs() <= largest / 254.0 * 1.001, "{i}: {x} became {y}");
        }
        assert!(read[2 * cols..].iter().all(|x| *x == 0.0));
        // Rounding what was rounded changes nothing but the last bit of a scale.
        let (again, _) = quantize(&read, cols);
        assert_eq!(again, quantize(&values, cols).0);
    }

    #[test]
    fn rejects_scales_of_another_shape() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        let header = r#"{"w":{"dtype":"I8","shape":[1,65],"data_offsets":[0,65]},"w.int8_scale":{"dtype":"F32","shape":[1,1],"data_offsets":[65,69]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 69]);
        std::fs::write(&path, bytes).unwrap();
        let error = SafetensorsFile::open(&path).unwrap().read_f32("w").unwrap_err().to_string();
        assert!(error.contains("`w` has type I8, expected F32, BF16 or F16"), "{error}");
    }
}
