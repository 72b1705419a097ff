"""Numbers rounded to multiples and to powers of two."""


def align_up(value: int, step: int) -> int:
    return -(-value // step) * step


def align_down(value: int, step: int) -> int:
    return value // step * step


def power_below(value: int) -> int:
    """Largest power of two that is at most `value`; 0 for none."""
    return 1 << value.bit_length() - 1 if value > 0 else 0
