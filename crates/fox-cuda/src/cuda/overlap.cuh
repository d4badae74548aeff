// Programmatic dependent launch: a kernel may start before its predecessor in the stream has ended, once all thread
// blocks of the predecessor have called let_successor_begin or have exited.
#pragma once
#include "ptx.cuh"

// Waits for the end of the predecessor. If that one has waited too, all earlier launches have ended.
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
