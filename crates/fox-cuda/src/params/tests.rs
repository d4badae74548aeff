use super::*;
use crate::{Source, compile, nvrtc_is_present};

kernel_params! {
    /// Two ints and a gap in front of a pointer.
    #[derive(Default)]
    struct Probe {
        rows: usize,
        wide: bool,
        x: ConstPtr<f32>,
        sizes: [usize; 3],
        eps: f32,
    }
}
pub(crate) const PROBE: Declaration = Probe::DECLARATION;

kernel_params! {
    list struct ProbeList {
        y: Ptr<Real>,
        p: Probe,
        count: u64,
        rows: usize,
        value: f32,
        shift: i32,
    }
}

kernel_params! {
    table struct ProbeRow align(16) {
        first: usize,
        count: usize,
        kind: i32,
        last: bool,
    }
}

fn held(params: impl KernelParams) -> Result<Vec<DriverParam>> {
    let mut held = Vec::new();
    params.hold_all("probe_fwd", &mut held)?;
    Ok(held)
}

const TOO_LARGE: usize = i32::MAX as usize + 1;

#[test]
fn declaration_matches_the_rust_struct() {
    let expected = "\
struct alignas(8) Probe {
    int rows;
    int wide;
    float const* x;
    int sizes[3];
    float eps;
};
static_assert(sizeof(Probe) == 32, \"in Rust sizeof(Probe) is 32\");
static_assert(OFFSET(Probe, rows) == 0, \"in Rust OFFSET(Probe, rows) is 0\");
static_assert(OFFSET(Probe, wide) == 4, \"in Rust OFFSET(Probe, wide) is 4\");
static_assert(OFFSET(Probe, x) == 8, \"in Rust OFFSET(Probe, x) is 8\");
static_assert(OFFSET(Probe, sizes) == 16, \"in Rust OFFSET(Probe, sizes) is 16\");
static_assert(OFFSET(Probe, eps) == 28, \"in Rust OFFSET(Probe, eps) is 28\");
";
    assert_eq!(PROBE.cpp(), expected);
    let list = ProbeList::DECLARATION.cpp();
    let expected = "#define PARAMS_ProbeList real* y, const Probe p, const size_t count, \
                    const int rows, const float value, const int shift\n";
    assert!(list.starts_with(expected), "{list}");
    assert!(header(&[ProbeList::DECLARATION]).contains("#include \"real.cuh\""));
}

#[test]
fn parameters_keep_their_order() {
    let p = Probe { rows: 7, wide: true, x: 0x1234_5678_9abc.into(), sizes: [1, 2, 3], eps: 0.5 };
    let list = ProbeList { y: 99.into(), p, count: 1 << 40, rows: 5, value: -1.5, shift: -2 };
    let held = held(list).unwrap();
    let words = held.iter().map(|held| match held {
        DriverParam::Word(word) => Some(*word),
        DriverParam::Value(_) => None,
    });
    let expected = [
        Some(99),
        None,
        Some(1 << 40),
        Some(5),
        Some(u64::from((-1.5f32).to_bits())),
        Some(u64::from((-2i32).cast_unsigned())),
    ];
    assert_eq!(words.collect::<Vec<_>>(), expected);
    // The struct, as bytes.
    let mut bytes = Vec::new();
    for int in [7, 1] {
        bytes.extend(i32::to_le_bytes(int));
    }
    bytes.extend(0x1234_5678_9abc_u64.to_le_bytes());
    for int in [1, 2, 3] {
        bytes.extend(i32::to_le_bytes(int));
    }
    bytes.extend(0.5f32.to_le_bytes());
    // SAFETY: `Probe` has no gaps, and `held` has one of its `Device` in the second place.
    let got = unsafe { std::slice::from_raw_parts(held[1].address().cast::<u8>(), PROBE.size) };
    assert_eq!(got, bytes);
}

#[test]
fn rejects_numbers_that_do_not_fit() {
    let message = |result: Result<Vec<DriverParam>>| result.err().map(|e| e.to_string());
    let said = |field: &str| {
        Some(format!(
            "kernel probe_fwd: {field} is 2147483648, and it can be at most 2147483647; give the op less at a time"
        ))
    };
    let list = ProbeList {
        y: 0.into(),
        p: Probe::default(),
        count: u64::MAX,
        rows: i32::MAX as usize,
        value: 0.0,
        shift: 0,
    };
    assert_eq!(message(held(list)), None);
    let rows = ProbeList { rows: TOO_LARGE, ..list };
    assert_eq!(message(held(rows)), said("rows"));
    // In a struct, and in an array of a struct.
    let inside = Probe { sizes: [1, TOO_LARGE, 1], ..Probe::default() };
    assert_eq!(message(held(inside)), said("sizes"));
    assert_eq!(message(held(ProbeList { p: inside, ..list })), said("sizes"));
    // And in a table.
    let row = ProbeRow { first: 0, count: TOO_LARGE, kind: -1, last: true };
    let error = super::rows("the table of probes", &[row]).map(|_| ()).unwrap_err().to_string();
    assert!(error.starts_with("kernel the table of probes: count is 2147483648"), "{error}");
}

const TEXT: &str = "
#include \"params.cuh\"
extern \"C\" __global__ void probe(const Probe p, float* y) { *y = p.x[p.rows] + p.eps; }
";

fn compiled(params: &'static [Declaration]) -> Result<()> {
    let source = Source { name: "probe", text: TEXT, headers: &[], params };
    compile(source, "sm_80", &[]).map(|_| ())
}

#[test]
fn mismatched_struct_does_not_compile() {
    if !nvrtc_is_present() {
        println!("skipped: libnvrtc was not found");
        return;
    }
    compiled(&[PROBE]).unwrap();
    // A field of another size: what follows it lies elsewhere, and the struct is longer.
    const WIDER: Declaration = Declaration {
        fields: &[
            Field { cpp: CppType::value("size_t"), ..PROBE.fields[0] },
            PROBE.fields[1],
            PROBE.fields[2],
            PROBE.fields[3],
            PROBE.fields[4],
        ],
        ..PROBE
    };
    let error = compiled(&[WIDER]).unwrap_err().to_string();
    assert!(error.contains("in Rust sizeof(Probe) is 32"), "{error}");
    assert!(error.contains("in Rust OFFSET(Probe, x) is 8"), "{error}");
    // The same fields in another order: the size is the same, the offsets are not.
    const SWAPPED: Declaration = Declaration {
        fields: &[
            PROBE.fields[1],
            PROBE.fields[0],
            PROBE.fields[2],
            PROBE.fields[3],
            PROBE.fields[4],
        ],
        ..PROBE
    };
    let error = compiled(&[SWAPPED]).unwrap_err().to_string();
    assert!(!error.contains("sizeof(Probe)"), "{error}");
    assert!(error.contains("in Rust OFFSET(Probe, rows) is 0"), "{error}");
}
