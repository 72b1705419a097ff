"""What becomes of NaN and infinities in gradients: an oracle that knows nothing of tiles, and calls that have some.

Row by row, in fp64, with the keys that the row sees and nothing else. A row that sees a value that is not finite, or
has a score of NaN or +inf, spoils its own gradient and those of all that it sees; a key of weight 0 adds nothing,
whatever it holds. All other gradients are as if such rows were not there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.oracle import Inputs, visible
from tests.sim.backward import Case, launches, operands, tolerances
from tests.specials import truth
from warpattn.problem.backward import fitted_gradients, write_back
from warpattn.runtime.simulate import Options, run_launch

NAMES = ("dq", "dk", "dv")
Tensors = dict[str, Tensor]


def given(case: Case, x: Tensors) -> Inputs:
    """The forward's call."""
    return Inputs(x["q"], x["k"], x["v"], case.sequence, case.mask)


def expected(case: Case, x: Tensors) -> Tensors:
    """dq, dk and dv in fp64; NaN where something spoils them."""
    inputs = given(case, x)
    made = {name: torch.zeros(x[name[1]].shape).double() for name in NAMES}
    walks = (inputs.sequence.walk(*tensors) for tensors in ((inputs.q, inputs.k, inputs.v), tuple(made.values())))
    first = 0
    for b, ((q, k, v), (dq, dk, dv)) in enumerate(zip(*walks, strict=True)):
        rows, heads = q.shape[:2]
        dout = x["dout"][b] if inputs.sequence.kind == "dense" else x["dout"][first : first + rows]
        first += rows
        for h, keep in enumerate(visible(inputs, b, range(rows), rows, len(k))):
            at = h * k.shape[1] // heads
            for i, seen in enumerate(keep):
                own = (q[i, h], k[seen, at], v[seen, at], dout[i, h])
                dq[i, h], dks, dvs = row_gradients(*(tensor.double() for tensor in own))
                dk[seen, at] += dks
                dv[seen, at] += dvs
    return made


def row_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one row makes of its own gradient, and adds to those of the keys and values that it sees."""
    scale = len(q) ** -0.5
    s = (k @ q) * scale
    if bool((s == -torch.inf).all()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if not bool((s.isfinite() | (s == -torch.inf)).all() & v.isfinite().all()):
        return torch.full_like(q, torch.nan), torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)
    p = torch.softmax(s, 0)[:, None]
    dp = (v @ dout)[:, None]
    ds = p * (dp - (p * dp).sum()) * scale
    return torch.where(p == 0, 0.0, ds * k).sum(0), ds * q, p * dout


def unseen(case: Case, x: Tensors) -> None:
    """NaN and infinities in all keys and values that no row of their heads sees."""
    for b, (q, k, v) in enumerate(case.sequence.walk(x["q"], x["k"], x["v"])):
        seen = visible(given(case, x), b, range(len(q)), len(q), len(k)).any(1)
        for at, dark in enumerate(~seen.unflatten(0, (k.shape[1], -1)).any(1)):
            hidden = dark.nonzero().flatten()
            k[hidden, at], v[hidden, at] = torch.nan, torch.inf
            k[hidden[::2], at], v[hidden[::2], at] = -torch.inf, torch.nan


def one_key(case: Case, x: Tensors) -> None:
    """NaN in a key."""
    row_of(case, x, 1, 0.5)[...] = torch.nan


def one_number(case: Case, x: Tensors) -> None:
    """An infinity in a key: for half the rows that see it its score is -inf, and its weight 0."""
    row_of(case, x, 1, 0.5)[:, 3] = torch.inf


def one_value(case: Case, x: Tensors) -> None:
    """An infinity in a value, NaN in another one."""
    row_of(case, x, 2, 0.5)[:, 3] = -torch.inf
    row_of(case, x, 2, 0.6)[:, 5] = torch.nan


def row_of(case: Case, x: Tensors, which: int, place: float) -> Tensor:
    """One key or value [heads, columns] of the last sequence."""
    *_, last = case.sequence.walk(x["q"], x["k"], x["v"])
    return last[which][int(len(last[which]) * place)]


SPOILS: dict[str, Callable[[Case, Tensors], None]] = {
    "unseen": unseen, "key": one_key, "number": one_number, "value": one_value,
}  # fmt: skip


def differences(case: Case, how: str) -> list[str]:
    """Where simulated gradients leave the rule, with special values put into the case's tensors."""
    clean = case.inputs()
    x = {name: tensor.clone() for name, tensor in clean.items()}
    SPOILS[how](case, x)
    assert not (x["k"].isfinite().all() and x["v"].isfinite().all()), "nothing is spoiled"
    out, lse = truth(given(case, x))
    gradients = operands(case, x, {"out": out, "lse": lse})
    fitting = fitted_gradients(gradients)
    reports = [run_launch(launch, Options()) for launch in launches(case, fitting, x)]
    write_back(fitting, gradients)
    found = [f"findings: {report}" for report in reports if not report.clean]
    allowed, right = tolerances(case, clean, expected(case, clean)), expected(case, x)
    return found + [
        text for name in NAMES if (text := unlike(name, getattr(gradients, name), right[name], allowed[name]))
    ]


def unlike(name: str, found: Tensor, right: Tensor, allowed: float) -> str:
    """What differs, or nothing."""
    wrong = found.isfinite() != right.isfinite()
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        return f"{name}: {int(wrong.sum())} of {wrong.numel()} differ in nan, first {at}: {found[at]}, not {right[at]}"
    error = (found.double() - right)[right.isfinite()].abs()
    return f"{name} is off by {float(error.max()):.3g}" if error.numel() and float(error.max()) > allowed else ""
