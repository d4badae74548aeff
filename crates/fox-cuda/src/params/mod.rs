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
            fn to_device(self, _: Place<'_>) -> Result<u64> {
                Ok(self.0)
            }
            fn hold(self, _: Place<'_>) -> Result<Held> {
                Ok(Held::Word(self.0))
            }
        }
    };
}
pointer! {
    /// A device address of values that a kernel writes; 0 where there are none.
    Ptr, "*"
}
pointer! {
    /// A device address of values that a kernel only reads; 0 where there are none.
    ConstPtr, " const*"
}

impl<T> ConstPtr<T> {
    pub(crate) fn address(self) -> u64 {
        self.0
    }
}

/// Where a value goes, for error messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    /// The kernel, or the table that kernels read.
    pub(crate) kernel: &'a str,
    /// The parameter, or the field of a struct.
    pub(crate) field: &'static str,
}

/// A parameter as the driver copies it.
#[derive(Debug)]
pub(crate) enum Held {
    /// At most a machine word. The driver reads as many of the low bytes as the parameter has: hosts of GPUs
    /// are little-endian.
    Word(u64),
    /// Anything else.
    Value(Box<dyn Any>),
}

impl Held {
    /// Where the value lies, as long as `self` stays in its place.
    pub(crate) fn address(&self) -> *const c_void {
        match self {
            Held::Word(word) => ptr::from_ref(word).cast(),
            Held::Value(value) => ptr::from_ref(&**value).cast(),
        }
    }
}

/// A value that a launch is given, and what the kernel sees of it.
pub(crate) trait Param: Copy {
    /// In memory that both see.
    type Device: Copy + Zeroable + 'static;
    /// In the kernel's source.
    const TYPE: CppType;
    /// The conversion; an error where the value does not fit.
    fn to_device(self, at: Place<'_>) -> Result<Self::Device>;
    /// As a parameter of its own.
    fn hold(self, at: Place<'_>) -> Result<Held> {
        Ok(Held::Value(Box::new(self.to_device(at)?)))
    }
}

impl Param for usize {
    type Device = i32;
    const TYPE: CppType = CppType::value("int");
    fn to_device(self, at: Place<'_>) -> Result<i32> {
        i32::try_from(self).map_err(|_| Error::TooLarge {
            kernel: at.kernel.to_owned(),
            field: at.field,
            value: self,
            most: i32::MAX as usize,
        })
    }
    fn hold(self, at: Place<'_>) -> Result<Held> {
        self.to_device(at)?.hold(at)
    }
}

impl Param for bool {
    type Device = i32;
    const TYPE: CppType = CppType::value("int");
    fn to_device(self, _: Place<'_>) -> Result<i32> {
        Ok(i32::from(self))
    }
    fn hold(self, _: Place<'_>) -> Result<Held> {
        Ok(Held::Word(u64::from(self)))
    }
}

macro_rules! plain_params {
    ($($type:ty = $name:literal, $bits:expr;)*) => {
        $(impl Param for $type {
            type Device = $type;
            const TYPE: CppType = CppType::value($name);
            fn to_device(self, _: Place<'_>) -> Result<$type> {
                Ok(self)
            }
            fn hold(self, _: Place<'_>) -> Result<Held> {
                let bits: fn($type) -> u64 = $bits;
                Ok(Held::Word(bits(self)))
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
    fn to_device(self, at: Place<'_>) -> Result<Self::Device> {
        let mut all = Self::Device::zeroed();
        for (to, from) in all.iter_mut().zip(self) {
            *to = from.to_device(at)?;
        }
        Ok(all)
    }
}

/// The parameters of a kernel, or a struct among them, as [`kernel_params!`] defines them.
pub(crate) trait KernelParams: Copy {
    /// The same in C++.
    const DECLARATION: Declaration;
    /// Adds what the driver is given, in order.
    fn hold_all(self, kernel: &str, held: &mut Vec<Held>) -> Result<()>;
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
                #[allow(dead_code)] // looked at for tables alone
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
                fn to_device(self, Place { kernel, .. }: Place<'_>) -> $crate::Result<Device> {
                    Ok(Device {
                        $($field: {
                            let field = stringify!($field);
                            self.$field.to_device(Place { kernel, field })?
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
                fn hold_all(self, kernel: &str, held: &mut Vec<Held>) -> $crate::Result<()> {
                    match Self::DECLARATION.kind {
                        Kind::Struct => held.push(self.hold(Place { kernel, field: "" })?),
                        Kind::List => {
                            $({
                                let field = stringify!($field);
                                held.push(self.$field.hold(Place { kernel, field })?);
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

/// Rows of a table as the device has them; `table` is its name for error messages.
pub(crate) fn rows<T: Param>(table: &str, rows: &[T]) -> Result<Vec<T::Device>> {
    rows.iter().map(|row| row.to_device(Place { kernel: table, field: "" })).collect()
}

/// A number of a table that has no struct.
pub(crate) fn int(table: &str, field: &'static str, value: usize) -> Result<i32> {
    value.to_device(Place { kernel: table, field })
}
