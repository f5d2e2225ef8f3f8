"""Own GPU kernels, in Triton: one file for each kind of layer. They know tensors and nothing of
models or the server; importing one needs Triton, so whoever has another way imports it when used.
`cublaslt` is a library's, called by hand, and needs none.
"""
