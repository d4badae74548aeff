//! Validation of operands, once per call.
//!
//! Beside every method of an op trait stands a function `check_<method>` with the same arguments. A backend calls it
//! before anything else, so its kernels, unsafe code included, may rely on devices, element types, shapes, segments and
//! token ids. Other callers, such as the tape, need no checks.

use crate::{Backend, DType, Error, IdRange, Result, Segments, Tensor};

/// The operands of one call of an op on a backend.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    op: &'static str,
    backend: &'a dyn Backend,
}

impl<'a> Operands<'a> {
    pub(crate) fn new(op: &'static str, backend: &'a dyn Backend) -> Self {
        Operands { op, backend }
    }

    /// An [`Error::Argument`] of this op.
    pub(crate) fn error(&self, detail: impl Into<String>) -> Error {
        Error::argument(self.op, detail)
    }

    /// Fails with `detail` unless `condition` holds.
    pub(crate) fn require(&self, condition: bool, detail: impl FnOnce() -> String) -> Result<()> {
        if condition { Ok(()) } else { Err(self.error(detail())) }
    }

    /// A tensor of any type on this backend.
    pub(crate) fn on_device(&self, what: &'static str, x: &Tensor) -> Result<()> {
        if std::ptr::addr_eq(x.device().backend(), self.backend) {
            return self.require(!x.is_absent(), || format!("{what} is not on this rank"));
        }
        Err(Error::DeviceMismatch {
            op: self.op,
            what,
            got: x.device().to_string(),
            expected: self.backend.name().to_string(),
        })
    }

    /// A tensor of real numbers, packed or not, of any shape.
    pub(crate) fn any_real(&self, what: &'static str, x: &Tensor) -> Result<()> {
        self.on_device(what, x)?;
        x.expect_real(self.op, what)
    }

    /// A tensor of real numbers of any shape.
    pub(crate) fn plain(&self, what: &'static str, x: &Tensor) -> Result<()> {
        self.any_real(what, x)?;
        self.require(!x.is_packed(), || {
            format!("{what} has packed storage, which only linear layers read")
        })
    }

    /// A tensor of real numbers of this shape.
    pub(crate) fn real(&self, what: &'static str, x: &Tensor, dims: &[usize]) -> Result<()> {
        self.plain(what, x)?;
        x.expect_shape(self.op, what, dims)
    }

    /// [`Operands::real`] of an optional operand.
    pub(crate) fn maybe<'t>(
        &self,
        what: &'static str,
        x: impl Into<Option<&'t Tensor>>,
        dims: &[usize],
    ) -> Result<()> {
        x.into().map_or(Ok(()), |x| self.real(what, x, dims))
    }

    /// A matrix of real numbers: its rows and columns.
    pub(crate) fn matrix(&self, what: &'static str, x: &Tensor) -> Result<(usize, usize)> {
        self.plain(what, x)?;
        self.two_dims(what, x)
    }

    /// A weight matrix `[N, K]`, which may be packed.
    pub(crate) fn weight(&self, what: &'static str, w: &Tensor, inner: usize) -> Result<usize> {
        self.any_real(what, w)?;
        let (rows, _) = self.two_dims(what, w)?;
        w.expect_shape(self.op, what, &[rows, inner])?;
        Ok(rows)
    }

    fn two_dims(&self, what: &'static str, x: &Tensor) -> Result<(usize, usize)> {
        let [rows, cols] = *x.dims() else {
            let (op, got) = (self.op, x.shape());
            return Err(Error::Shape { op, what, got, expected: "two dimensions".into() });
        };
        Ok((rows, cols))
    }

    /// Weights of every head, `[width]`, or of one head shared by all, `[d]`.
    pub(crate) fn head_weights(
        &self,
        what: &'static str,
        w: &Tensor,
        d: usize,
        width: usize,
    ) -> Result<()> {
        self.real(what, w, &[if w.dims() == [d] { d } else { width }])
    }

    /// A tensor of integers of this shape.
    pub(crate) fn ints(&self, what: &'static str, x: &Tensor, dims: &[usize]) -> Result<()> {
        self.on_device(what, x)?;
        x.expect_type(self.op, what, DType::I32)?;
        x.expect_shape(self.op, what, dims)
    }

    /// Token ids or labels, every one of them in range: they index memory.
    pub(crate) fn ids(&self, what: &'static str, ids: &Tensor, range: IdRange) -> Result<()> {
        self.ints(what, ids, ids.dims())?;
        match self.backend.id_out_of_range(ids, range)? {
            None => Ok(()),
            Some(id) => Err(self.error(format!(
                "{what} hold {id}, but the vocabulary has {} entries",
                range.vocab
            ))),
        }
    }

    /// Segments that fit tensors of this many query and key rows.
    pub(crate) fn segments(&self, segments: &Segments, q_rows: usize, k_rows: usize) -> Result<()> {
        segments.check(self.op, q_rows, k_rows)
    }
}
