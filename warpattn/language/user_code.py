"""Calls users' functions; errors name the user's line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from warpattn.errors import AttentionError

_NOT_USER_CODE = (str(Path(__file__).parents[1]), str(Path(str(torch.__file__)).parent))


def call_user(fn: Callable[..., Any], *args: Any, **captured: Any) -> Any:
    """Call a user's mask or score function; turns any exception into an AttentionError that names the user's line."""
    try:
        return fn(*args, **captured)
    except AttentionError:
        raise
    except Exception as error:
        rule = "use operators, warpattn's functions, and tensors captured as keyword arguments"
        raise AttentionError(f"{raised_at(error) or line_of(fn)}: {named(error)}; {rule}") from error


def raised_at(error: Exception) -> str | None:
    """Return the innermost line of users' code in an error's traceback; None without one."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_NOT_USER_CODE):
            line = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def named(error: Exception) -> str:
    """Return an error's class and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def line_of(fn: Any) -> str:
    """Return file and line where a function begins, or its repr if it has no code."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(fn)


def user_error(what: str, rule: str) -> AttentionError:
    """Return an error that names the nearest line of users' code on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame = frame.f_back
    return AttentionError(f"{frame.f_code.co_filename}:{frame.f_lineno}: {what}; {rule}")
