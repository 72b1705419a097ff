"""warpattn as an attention backend of SGLang (0.5.23), chosen by name once both are installed.

    python -m sglang.launch_server --model-path MODEL --attention-backend warpattn --page-size 16

`sglang_plugin` registers `WarpattnAttnBackend` in each of SGLang's processes.
"""

from warpattn.integrations.sglang.backend import WarpattnAttnBackend

__all__ = ["WarpattnAttnBackend"]
