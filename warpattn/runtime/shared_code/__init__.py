"""Lets the warpgroups of a kernel run one copy of a role's code, by changing the PTX of a compiled kernel.

Triton compiles every role of `warp_specialize` by itself, so warpgroups that do the same would get a copy each, and an
SM's instruction cache does not hold several beside the loading warp: kernels of short rows waited for instructions up
to a tenth of their time (bench/notes.md, 213). So the kernel has the code in its first role only, and stand-ins for the
others, which end at once; this leads their warps into the first one's code and back:

    role 0 ──────────▶ attend ──▶ number 0 ──▶ end of role 0
    stand-in 1 ────────▲     └──▶ number 1 ──▶ end of stand-in 1

    ptx.py     lines of a kernel: what follows, reads and writes
    join.py    writes the text with the roads into the code and out of it

    share_role(ptx)   the text with them; raises NotShared where the code needs what another role cannot compute
"""

from .join import NotShared, share_role

__all__ = ["NotShared", "share_role"]
