"""Which inputs of a call require gradients, and whether the backward of its architecture can compute them.

    differentiated(named inputs) ─▶ names        () under torch.no_grad()
    check_gradients(rules, call, …)              one sentence with every name, if they cannot be computed
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from warpattn.errors import AttentionError, Rules
from warpattn.problem.backends import LIMITS, USE_REFERENCE
from warpattn.problem.problem import Call, Problem
from warpattn.sequences import Sizes

CAPTURED = "a tensor captured by the score"
WITHOUT = "or run under torch.no_grad()"


def named_inputs(call: Call, captured: Iterable[Tensor]) -> list[tuple[str, object]]:
    """Return every tensor of a call that may require a gradient, with its name."""
    operands, beside = call.sequence.operands(call.q, call.k, call.v), call.sequence.beside()
    return [*operands.items(), *beside.items(), ("sinks", call.sinks), *((CAPTURED, x) for x in captured)]


def differentiated(named: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Return the names of the inputs that require gradients, each once; none while gradients are off."""
    if not torch.is_grad_enabled():
        return ()
    return tuple(dict.fromkeys(name for name, x in named if isinstance(x, Tensor) and x.requires_grad))


def check_gradients(
    rules: Rules, call: Call, backend: str | None, sizes: Sizes | None, captured: tuple[Tensor, ...]
) -> tuple[str, ...]:
    """Check that kernels can compute the gradients, and that no `out` is given; return the inputs that require them."""
    inputs = named_inputs(call, captured)
    names = differentiated(inputs)
    wanted = differentiated([("out", call.out)]) + names
    if isinstance(call.out, Tensor):
        refuse_gradients(rules, wanted, "gradients need a fresh output: leave out=None")
    if backend is not None and backend != "reference":
        check_transforms(rules, backend, inputs)
        arch = backend.removeprefix("simulate:")
        check_backward(rules, arch, names, sizes, call.sequence.kind)
        if names:
            check_deterministic(rules, arch, call.deterministic)
    return names


def refuse_gradients(rules: Rules, names: tuple[str, ...], rule: str) -> None:
    """Note that the inputs `names` require gradients, and the rule that this breaks."""
    if names:
        verb = "requires a gradient" if len(names) == 1 else "require gradients"
        rules.add(f"{_listed(names)} {verb}", rule)


def check_backward(rules: Rules, arch: str, names: tuple[str, ...], sizes: Sizes | Problem | None, kind: str) -> None:
    """Check that the backward of `arch` takes a call; `names` require gradients, `sizes` is None if ranks are wrong."""
    if not names:
        return
    backward = LIMITS[arch].backward
    if kind not in backward.kinds:
        rule = f"the backward of the {arch} backend takes {' and '.join(backward.kinds)} sequences, and these are"
        refuse_gradients(rules, names, f"{rule} {kind}; {USE_REFERENCE}, {WITHOUT}")
    if sizes is not None and max(sizes.dim_qk, sizes.dim_v) > backward.max_dim:
        rule = f"the backward of the {arch} backend takes head dims up to {backward.max_dim}, and these are"
        refuse_gradients(rules, names, f"{rule} {sizes.dim_qk} and {sizes.dim_v}; {USE_REFERENCE}, {WITHOUT}")


def check_deterministic(rules: Rules, arch: str, wanted: bool | None) -> None:
    """Check that gradients can be deterministic if they have to be, see `are_deterministic`."""
    if _must_be_deterministic(wanted) and not _only_warns(wanted):
        rules.require(LIMITS[arch].backward.deterministic, _who(wanted), _rule(arch))


def are_deterministic(arch: str, wanted: bool | None) -> bool:
    """Whether gradients have to be deterministic: `wanted`, or torch's current switch if that is None.

    Raises AttentionError if the backward of `arch` is not deterministic; only warns with torch's `warn_only`.
    """
    if not _must_be_deterministic(wanted):
        return False
    if LIMITS[arch].backward.deterministic:
        return True
    sentence = f"{_who(wanted)}; {_rule(arch)}"
    if not _only_warns(wanted):
        raise AttentionError(sentence)
    warnings.warn(sentence, stacklevel=2)
    return False


def _must_be_deterministic(wanted: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if wanted is None else wanted


def _only_warns(wanted: bool | None) -> bool:
    return wanted is None and torch.is_deterministic_algorithms_warn_only_enabled()


def _who(wanted: bool | None) -> str:
    return "torch.use_deterministic_algorithms is on" if wanted is None else "Backend.deterministic is True"


def _rule(arch: str) -> str:
    return f"the backward of the {arch} backend adds to the gradient of q in any order; {USE_REFERENCE}"


def check_transforms(rules: Rules, backend: str, named: Iterable[tuple[str, object]]) -> None:
    """Check that a call gets no tensor of torch.func or forward-mode AD."""
    others = f"{USE_REFERENCE} for torch.func and forward-mode derivatives"
    refuse_transforms(rules, named, f"the {backend} backend works with torch.autograd's backward only; {others}")


def refuse_transforms(rules: Rules, named: Iterable[tuple[str, object]], rule: str) -> None:
    """Note the first tensor of torch.func or forward-mode AD, and the rule that it breaks: kernels work on memory,
    which does not show what these tensors carry."""
    for name, x in named:
        if isinstance(x, Tensor) and is_functorch_wrapped_tensor(x):
            rules.add(f"{name} is inside of a torch.func transform", rule)
            return
        if isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            rules.add(f"{name} carries a forward-mode tangent", rule)
            return


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
