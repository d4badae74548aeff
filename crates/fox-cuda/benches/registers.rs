//! Compiles every kernel for every supported architecture and prints registers and spills.
//! Needs NVRTC, no GPU: `cargo bench -p fox-cuda --bench registers -- [SOURCE] [sm_90a]`.

use fox_cuda::{ComputeCapability, compile, nvrtc_is_present};

fn main() {
    if !nvrtc_is_present() {
        println!("skipped: libnvrtc was not found");
        return;
    }
    let mut wanted = std::env::args().skip(1).filter(|word| word != "--bench");
    let (source_name, only) = (wanted.next(), wanted.next());
    let mut failures = 0;
    for (major, minor) in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)] {
        let capability = ComputeCapability { major, minor };
        let (architecture, generation) = (capability.target(), capability.generation());
        if only.as_deref().is_some_and(|only| only != architecture) {
            continue;
        }
        let mut variants = fox_cuda::variants(generation);
        variants
            .retain(|(source, _)| source_name.as_deref().is_none_or(|name| name == source.name));
        for (source, defines) in variants {
            match compile(source, &architecture, &defines) {
                Ok(compiled) => {
                    println!("{architecture} {} {}", source.name, defines.join(" "));
                    for line in compiled.log.lines().filter(|l| {
                        l.contains("spill") || l.contains("Used") || l.contains("serialized")
                    }) {
                        println!("    {}", line.trim());
                    }
                }
                Err(e) => {
                    failures += 1;
                    println!("{e}");
                }
            }
        }
    }
    std::process::exit(i32::from(failures > 0));
}
