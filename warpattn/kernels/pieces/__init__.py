"""Device code and host values that every architecture shares: tiles, spans, softmax, masks and scores, combination.

Protocols: a field typed `gl.base_value` takes any aggregate with the methods of one of these. Each is written at its
first implementation, and DESIGN.md lists methods and classes; tests/repo/test_protocols.py holds it against the code.

      tensors       operands of Hopper prefill                       sm90/prefill/context.py
      work          output tiles and the lengths of their sequences  pieces/scheduler.py
      key rows      K or V of Hopper prefill, a tile into a slot     sm90/prefill/context.py
      row sources   rows of Q, K, V or O on Blackwell                sm100/global_rows.py
      feeds         Q·Kᵀ and P·V of a key tile on CDNA               cdna/feed.py

The rings of nvidia/pipelines.py correspond to the buffers of amd/kv_buffer.py on CDNA; DESIGN.md compares their methods
one by one.
"""
