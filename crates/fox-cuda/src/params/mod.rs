//! Kernel parameters from one definition.
//!
//! [`kernel_params!`] defines a Rust struct with which a launch is written, and a [`Declaration`] of the same
//! parameters as C++ text, which the kernel's source includes as `params.cuh`. There is no second definition
//! to keep in step. The text states the size of every struct and the offset of every field as Rust sees
//! them: a kernel that disagrees does not compile.
//!
//! In a launch a field has its natural type: sizes are `usize`, flags are `bool`. A kernel takes both as
//! `int`. A size that does not fit is an [`Error::TooLarge`] that names kernel, field and value.

mod constants;
mod declaration;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use constants::{MAX_K_SPLITS, MAX_KV_SPLITS, constants_header};
pub(crate) use declaration::{
    CppName, CppType, Declaration, Field, Float2, Float4, Int2, Kind, Real, header,
};

use std::any::Any;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

use bytemuck::Zeroable;

use crate::{Error, Result};

macro_rules! pointer {
    ($(#[$meta:meta])* $name:ident, $cpp:literal) => {
        $(#[$meta])*
        pub(crate) struct $name<T>(u64, PhantomData<fn() -> T>);

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $name<T> {}
        impl<T> Default for $name<T> {
            fn default() -> Self {
                $name(0, PhantomData)
            }
        }
        impl<T> From<u64> for $name<T> {
            fn from(address: u64) -> Self {
                $name(address, PhantomData)
            }
        }
        impl<T: CppName> Param for $name<T> {
            type Device = u64;
            const TYPE: CppType =
                CppType { name: T::NAME, pointer: $cpp, len: 0, is_struct: T::IS_STRUCT };
            fn to_device(self, _: ParamSite<'_>) -> Result<u64> {
                Ok(self.0)
            }
            fn hold(self, _: ParamSite<'_>) -> Result<DriverParam> {
                Ok(DriverParam::Word(self.0))
            }
        }
    };
}
pointer! {
    /// A device address of values that a kernel writes; 0 for null.
    Ptr, "*"
}
pointer! {
    /// A device address of values that a kernel only reads; 0 for null.
    ConstPtr, " const*"
}

impl<T> ConstPtr<T> {
    pub(crate) fn address(self) -> u64 {
        self.0
    }
}

/// The kernel and parameter of a value, for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParamSite<'a> {
    /// The kernel, or the table that kernels read.
    pub(crate) kernel: &'a str,
    /// The parameter, or the field of a struct.
    pub(crate) field: &'static str,
}

/// A parameter in the form that the driver copies.
#[derive(Debug)]
pub(crate) enum DriverParam {
    /// At most 8 bytes. The driver reads the low bytes: hosts of GPUs are little-endian.
    Word(u64),
    /// A larger value.
    Value(Box<dyn Any>),
}

impl DriverParam {
    /// The address of the value, valid until `self` moves.
    pub(crate) fn address(&self) -> *const c_void {
        match self {
            DriverParam::Word(word) => ptr::from_ref(word).cast(),
            DriverParam::Value(value) => ptr::from_ref(&**value).cast(),
        }
    }
}

/// A kernel parameter: its host type and its device type.
pub(crate) trait Param: Copy {
    /// The type in device memory.
    type Device: Copy + Zeroable + 'static;
    /// The type in the kernel's source.
    const TYPE: CppType;
    /// Converts the value; an error if it does not fit.
    fn to_device(self, at: ParamSite<'_>) -> Result<Self::Device>;
    /// Converts the value to a single parameter.
    fn hold(self, at: ParamSite<'_>) -> Result<DriverParam> {
        Ok(DriverParam::Value(Box::new(self.to_device(at)?)))
    }
}

impl Param for usize {
    type Device = i32;
    const TYPE: CppType = CppType::value("int");
    fn to_device(self, at: ParamSite<'_>) -> Result<i32> {
        i32::try_from(self).map_err(|_| Error::TooLarge {
            kernel: at.kernel.to_owned(),
            field: at.field,
            value: self,
            most: i32::MAX as usize,
        })
    }
    fn hold(self, at: ParamSite<'_>) -> Result<DriverParam> {
        self.to_device(at)?.hold(at)
    }
}

impl Param for bool {
    type Device = i32;
    const TYPE: CppType = CppType::value("int");
    fn to_device(self, _: ParamSite<'_>) -> Result<i32> {
        Ok(i32::from(self))
    }
    fn hold(self, _: ParamSite<'_>) -> Result<DriverParam> {
        Ok(DriverParam::Word(u64::from(self)))
    }
}

macro_rules! plain_params {
    ($($type:ty = $name:literal, $bits:expr;)*) => {
        $(impl Param for $type {
            type Device = $type;
            const TYPE: CppType = CppType::value($name);
            fn to_device(self, _: ParamSite<'_>) -> Result<$type> {
                Ok(self)
            }
            fn hold(self, _: ParamSite<'_>) -> Result<DriverParam> {
                let bits: fn($type) -> u64 = $bits;
                Ok(DriverParam::Word(bits(self)))
            }
        })*
    };
}
plain_params! {
    i32 = "int", |x| u64::from(x.cast_unsigned());
    f32 = "float", |x| u64::from(x.to_bits());
    u64 = "size_t", |x| x;
}

impl<T: Param, const N: usize> Param for [T; N]
where
    [T::Device; N]: Zeroable,
{
    type Device = [T::Device; N];
    const TYPE: CppType = CppType { len: N, ..T::TYPE };
    fn to_device(self, at: ParamSite<'_>) -> Result<Self::Device> {
        let mut all = Self::Device::zeroed();
        for (to, from) in all.iter_mut().zip(self) {
            *to = from.to_device(at)?;
        }
        Ok(all)
    }
}

/// The parameters of a kernel, or a struct among them, as [`kernel_params!`] defines them.
pub(crate) trait KernelParams: Copy {
    /// The C++ declaration.
    const DECLARATION: Declaration;
    /// Appends the driver's parameters, in order.
    fn hold_all(self, kernel: &str, held: &mut Vec<DriverParam>) -> Result<()>;
}

/// Defines kernel parameters, one or several structs; see the head of this file.
///
/// - `struct Name { .. }`: the kernel takes a struct of this name by value.
/// - `list struct Name { .. }`: the kernel takes every field as a parameter and is declared with
///   `PARAMS(Name)` between its parentheses.
/// - `table struct Name { .. }`: rows of a table in device memory. Such a struct may have no gaps;
///   [`rows`] makes what is uploaded. `align(16)` after the name raises the alignment, for kernels that
///   read a row in one access.
macro_rules! kernel_params {
    () => {};
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($body:tt)* } $($rest:tt)*) => {
        $crate::params::kernel_params! {
            @define [$(#[$meta])*] [$vis] $name [Struct] [] { $($body)* }
        }
        $crate::params::kernel_params! { $($rest)* }
    };
    ($(#[$meta:meta])* $vis:vis list struct $name:ident { $($body:tt)* } $($rest:tt)*) => {
        $crate::params::kernel_params! {
            @define [$(#[$meta])*] [$vis] $name [List] [] { $($body)* }
        }
        $crate::params::kernel_params! { $($rest)* }
    };
    (
        $(#[$meta:meta])* $vis:vis table struct $name:ident $(align($align:literal))?
        { $($body:tt)* } $($rest:tt)*
    ) => {
        $crate::params::kernel_params! {
            @define [$(#[$meta])*] [$vis] $name [Struct] [$(, align($align))?] { $($body)* }
            // SAFETY: the assertion shows that there are no gaps; the fields are plain bits.
            unsafe impl bytemuck::Pod for Device {}
            const _: () = {
                let bytes = Device::FIELD_BYTES;
                assert!(bytes == size_of::<Device>(), "a struct of a table has no gaps");
            };
        }
        $crate::params::kernel_params! { $($rest)* }
    };
    (@define
        [$(#[$meta:meta])*] [$vis:vis] $name:ident [$kind:ident] [$($repr:tt)*]
        { $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $type:ty),* $(,)? }
        $($more:item)*
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $type,)*
        }

        const _: () = {
            use $crate::params::*;

            #[repr(C $($repr)*)]
            #[derive(Clone, Copy)]
            pub struct Device {
                $($field: <$type as Param>::Device,)*
            }
            impl Device {
                #[allow(dead_code)] // used for tables alone
                const FIELD_BYTES: usize = 0 $(+ size_of::<<$type as Param>::Device>())*;
            }
            // SAFETY: zeros are a value of every field.
            unsafe impl bytemuck::Zeroable for Device {}
            $($more)*

            impl CppName for $name {
                const NAME: &'static str = stringify!($name);
                const IS_STRUCT: bool = true;
            }
            impl Param for $name {
                type Device = Device;
                const TYPE: CppType =
                    CppType { is_struct: true, ..CppType::value(stringify!($name)) };
                fn to_device(self, ParamSite { kernel, .. }: ParamSite<'_>) -> $crate::Result<Device> {
                    Ok(Device {
                        $($field: {
                            let field = stringify!($field);
                            self.$field.to_device(ParamSite { kernel, field })?
                        },)*
                    })
                }
            }
            impl KernelParams for $name {
                const DECLARATION: Declaration = Declaration {
                    name: stringify!($name),
                    kind: Kind::$kind,
                    size: size_of::<Device>(),
                    align: align_of::<Device>(),
                    fields: &[$(Field {
                        name: stringify!($field),
                        cpp: <$type as Param>::TYPE,
                        size: size_of::<<$type as Param>::Device>(),
                        offset: core::mem::offset_of!(Device, $field),
                    }),*],
                };
                fn hold_all(self, kernel: &str, held: &mut Vec<DriverParam>) -> $crate::Result<()> {
                    match Self::DECLARATION.kind {
                        Kind::Struct => held.push(self.hold(ParamSite { kernel, field: "" })?),
                        Kind::List => {
                            $({
                                let field = stringify!($field);
                                held.push(self.$field.hold(ParamSite { kernel, field })?);
                            })*
                        }
                    }
                    Ok(())
                }
            }
        };
    };
}
pub(crate) use kernel_params;

/// Converts the rows of a table; `table` is its name for error messages.
pub(crate) fn rows<T: Param>(table: &str, rows: &[T]) -> Result<Vec<T::Device>> {
    rows.iter().map(|row| row.to_device(ParamSite { kernel: table, field: "" })).collect()
}

/// A number of a table that has no struct.
pub(crate) fn int(table: &str, field: &'static str, value: usize) -> Result<i32> {
    value.to_device(ParamSite { kernel: table, field })
}
