// All kernels, as one module for the device.

#include "dequant.cu"
#include "encode.cu"
