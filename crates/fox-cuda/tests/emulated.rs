//! The kernels of decode steps, of PaTH and Wall attention, of the attention backward on Hopper and of the recurrent
//! models, on a CPU: compiled by the host's C++ compiler, with the threads of a block as fibers (`emulated/cuda.h`).
//! Without a compiler the tests say so and pass.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::path::{Path, PathBuf};
use std::process::Command;

use fox_cuda::{Generation, Source, variants as all_variants};

/// The compiler, if there is one, on a system whose C library has what fibers need.
fn compiler() -> Option<&'static str> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let works = |name: &&str| Command::new(name).arg("--version").output().is_ok();
    ["c++", "g++", "clang++"].into_iter().find(works)
}

/// Compiles a program with sources of the crate, once for each list of defines, and runs it; what it prints.
fn run(program: &str, sources: &[&str], variants: &[impl AsRef<str>]) -> Vec<String> {
    let Some(compiler) = compiler() else {
        println!("skipped: no C++ compiler was found");
        return Vec::new();
    };
    let mut printed = Vec::new();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("emulated-{program}"));
    std::fs::create_dir_all(&folder).unwrap();
    let mut all: Vec<Source> =
        all_variants(Generation::Hopper).into_iter().map(|(source, _)| source).collect();
    all.retain(|source| sources.contains(&source.name));
    all.sort_by_key(|source| source.name);
    all.dedup();
    assert_eq!(all.len(), sources.len(), "a source has another name now");
    for (name, text) in Source::files(&all) {
        // NVRTC's way to say this, and the one of others.
        let text =
            text.replace("__INTADDR__(&((type*)0)->field)", "__builtin_offsetof(type, field)");
        let text = text.replace(
            "extern __shared__ __align__(16) u8 memory[];",
            "u8* const memory = emulated_memory;",
        );
        std::fs::write(folder.join(&name), guarded(&name, &text)).unwrap();
    }
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated");
    for name in ["ptx.cuh", "mma.cuh", "tma.cuh", "warpgroup.cuh"] {
        std::fs::write(folder.join(name), "#include \"cuda.h\"\n").unwrap();
    }
    for (n, variant) in variants.iter().map(AsRef::as_ref).enumerate() {
        let executable = folder.join(format!("program-{n}"));
        let compiled = Command::new(compiler)
            // Fortified, a jump from fiber to fiber counts as an attack.
            .args(["-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-DEMULATED=1"])
            .args(variant.split_whitespace().map(|define| format!("-D{define}")))
            .arg("-I")
            .arg(&folder)
            .arg("-I")
            .arg(&own)
            .arg("-include")
            .arg(own.join("cuda.h"))
            .arg(own.join(format!("{program}.cpp")))
            .arg("-o")
            .arg(&executable)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&compiled.stderr);
        assert!(compiled.status.success(), "{program} {variant}: {errors}");
        let ran = Command::new(&executable).output().unwrap();
        let words = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success(), "{program} {variant}: {words}");
        printed.push(words.into_owned());
    }
    printed
}

/// A header that a program can include again, in another namespace, after it has undefined `GUARD_` and its name.
fn guarded(name: &str, text: &str) -> String {
    let Some(name) = name.strip_suffix(".cuh") else { return text.to_owned() };
    match text.split_once("#pragma once") {
        Some((before, after)) => {
            format!("{before}#ifndef GUARD_{name}\n#define GUARD_{name}{after}\n#endif\n")
        }
        None => text.to_owned(),
    }
}

#[test]
fn path_attention_matches_its_definition() {
    let variants = [(64, 1), (64, 0), (128, 1), (128, 0)];
    let defines = |(width, bf16): (usize, i32)| {
        let own = |d: &String| d == &format!("HEAD_DIM={width}") || d == &format!("BF16={bf16}");
        let found = all_variants(Generation::Hopper).into_iter().find(|(source, d)| {
            source.name == "path_walk" && d.iter().filter(|d| own(d)).count() == 2
        });
        found.unwrap().1.join(" ")
    };
    let sources = ["path_prepare", "path_walk", "path_bwd", "path_older", "path_spans"];
    run("path", &sources, &variants.map(defines));
}

#[test]
fn delta_rule_matches_its_recurrence() {
    let variants: Vec<_> = all_variants(Generation::Hopper)
        .into_iter()
        .filter(|(source, _)| source.name == "scan_delta_bwd")
        .map(|(_, defines)| defines.join(" "))
        .collect();
    let narrow = |text: &&String| text.contains("NARROW=1");
    assert_eq!((variants.len(), variants.iter().filter(narrow).count()), (7, 2));
    run("delta", &["scan_delta", "scan_delta_bwd", "scan_delta_channel"], &variants);
}

#[test]
fn short_convolution_matches_its_definition() {
    let variants = [
        "BF16=1 VEC=8 LANES=1 CHUNKS=1 TAPS=4 HEAD_DIM=8",
        "BF16=1 VEC=8 LANES=16 CHUNKS=1 TAPS=4 HEAD_DIM=128",
        "BF16=1 VEC=4 LANES=1 CHUNKS=1 TAPS=4 HEAD_DIM=4",
        "BF16=1 VEC=4 LANES=4 CHUNKS=1 TAPS=4 HEAD_DIM=12",
        "BF16=0 VEC=4 LANES=2 CHUNKS=3 TAPS=2 HEAD_DIM=20",
        "BF16=0 VEC=1 LANES=4 CHUNKS=1 TAPS=5 HEAD_DIM=3",
        "BF16=0 VEC=4 LANES=1 CHUNKS=1 TAPS=1 HEAD_DIM=4",
    ];
    run("conv", &["conv"], &variants);
}

#[test]
fn norm_of_gated_rows_matches_its_definition() {
    let variants = [
        "BF16=1 VEC=8 WARPS=3 CHUNKS=2 WIDTH=1536",
        "BF16=0 VEC=8 WARPS=1 CHUNKS=1 WIDTH=200",
        "BF16=0 VEC=1 WARPS=4 CHUNKS=2 WIDTH=203",
    ];
    run("gate_first", &["gate_first"], &variants);
}

#[test]
fn matmuls_are_batch_invariant() {
    // Equal K splits give equal bits.
    let odd = "WIDTHS=32,96,1056";
    // Hopper's products take 64 columns at once.
    let (four, eight) = ("WIDTHS=256,512,1536", "WIDTHS=512,1024,1536");
    // Weights that can be in 8 bits; those in bf16 come out as if they were.
    let (odd_rounded, eight_rounded) =
        ("WIDTHS=32,96,1056 ROUNDED=1", "WIDTHS=512,1024,1536 ROUNDED=1");
    let groups: [(&str, &[&str]); 8] = [
        (
            odd_rounded,
            &[
                "TILES=0 NT=1 K_SPLITS=4 DEPTH=12 GLU=0",
                "TILES=0 NT=1 K_SPLITS=4 DEPTH=12 GLU=0 INT8=1",
                "TILES=0 NT=2 K_SPLITS=4 DEPTH=8 GLU=0 INT8=1",
                "TILES=1 BM=64 BN=32 WM=4 WN=1 K_SPLITS=4 STAGES=8 GLU=0 SPLIT=0",
            ],
        ),
        (
            odd_rounded,
            &[
                "TILES=0 NT=1 K_SPLITS=4 DEPTH=3 GLU=1",
                "TILES=0 NT=1 K_SPLITS=4 DEPTH=3 GLU=1 INT8=1",
            ],
        ),
        (
            eight_rounded,
            &[
                "TILES=0 NT=2 K_SPLITS=8 DEPTH=3 GLU=1 INT8=1",
                "HOPPER=1 BM=64 BN=32 K_SPLITS=8 STAGES=4 GLU=1 SPLIT=0",
            ],
        ),
        (
            odd,
            &[
                "TILES=0 NT=1 K_SPLITS=4 DEPTH=12 GLU=0",
                "TILES=0 NT=2 K_SPLITS=4 DEPTH=8 GLU=0",
                "TILES=1 BM=64 BN=32 WM=4 WN=1 K_SPLITS=4 STAGES=8 GLU=0 SPLIT=0",
                "TILES=1 BM=64 BN=128 WM=2 WN=4 K_SPLITS=4 STAGES=4 GLU=0 SPLIT=0",
            ],
        ),
        (
            odd,
            &[
                "TILES=0 NT=2 K_SPLITS=8 DEPTH=3 GLU=1",
                "TILES=1 BM=64 BN=64 WM=2 WN=2 K_SPLITS=8 STAGES=6 GLU=1 SPLIT=0",
                "TILES=1 BM=128 BN=128 WM=2 WN=4 K_SPLITS=8 STAGES=3 GLU=1 SPLIT=0",
            ],
        ),
        (
            eight,
            &[
                "TILES=1 BM=64 BN=64 WM=2 WN=2 K_SPLITS=8 STAGES=6 GLU=0 SPLIT=1",
                "TILES=1 BM=128 BN=128 WM=2 WN=4 K_SPLITS=8 STAGES=3 GLU=0 SPLIT=1",
                "HOPPER=1 BM=64 BN=8 K_SPLITS=8 STAGES=12 GLU=0 SPLIT=1",
                "HOPPER=1 BM=128 BN=64 K_SPLITS=8 STAGES=6 GLU=0 SPLIT=1",
            ],
        ),
        (
            four,
            &[
                "TILES=0 NT=1 K_SPLITS=4 DEPTH=12 GLU=0",
                "HOPPER=1 BM=64 BN=32 K_SPLITS=4 STAGES=9 GLU=0 SPLIT=0",
                "HOPPER=1 BM=64 BN=64 K_SPLITS=4 STAGES=6 GLU=0 SPLIT=0",
                "HOPPER=1 BM=128 BN=128 K_SPLITS=4 STAGES=3 GLU=0 SPLIT=0",
            ],
        ),
        (
            eight,
            &[
                "TILES=0 NT=2 K_SPLITS=8 DEPTH=3 GLU=1",
                "HOPPER=1 BM=64 BN=32 K_SPLITS=8 STAGES=4 GLU=1 SPLIT=0",
            ],
        ),
    ];
    for (widths, variants) in groups {
        let variants: Vec<String> = variants.iter().map(|v| format!("{v} {widths}")).collect();
        let printed = run(
            "matmul",
            &["decode_matmul", "decode_matmul_sm90", "decode_matmul_tiled"],
            &variants,
        );
        for words in &printed {
            assert_eq!(words, &printed[0], "{variants:?}");
            assert_eq!(words.split_whitespace().count(), 3, "{words}");
        }
    }
}

#[test]
fn int8_weights_round_trip() {
    let variants = [
        "BF16=1 VEC=8 WIDTHS=64,96,1056",
        "BF16=0 VEC=8 WIDTHS=64,96,1056",
        "BF16=1 VEC=1 WIDTHS=1,70,129",
        "BF16=0 VEC=1 WIDTHS=1,70,129",
    ];
    run("packed", &["packed"], &variants);
}

#[test]
fn heads_attention_and_norms_match_reference() {
    run(
        "steps",
        &["decode_rows", "decode_attention", "decode_attend", "decode_attend_few"],
        &["HEAD_DIM=64 ITEMS=2 ROWS_IN_FLIGHT=16", "HEAD_DIM=128 ITEMS=2 SLABS=1 ROWS_IN_FLIGHT=8"],
    );
}

#[test]
fn samples_equal_those_of_a_sorted_vocabulary() {
    run("sample", &["decode_sample"], &[""]);
}

#[test]
fn wall_attention_matches_its_definition() {
    // More shared memory than any variant needs.
    let variants = [
        "HEAD_DIM=64 WIDE=1 GATES=1 SHARED_BYTES=200000",
        "HEAD_DIM=64 WIDE=0 GATES=1 SHARED_BYTES=200000",
        "HEAD_DIM=96 WIDE=1 GATES=0 SHARED_BYTES=200000",
        "HEAD_DIM=192 WIDE=0 GATES=0 SHARED_BYTES=200000",
    ];
    run("wall", &["wall", "wall_bwd", "wall_spans"], &variants);
}

#[test]
fn attention_backward_on_hopper_matches_its_definition() {
    let mut variants: Vec<String> = all_variants(Generation::Hopper)
        .into_iter()
        .filter(|(source, _)| source.name == "attention_bwd_sm90")
        .map(|(_, defines)| defines.join(" "))
        .collect();
    variants.retain(|defines| {
        let window_alone = defines.contains("GATES=0") && defines.contains("WINDOW=1");
        !(window_alone || defines.contains("HEAD_DIM=96"))
    });
    let sources = ["attention_gates", "attention_plan", "attention_rows", "attention_bwd_sm90"];
    let printed = run("attention_bwd", &sources, &variants);
    for (variant, words) in variants.iter().zip(&printed) {
        println!("{variant}\n{words}");
    }
    assert_eq!(variants.len(), 18);
}
