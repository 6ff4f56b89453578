"""shards -> tensors -> expert slices, from GGUF metadata alone.

>>> gguf = open_gguf("model-00001-of-00003.gguf")   # or any shard, or their directory
>>> gguf.expert(layer=3, expert=17)                 # where that expert's bytes are
"""

from labkit.gguf_map.model import GGUFMap, open_gguf
from labkit.gguf_map.types import ExpertSlice, ExpertTensor, TensorInfo
from labkit.gguf_map.values import LazyArray

__all__ = ["ExpertSlice", "ExpertTensor", "GGUFMap", "LazyArray", "TensorInfo", "open_gguf"]
