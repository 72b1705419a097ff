"""warpattn: attention kernels for Hopper, Blackwell and CDNA in Triton's Gluon, and the same on any CPU.

    import warpattn as wa
    out = wa.attention(q, k, v, mask=wa.Causal())

Three functions (`attention`, `attention_varlen`, `attention_paged`) and the values they take: masks, scores, sequences,
and the little language of custom masks and scores; `append_paged` and `append_slots` fill a cache, `DecodePlan`,
`PrefillPlan` and `StepPlan` keep the launches of a serving step. Importing this imports nothing, so that `warpattn.sim`
can be used without the rest; the first use of a name imports torch, a launch Triton.
"""

import atexit
import importlib.util
import sys
import typing

from warpattn.runtime import triton_exit

if typing.TYPE_CHECKING:
    from warpattn.public import *  # noqa: F403

__version__ = "0.1.0"

# Early, because callbacks run last to first: one that is registered after this import still finds Triton whole.
atexit.register(triton_exit.release_triton)


def __getattr__(name: str) -> typing.Any:
    """A public name, a submodule, or `__all__`."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'warpattn' has no attribute {name!r}")
    if name != "__all__" and importlib.util.find_spec(f"warpattn.{name}") is not None:
        return importlib.import_module(f"warpattn.{name}")
    public = importlib.import_module("warpattn.public")
    globals().update({each: getattr(public, each) for each in public.__all__}, __all__=public.__all__)
    if name not in globals():  # with its module, so that Python can say which name was meant
        raise AttributeError(f"module 'warpattn' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return globals()[name]


def __dir__() -> list[str]:
    """What `wa.<tab>` offers: the public names, without the modules that this file imports."""
    return [*(name for name in globals() if name.startswith("__")), *__getattr__("__all__")]
