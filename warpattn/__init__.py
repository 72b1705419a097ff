"""warpattn: attention kernels for Hopper, Blackwell and CDNA in Triton's Gluon, with a simulator for any CPU.

    import warpattn as wa
    out = wa.attention(q, k, v, mask=wa.Causal())

It offers three functions (`attention`, `attention_varlen`, `attention_paged`) and their arguments: masks, scores,
sequences, functions for custom masks and scores. `append_paged` and `append_slots` fill a cache; `DecodePlan`,
`PrefillPlan` and `StepPlan` keep the launches of a serving step. Importing the package does not import torch, so
`warpattn.sim` can be used without it; the first use of a public name imports torch, the first launch Triton.
"""

import atexit
import importlib.util
import sys
import typing

from warpattn.runtime import triton_exit

if typing.TYPE_CHECKING:
    from warpattn.public import *  # noqa: F403

__version__ = "0.1.0"

# Registered early: callbacks run last to first, so those registered after this import still find Triton whole.
atexit.register(triton_exit.release_triton)


def __getattr__(name: str) -> typing.Any:
    """Return a public name, a submodule or `__all__`; public names are imported on first use."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'warpattn' has no attribute {name!r}")
    if name != "__all__" and importlib.util.find_spec(f"warpattn.{name}") is not None:
        return importlib.import_module(f"warpattn.{name}")
    public = importlib.import_module("warpattn.public")
    globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
    if name not in globals():  # the error gets name and module, so that Python can suggest a similar name
        raise AttributeError(f"module 'warpattn' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return globals()[name]


def __dir__() -> list[str]:
    """Return what `wa.<tab>` offers: the public names, without the modules that this file imports."""
    return [*(name for name in globals() if name.startswith("__")), *__getattr__("__all__")]
