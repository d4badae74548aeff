// Grid-stride loop over elements.
#pragma once

#define FOR_EACH(i, count)                                                                          \
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < (count);                     \
         i += size_t(gridDim.x) * blockDim.x)
