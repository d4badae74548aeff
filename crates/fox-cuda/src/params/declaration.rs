//! Kernel parameters as C++ text.

use std::collections::BTreeSet;

/// A C++ type as a field has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CppType {
    /// The type, or what a pointer points at.
    pub(crate) name: &'static str,
    /// How a pointer is written: `*` or ` const*`; empty for a value.
    pub(crate) pointer: &'static str,
    /// The length of an array; 0 for a single value.
    pub(crate) len: usize,
    /// Whether the type is a struct of this crate.
    pub(crate) is_struct: bool,
}

impl CppType {
    pub(crate) const fn value(name: &'static str) -> Self {
        CppType { name, pointer: "", len: 0, is_struct: false }
    }

    /// The type, or that of an element of the array.
    fn one(&self) -> String {
        format!("{}{}", self.name, self.pointer)
    }
}

/// A type that kernels know by this name, so that pointers to it can be declared.
pub(crate) trait CppName {
    const NAME: &'static str;
    /// Whether it is a struct of this crate, which must be declared before a pointer to it.
    const IS_STRUCT: bool = false;
}

macro_rules! cpp_names {
    ($($type:ty = $name:literal;)*) => {
        $(impl CppName for $type {
            const NAME: &'static str = $name;
        })*
    };
}
cpp_names! {
    f32 = "float";
    f64 = "double";
    i8 = "signed char";
    i32 = "int";
    u32 = "u32";
    u64 = "u64";
    half::bf16 = "u16";
    () = "void";
}

/// Types that exist in C++ alone.
macro_rules! device_types {
    ($($(#[$meta:meta])* $name:ident = $cpp:literal;)*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug)]
            pub(crate) enum $name {}
            impl CppName for $name {
                const NAME: &'static str = $cpp;
            }
        )*
    };
}
device_types! {
    /// The type of activations that a kernel is compiled for, see `real.cuh`.
    Real = "real";
    /// Two floats.
    Float2 = "float2";
    /// Four floats.
    Float4 = "float4";
    /// Two ints.
    Int2 = "int2";
}

/// A field of a struct, or one of several parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) cpp: CppType,
    /// Bytes, as Rust sees it.
    pub(crate) size: usize,
    /// Bytes from the beginning of the struct, as Rust sees it.
    pub(crate) offset: usize,
}

/// How kernels see a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// As a struct.
    Struct,
    /// As parameters, one for each field.
    List,
}

/// Parameters that kernels and Rust share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Declaration {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Size and alignment of the struct in bytes, as Rust sees them.
    pub(crate) size: usize,
    pub(crate) align: usize,
    pub(crate) fields: &'static [Field],
}

impl Declaration {
    /// The C++ text, with assertions that its types have the sizes and offsets of the Rust struct.
    pub(super) fn cpp(&self) -> String {
        match self.kind {
            Kind::Struct => self.cpp_struct(),
            Kind::List => self.cpp_list(),
        }
    }

    fn cpp_struct(&self) -> String {
        let Declaration { name, size, align, fields, .. } = self;
        let mut text = format!("struct alignas({align}) {name} {{\n");
        text.extend(fields.iter().map(|field| match field.cpp.len {
            0 => format!("    {} {};\n", field.cpp.one(), field.name),
            len => format!("    {} {}[{len}];\n", field.cpp.one(), field.name),
        }));
        text += "};\n";
        text += &assertion(format_args!("sizeof({name})"), *size);
        text.extend(
            fields.iter().map(|field| {
                assertion(format_args!("OFFSET({name}, {})", field.name), field.offset)
            }),
        );
        text
    }

    /// A macro that stands for the parameters of a kernel.
    fn cpp_list(&self) -> String {
        let one = |field: &Field| {
            let value = if field.cpp.pointer.is_empty() { "const " } else { "" };
            format!("{value}{} {}", field.cpp.one(), field.name)
        };
        let list: Vec<String> = self.fields.iter().map(one).collect();
        let mut text = format!("#define PARAMS_{} {}\n", self.name, list.join(", "));
        text.extend(
            self.fields
                .iter()
                .map(|field| assertion(format_args!("sizeof({})", field.cpp.one()), field.size)),
        );
        text
    }
}

fn assertion(expression: std::fmt::Arguments<'_>, value: usize) -> String {
    format!("static_assert({expression} == {value}, \"in Rust {expression} is {value}\");\n")
}

/// The text of `params.cuh` for a source with these parameters.
pub(crate) fn header(declarations: &[Declaration]) -> String {
    let fields = || declarations.iter().flat_map(|declaration| declaration.fields);
    let mut text = String::from("#pragma once\n#include \"ptx.cuh\"\n");
    if fields().any(|field| field.cpp.name == Real::NAME) {
        text += "#include \"real.cuh\"\n";
    }
    // NVRTC has no offsetof; this is what its C++ front end offers instead.
    text += "#define OFFSET(type, field) __INTADDR__(&((type*)0)->field)\n";
    text += "#define PARAMS(name) PARAMS_##name\n";
    let structs: BTreeSet<&str> =
        fields().filter(|field| field.cpp.is_struct).map(|field| field.cpp.name).collect();
    text.extend(structs.iter().map(|name| format!("struct {name};\n")));
    text.extend(declarations.iter().map(Declaration::cpp));
    text += "#undef OFFSET\n";
    text
}
