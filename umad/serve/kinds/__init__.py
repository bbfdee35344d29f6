"""The five kinds of model: how each is read from a checkpoint, asked, and costed.

Owns everything that knows transformers or diffusers.  ``base`` holds the seam that the engine
sees; the other modules hold one kind each.  They import torch and its libraries inside
functions, because that takes seconds.  Stays out: queues, leases, HTTP.
"""
