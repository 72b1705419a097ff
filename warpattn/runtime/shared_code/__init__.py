"""Lets warpgroups that do the same share one copy of a loop, by changing the PTX of a compiled kernel.

Triton compiles every role of `warp_specialize` by itself, so two warpgroups of one role's code get two copies of it.
An SM's instruction cache does not hold both beside the masked tiles and the loading warp: kernels of short rows waited
for instructions up to a tenth of their time (bench/notes.md, 213). This removes the second copy; its warpgroup enters
the loop of the first:

    role 0 ──▶ its first product ──▶ loop over tiles ──▶ end of role 0
    role 1 ──▶ its first product ───▲               └──▶ end of role 1

    ptx.py     lines, basic blocks and loops of a kernel
    equal.py   finds loops that are equal up to register names, and how a path can enter another's loop
    join.py    writes the text with one of them

    share_loops(ptx)   the text with each such loop once; the same text where there is none
"""

from .join import share_loops

__all__ = ["share_loops"]
