"""One line of TTGIR per operation, as the supported Triton prints it.

`python -m tests.sim.machine.operations.golden` writes them anew.

A Triton that prints an operation differently shows here, and not as a parse error in a user's kernel.
"""

import re
from pathlib import Path

import numpy as np

from tests.sim.builds import compiled, type_of
from tests.sim.machine.kernels import gluon as gluon_kernels
from tests.sim.machine.kernels import plain as plain_kernels
from warpattn.sim import TensorDescriptor

FILE = Path(__file__).parents[2] / "golden.txt"
_F, _I, _H = (np.zeros(1, dtype) for dtype in (np.float32, np.int32, np.float16))


def texts() -> list[str]:
    """TTGIR of kernels that use every family of operations."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    desc = TensorDescriptor(np.zeros((64, 64), np.float16), (64, 64))
    wanted = [
        (gluon_kernels.copy_kernel, [desc, desc], {"FAULT": ""}),
        (gluon_kernels.product_kernel, [desc, desc, _F], {"FAULT": ""}),
        (gluon_kernels.ring_kernel, [desc, _F, 3], {"FAULT": ""}),
        (gluon_kernels.handover_kernel, [desc], {"FAULT": "named"}),
        (gluon_kernels.views_kernel, [_I, _I], {}),
        (gluon_kernels.map_kernel, [_F, _F, _F], {}),
        (plain_kernels.matmul_kernel, [_H, _H, _F], {"N": 64, "K": 128, "BLOCK": 64}),
        (plain_kernels.matmul_kernel, [_F, _F, _F], {"N": 64, "K": 128, "BLOCK": 16}),
        (plain_kernels.reduce_kernel, [_F, _F, _I], {"M": 8, "N": 32, "OP": "argmax", "AXIS": 1}),
        (plain_kernels.scan_kernel, [_F, _F, _F], {"N": 32, "OP": "pairs"}),
        (plain_kernels.shape_kernel, [_F, _F], {"OP": "gather"}),
        (plain_kernels.shape_kernel, [_F, _F], {"OP": "trans"}),
        (plain_kernels.shape_kernel, [_F, _F], {"OP": "split"}),
        (plain_kernels.histogram_kernel, [_I, _I], {}),
        (plain_kernels.atomic_kernel, [_I, _I], {"N": 8, "OP": "add"}),
        (plain_kernels.lock_kernel, [_I, _I], {"N": 8}),
        (plain_kernels.unary_kernel, [_F, _F], {"N": 64, "OP": "exp2"}),
        (plain_kernels.unary_kernel, [_F, _H], {"N": 64, "OP": "cast"}),
        (plain_kernels.binary_kernel, [_F, _F, _F, 64], {"N": 64, "OP": "where"}),
        (plain_kernels.binary_kernel, [_F, _F, _F, 64], {"N": 64, "OP": "max"}),
        (gluon_kernels.asm_kernel, [_F, _F], {"TEXT": "tanh.approx.f32 $0, $1;"}),
        (plain_kernels.loop_kernel, [_I, _I, 3], {}),
        (plain_kernels.device_descriptor_kernel, [_F, _F, 50, 32], {"B": 32}),
    ]
    found = []
    for kernel, values, constants in wanted:
        types = iter([type_of(value, layout) for value in values])
        signature = [(name, "constexpr" if name in constants else next(types)) for name in kernel.arg_names]
        found.append(compiled(kernel, tuple(signature), tuple(constants.items()), 4).asm["ttgir"])
    return found


def lines() -> str:
    """For every operation the shortest line that has it, without names of values and locations."""
    best: dict[str, str] = {}
    for line in (line for text in texts() for line in text.splitlines()):
        found = re.match(r'\s+(?:%[^=]*? = )?"?([a-z]\w*\.[\w.]+)"?', line)
        if found and not line.startswith("#"):
            plain = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", line.strip())
            plain = re.sub(r"%[\w.$-]+", "%", re.sub(r"#(\w+?)\d*\b", r"#\1", plain))
            best[found[1]] = min(best.get(found[1], plain), plain, key=lambda text: (len(text), text))
    return "".join(f"{best[name]}\n" for name in sorted(best))


if __name__ == "__main__":
    FILE.write_text(lines())
