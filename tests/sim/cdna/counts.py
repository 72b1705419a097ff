"""What the memory counter of a wave shows for a buffer's copies."""

from warpattn.kernels.amd.kv_config import WAVE, KVBufferConfig

VMCNT_MAX = 63  # the vmcnt of s_waitcnt has 6 bits


def vm_instructions(config: KVBufferConfig) -> int:
    """Vector-memory instructions, as vmcnt counts them, with which each wave loads its part of a strip."""
    return max(1, config.strip_bytes // (config.waves * WAVE * config.lane_bytes))


def outstanding(*later: KVBufferConfig) -> int:
    """The n of the `s_waitcnt vmcnt(n)` that waits for a strip while those of `later`, requested after it, are in
    flight."""
    return min(VMCNT_MAX, sum(vm_instructions(config) for config in later))
