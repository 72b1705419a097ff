"""The functions that users call: `attention`, `attention_varlen`, `attention_paged`, with the same keyword arguments.

    Call -> execute.attend -> validate (every rule, Problem) -> reference                    on the CPU or on request
                                                             -> plan, launches               on a card

Features are values: a new mask, score or layout is a new object in `mask=`, `score=` or the sequence argument, and the
signatures stay. The keyword arguments ("the keyword tail") are the same for each function:

    mask        Mask or None: which keys a query sees; None is all of them
    score       Score or None: what happens to scale * q.k before the softmax
    sinks       (Hq,) fp32 or the dtype of q, or None: one logit per query head, counted once per row in the denominator
    scale       number, 1/sqrt(D) by default; absorbed latent attention (D 576): that of its heads before absorption
    return_lse  also return the natural log of each row's whole denominator, sinks included (fp32, or fp64 for fp64)
    out         tensor to write the output into and return; shape, dtype and device of the result, any strides that
                give each element its own place; must not share memory with q, k, v or sinks
    backend     "auto": the kernels for the card that q is on, "sm90" (Hopper), "sm100" (Blackwell), "gfx942" (CDNA3)
                or "gfx950" (CDNA4), or on the CPU "reference". "reference": any device, differentiable, fp16, bf16,
                fp32, fp64. A card's name: its kernels, fp16 and bf16. "simulate:sm90" and so on: these kernels run by
                the simulator on CPU tensors. A named backend never falls back. Or a `Backend`, which also says whether
                gradients are deterministic.

The Hopper kernels read and write the tensors in place if TMA can address them: the last stride is 1, the others are
multiples of 8 elements above 0 (those of dimensions of size 1 do not matter), the head dim is a multiple of 8, and the
first element starts at a multiple of 16 bytes. q, k and v that do not fit, such as expanded ones, are copied once; for
such an `out` the result is computed in a temporary and copied.

Tensors must be plain ones with values: nested, sparse and meta tensors, NumPy arrays, subclasses that override torch's
functions and unresolved negative or conjugate bits are refused. Numbers may be NumPy's or tensors without dimensions
and gradient; in compiled graphs only Python's. A batch without sequences, heads or rows gives an empty result.

Masks are aligned to the bottom right: query row i of a sequence sits at key position i + len_k - len_q. A row that sees
no key gives 0 and an LSE of -inf (with sinks: 0 and the sink). Every function raises one AttentionError (a ValueError)
that lists all broken rules before anything runs.

Keys and values may have 8 bits beside q of any wider dtype (kernels: fp16, bf16): plain tensors, `Quantized(values,
scale)`, or pages of a `PagedKV` with k_scale and v_scale. They mean values · scale, computed in fp32. 8-bit queries
must have the dtype of k and v; the result then has the dtype of `out`, bf16 without one, and prefill that is not paged
multiplies in 8 bits.

Absorbed queries of latent attention may be in two tensors, `LatentQuery(nope, rope)`: kernels read both in place.

Kernels run on torch's current stream and may be captured into CUDA graphs. Inside of torch.compile(fullgraph=True)
a call becomes one operator, which does not check the values of lengths, offsets and tables; broken rules are raised
when the graph runs. `~mask` must then be written outside of the compiled function.
"""

from warpattn.api.backward import attention_backward
from warpattn.api.batches import attention_paged, attention_varlen
from warpattn.api.dense import attention

__all__ = ["attention", "attention_backward", "attention_paged", "attention_varlen"]
