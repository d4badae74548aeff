// Launches that overlap: one may begin before the launch in front of it has ended, as soon as all thread blocks of that
// one have let it or have ended.
#pragma once
#include "ptx.cuh"

// The wait is for the end of the launch in front. If that one has waited too, all earlier ones are over.
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
