"""Turns a command's options into a call, checked by the same rules as a call of the API; says which were written."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
import typer

from warpattn.cli import spelling
from warpattn.problem import Call, CheckedCall, validate
from warpattn.sequences import Dense


@dataclass(frozen=True)
class Request:
    """Options as they were written: --shape, --mask, --score, --dtype, --backward, --kv-dtype."""

    shape: str
    mask: str
    score: str
    dtype: str
    backward: bool = False
    kv_dtype: str = ""

    def __str__(self) -> str:
        tail = ", backward" if self.backward else ""
        stored = f", keys and values {self.kv_dtype}" if self.kv_dtype else ""
        return f"{self.shape}, mask {self.mask}, score {self.score or 'none'}, {self.dtype}{stored}{tail}"

    def call(self, backend: str, return_lse: bool = False) -> Call:
        """Make the call, with tensors that have a shape but no memory."""
        size, kind = spelling.shape(self.shape), spelling.OPERANDS.get(self.dtype) or spelling.dtype(self.dtype)
        stored = spelling.stored(self.kv_dtype) or kind
        scales = Dense(*[torch.ones(())] * 3) if kind == stored and kind.itemsize == 1 else Dense()
        q, k, v = (
            torch.empty(1, dtype=each).expand(sizes).requires_grad_(self.backward)
            for sizes, each in zip(size.tensors, (kind, stored, stored), strict=False)
        )
        mask, score = spelling.mask(self.mask), spelling.score(self.score, size.heads_q)
        return Call(q, k, v, scales, mask, score, return_lse=return_lse, backend=backend)

    def checked(self, arch: str) -> CheckedCall:
        """Check the call as for a card of `arch`; raises AttentionError if its kernels do not take it."""
        spelling.operand(self.dtype)
        checked = validate(self.call(f"simulate:{spelling.arch(arch)}", return_lse=True), read_values=False)
        return replace(checked, backend=arch, problem=replace(checked.problem, device_type="cuda"))


def given(ctx: typer.Context, names: Collection[str]) -> list[str]:
    """Return the options that the user wrote, of those with these parameter names: --kv-dtype for kv_dtype."""
    return [option.opts[0] for option in ctx.command.params if option.name in names and _written(ctx, option.name)]


def _written(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def are(names: list[str]) -> str:
    """Put names of options and their verb into words: "--list is", "--list and --rounds are"."""
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'}"
