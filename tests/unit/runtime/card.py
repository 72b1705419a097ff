"""A stand-in for a card: a driver that only takes notes. CPU tensors stand in for a card's.

The stand-in kernel sets the bytes of a contiguous output, so that a copy is seen.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from warpattn.problem import rules
from warpattn.runtime import bound_launches, cuda, execute, kernel_cache
from warpattn.runtime.kernel_cache import Artifact
from warpattn.runtime.kernel_parameters import parameters
from warpattn.runtime.tile_counters import TileCounters

B, S, H, D = 2, 20, 4, 64
FIRST_EXTRA = 36  # parameters before lse: four maps with four sizes and four strides each
SHAPE = slice(FIRST_EXTRA + 4, FIRST_EXTRA + 11)
TILE = torch.tensor([0x4040] * 2, dtype=torch.int16).view(torch.bfloat16)[0].item()


@dataclass
class Card:
    """The driver's notebook."""

    launches: list[dict[str, Any]] = field(default_factory=list)
    encoded: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    replaced: int = 0
    keys: list[Any] = field(default_factory=list)
    examined: int = 0
    stream: int = 0
    device: int = -1
    capturing: bool = False
    capture: int = 1  # number of the one at work
    errors: list[int] = field(default_factory=list)
    bound: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def launch_call(self, function: int, grid: tuple[int, int, int], *size: Any, pdl: bool) -> Any:
        (_, _, table) = size
        return lambda stream: self.launch(stream, grid, table)

    def launch(self, stream: int, grid: tuple[int, int, int], table: Any) -> int:
        if self.errors:
            return self.errors.pop()
        maps = [ctypes.c_uint64.from_address(table[i * 9]).value for i in range(4)]
        extra = [ctypes.c_uint64.from_address(table[FIRST_EXTRA + i]).value for i in range(3)]
        captured = [ctypes.c_uint64.from_address(x).value for x in table[FIRST_EXTRA + 11 : -2]]
        note = {
            "maps": maps,
            "lse": extra[0],
            "sinks": extra[1],
            "counter": extra[2],
            "scale": ctypes.c_float.from_address(table[FIRST_EXTRA + 3]).value,
            "shape": [ctypes.c_int32.from_address(x).value for x in table[SHAPE]],
            "captured": captured,
            "stream": stream,
            "grid": grid[0],
        }
        ctypes.memset(maps[3], 0x40, self.sizes[table[27]])
        with self.lock:
            self.launches.append(note)
        return 0

    def replace(self, target: int, address: int) -> int:
        self.replaced += 1
        ctypes.c_uint64.from_address(target).value = address
        return 0

    def encode(self, layout: Any, target: int, address: int) -> None:
        self.encoded += 1
        self.sizes[target] = 2 * math.prod(layout.shape)
        ctypes.c_uint64.from_address(target).value = address

    def bind(self, device: int) -> None:
        self.bound += 1


@pytest.fixture(name="card")
def make_card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card in the place of the driver, with nothing planned or loaded yet."""
    card = Card()
    counters = TileCounters(torch.device("cpu"))

    def find(key, build):  # type: ignore[no-untyped-def]
        card.keys.append(key)
        launch, *_ = build.args
        return Artifact(b"cubin", "entry", 1000, 384, parameters(launch.source().signature))

    def validate(call, read_values=True):  # type: ignore[no-untyped-def]
        card.examined += 1
        return rules.validate(call, read_values)

    for owner, name, value in (
        (cuda, "launch_call", card.launch_call),
        (cuda, "replace_address_call", lambda: card.replace),
        (cuda, "load_function", lambda *_: 77),
        (cuda, "bind_context", card.bind),
        (cuda, "current_stream", lambda device: card.stream),
        (cuda, "current_device", lambda: card.device),
        (cuda, "is_capturing", lambda: card.capturing),
        (cuda, "capture_of", lambda stream: card.capture),
        (cuda.TensorMapLayout, "encode", lambda *arguments: card.encode(*arguments)),
        (kernel_cache, "find", find),
        (bound_launches, "tile_counters", lambda device: counters),
        (bound_launches, "processors", lambda device: 100),
        (bound_launches, "_loaded", {}),
        (execute, "_known", {}),
        (rules, "choose_backend", lambda *_: "sm90"),
        (execute, "validate", validate),
    ):
        monkeypatch.setattr(owner, name, value)
    return card


def normal(*shape: int) -> Tensor:
    """Random bf16 numbers, (B, S, H, D) by default."""
    return torch.randn(shape or (B, S, H, D), dtype=torch.float32).to(torch.bfloat16)


def written(out: Tensor) -> bool:
    """Whether the stand-in kernel's bytes have arrived in `out`."""
    return bool((out == TILE).all())


def misaligned(x: Tensor) -> Tensor:
    """The same values two bytes past where they may lie."""
    return torch.empty(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view(x.shape).copy_(x)
