"""The operators of warpattn in torch, and calls of them from compiled graphs.

    operators   warpattn::attention and warpattn::attention_backward, with their autograd and fake functions
    flops       what torch's FlopCounterMode counts for them
    program     writes everything in a call that is not a tensor as text
    tracing     what `attention` and its siblings do while torch traces them; imports torch._dynamo
"""
