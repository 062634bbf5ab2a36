"""GPU kernels on the CPU: Triton's interpreter, switched on before a kernel is ever defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"
