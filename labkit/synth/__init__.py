"""Synthetic MoE models: random weights in files that stock llama.cpp loads and decodes.

`make` writes a tiny model of any MoE architecture that the installed llama.cpp can build, and
`make_large` a big one for experiments at scale. Which tensors such a model has is asked of
llama.cpp itself (`labkit.synth.llama`), so there is no list of models here that could grow stale.
What cannot be had is in `UNAVAILABLE`, with the reason.
"""

from labkit.synth.large import PRESETS, make_large
from labkit.synth.llama import LlamaWorker
from labkit.synth.models import make
from labkit.synth.registry import UNAVAILABLE, architectures, candidates, probe

__all__ = [
    "PRESETS",
    "UNAVAILABLE",
    "LlamaWorker",
    "architectures",
    "candidates",
    "make",
    "make_large",
    "probe",
]
