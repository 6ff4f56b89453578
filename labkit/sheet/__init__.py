"""The model sheet: parameters, bytes by role, cache and operations of a model, from metadata alone.

>>> ledger = sheet("model.gguf")          # or a header without its data, or a published shape
>>> ledger.total_params, ledger.active_params, ledger.token_cycle_bytes
>>> ledger.kv_bytes(8192)
"""

from labkit.sheet.ask import LlamaMemory, ask_llama
from labkit.sheet.bounds import LatencyFloor
from labkit.sheet.cache_rows import CACHE_KINDS, CacheOptions, CacheRows
from labkit.sheet.floors import latency_floor
from labkit.sheet.ledger import MemoryLedger, fit_table, memory_ledger, sparsity_table
from labkit.sheet.make import sheet
from labkit.sheet.model_sheet import ModelSheet
from labkit.sheet.shape import ModelShape, load_shape, shape_names
from labkit.sheet.weights import PARTS, Weight, at_bits

__all__ = [
    "CACHE_KINDS",
    "PARTS",
    "CacheOptions",
    "CacheRows",
    "LatencyFloor",
    "LlamaMemory",
    "MemoryLedger",
    "ModelShape",
    "ModelSheet",
    "Weight",
    "ask_llama",
    "at_bits",
    "fit_table",
    "latency_floor",
    "load_shape",
    "memory_ledger",
    "shape_names",
    "sheet",
    "sparsity_table",
]
