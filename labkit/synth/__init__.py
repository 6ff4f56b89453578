"""Synthetic MoE models: random weights in files that stock llama.cpp loads and decodes.

`make` writes a tiny model of any MoE architecture that the installed llama.cpp can build: which
tensors such a model has is asked of llama.cpp itself (`labkit.synth.llama`), so there is no list of
models here that could grow stale.
"""

from labkit.synth.llama import LlamaWorker
from labkit.synth.models import make

__all__ = ["LlamaWorker", "make"]
