// Elements one by one, whatever their shape.
#pragma once

// For i from 0 to count - 1, dealt out to all threads of the grid in turn.
#define FOR_EACH(i, count)                                                                          \
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < (count);                     \
         i += size_t(gridDim.x) * blockDim.x)
