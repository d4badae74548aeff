//! An array that belongs to Python: read as rows of f32, in place where it lies so, and written from them.

use std::ptr::NonNull;

use fox_tensor::{Device, Tensor};
use half::{bf16, f16};
use pyo3::PyResult;
use rayon::prelude::*;

use crate::errors::{exception, value_error};

/// What Python hands over: address, element type ("f32", "bf16" or "f16"), shape, strides in elements.
pub type Raw = (usize, String, Vec<usize>, Vec<isize>);

#[derive(Clone, Copy, PartialEq)]
enum Element {
    F32,
    Bf16,
    F16,
}

/// An array `[batch, time, heads, width]` of Python's. One of rank 3, `[batch, time, width]`, has one head.
///
/// The package makes these from arrays that it holds for the duration of the call; addresses are as good as it is.
#[derive(Clone)]
pub struct Array {
    address: usize,
    element: Element,
    shape: [usize; 4],
    strides: [isize; 4],
}

/// An element that f32 stands for in computations.
trait Number: Copy + Send + Sync {
    fn wide(self) -> f32;
    fn narrow(x: f32) -> Self;
}

impl Number for f32 {
    fn wide(self) -> f32 {
        self
    }
    fn narrow(x: f32) -> Self {
        x
    }
}

impl Number for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }
    fn narrow(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

impl Number for f16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }
    fn narrow(x: f32) -> Self {
        f16::from_f32(x)
    }
}

impl Array {
    /// An array of rank 3 or 4.
    pub fn new(name: &str, (address, element, shape, strides): Raw) -> PyResult<Self> {
        let element = match element.as_str() {
            "f32" => Element::F32,
            "bf16" => Element::Bf16,
            "f16" => Element::F16,
            other => {
                let words = format!("{name} is {other}; use float32, bfloat16 or float16");
                return Err(value_error(words));
            }
        };
        let (shape, strides) = match (&shape[..], &strides[..]) {
            (&[b, t, h, d], &[sb, st, sh, sd]) => ([b, t, h, d], [sb, st, sh, sd]),
            (&[b, t, d], &[sb, st, sd]) => ([b, t, 1, d], [sb, st, 0, sd]),
            _ => {
                return Err(value_error(format!("{name} has shape {shape:?}, not of rank 3 or 4")));
            }
        };
        let size = if element == Element::F32 { 4 } else { 2 };
        if address % size != 0 || (address == 0 && !shape.contains(&0)) {
            return Err(value_error(format!("{name} does not lie at a multiple of {size} bytes")));
        }
        Ok(Array { address, element, shape, strides })
    }

    /// `[batch, time, heads, width]`.
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// An error unless the shape is this.
    pub fn expect(&self, name: &str, shape: [usize; 4]) -> PyResult<()> {
        if self.shape == shape {
            return Ok(());
        }
        Err(value_error(format!("{name} has shape {:?}, expected {shape:?}", self.shape)))
    }

    /// Rows and heads.
    fn rows(&self) -> (usize, usize) {
        let [b, t, h, _] = self.shape;
        (b * t, h)
    }

    fn lies_in_order(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&n, &stride)| {
            let right = n <= 1 || stride == expected;
            expected *= n as isize;
            right
        })
    }

    /// The array as a tensor `[batch * time, heads * width]`, heads filled up with zeros to `width`. In place where
    /// nothing has to be changed.
    ///
    /// # Safety
    /// The array must lie where it says, and must not move or change while the tensor lives.
    pub unsafe fn read(&self, device: &Device, width: usize) -> PyResult<Tensor> {
        let (rows, heads) = self.rows();
        let (start, own) = (NonNull::new(self.address as *mut f32), self.shape[3]);
        if let Some(start) = start
            && self.element == Element::F32
            && own == width
            && self.lies_in_order()
        {
            // SAFETY: the caller's promise; in order, aligned (checked by `new`) and of this many elements.
            return Ok(unsafe { fox_cpu::borrowed(device, start, [rows, heads * width]) });
        }
        let mut tensor =
            device.uninit([rows, heads * width], fox_tensor::DType::F32).map_err(exception)?;
        let out = fox_cpu::values_mut(&mut tensor).ok_or_else(|| value_error("not on the CPU"))?;
        // SAFETY: the caller's promise.
        unsafe {
            match self.element {
                Element::F32 => self.gather::<f32>(width, out),
                Element::Bf16 => self.gather::<bf16>(width, out),
                Element::F16 => self.gather::<f16>(width, out),
            }
        }
        Ok(tensor)
    }

    /// # Safety
    /// As [`Array::read`], with elements of type `N`.
    unsafe fn gather<N: Number>(&self, width: usize, out: &mut [f32]) {
        let [_, time, heads, own] = self.shape;
        if out.is_empty() {
            return;
        }
        out.par_chunks_mut(heads * width).with_min_len(64).enumerate().for_each(|(row, out)| {
            for (h, out) in out.chunks_exact_mut(width).enumerate() {
                let start = self.at::<N>(row / time, row % time, h);
                let (head, rest) = out.split_at_mut(own);
                if self.strides[3] == 1 {
                    // SAFETY: a whole head of the array, by its shape and strides.
                    let values = unsafe { std::slice::from_raw_parts(start, own) };
                    head.iter_mut().zip(values).for_each(|(x, value)| *x = value.wide());
                } else {
                    for (c, x) in head.iter_mut().enumerate() {
                        // SAFETY: an element of the array, by its shape and strides.
                        *x = unsafe { *start.offset(c as isize * self.strides[3]) }.wide();
                    }
                }
                rest.fill(0.0);
            }
        });
    }

    fn at<N>(&self, b: usize, t: usize, h: usize) -> *mut N {
        let [sb, st, sh, _] = self.strides;
        let offset = b as isize * sb + t as isize * st + h as isize * sh;
        (self.address as *mut N).wrapping_offset(offset)
    }

    /// Writes a tensor `[batch * time, heads * width]` to the array, without what fills up its heads.
    ///
    /// # Safety
    /// The array must be valid at its address, its elements must be distinct, and no other code may access them during the
    /// call.
    pub unsafe fn write(&self, tensor: &Tensor, width: usize) -> PyResult<()> {
        let values = fox_cpu::values(tensor).ok_or_else(|| value_error("not on the CPU"))?;
        let (rows, heads) = self.rows();
        if values.len() != rows * heads * width || width < self.shape[3] {
            return Err(value_error(format!("{} values for {:?}", values.len(), self.shape)));
        }
        // SAFETY: the caller's promise.
        unsafe {
            match self.element {
                Element::F32 => self.scatter::<f32>(values, width),
                Element::Bf16 => self.scatter::<bf16>(values, width),
                Element::F16 => self.scatter::<f16>(values, width),
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Array::write`], with elements of type `N`.
    unsafe fn scatter<N: Number>(&self, values: &[f32], width: usize) {
        let [_, time, heads, own] = self.shape;
        if values.is_empty() {
            return;
        }
        values.par_chunks(heads * width).with_min_len(64).enumerate().for_each(|(row, values)| {
            for (h, values) in values.chunks_exact(width).enumerate() {
                let start = self.at::<N>(row / time, row % time, h);
                if self.strides[3] == 1 {
                    // SAFETY: a whole head of the array, by its shape and strides; no other task has this row.
                    let head = unsafe { std::slice::from_raw_parts_mut(start, own) };
                    head.iter_mut().zip(values).for_each(|(out, x)| *out = N::narrow(*x));
                    continue;
                }
                for (c, x) in values[..own].iter().enumerate() {
                    // SAFETY: an element of the array, by its shape and strides; no other task has this row.
                    unsafe { *start.offset(c as isize * self.strides[3]) = N::narrow(*x) };
                }
            }
        });
    }
}
