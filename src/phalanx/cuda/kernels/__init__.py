"""The kernels, and the plans that they carry out. `combine.cu` is their source, `combine.ptx` what the driver takes."""
