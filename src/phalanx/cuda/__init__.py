"""NVIDIA's GPUs: the driver, arrays in the memory of a GPU, and the kernels of the collectives.

Nothing here is imported, and no library is opened, until a program passes an array that lies on a GPU.
"""
