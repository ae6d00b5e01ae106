"""The portable kernel: chunked matrix multiplications in plain PyTorch, for every device, head size and dtype."""

from qlacompile.kernels.reference.kernel import ReferenceKernel

KERNELS = [ReferenceKernel()]
