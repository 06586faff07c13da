"""What a pass over a network does, written down in sizes alone: the one source of a model's derived counts.

A `Tape` is told, in the order of a forward pass, which kernels run on which arrays. An array is a size, not
numbers. From that one list follow the FLOPs, the bytes saved for the backward pass (every array once, however
many kernels keep it), the kernels launched, and the bytes moved by them one by one or at the fused limit.
"""

from twoaxis.tape.arrays import Array, Kernel
from twoaxis.tape.tape import PASSING, Backend, Tape

__all__ = ["PASSING", "Array", "Backend", "Kernel", "Tape"]
