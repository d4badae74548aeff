// Programmatic dependent launch: a kernel may start as soon as every thread block of its predecessor has called
// let_successor_begin or exited.
#pragma once
#include "ptx.cuh"

// Waits until the predecessor has completed. If that one waited too, all earlier launches have completed.
DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void let_successor_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
