"""`ModelSheet`: what a model weighs, reads and computes, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from labkit.architectures import ROLES, ROUTED_EXPERT
from labkit.errors import OptionError, SheetError
from labkit.sheet.attention import Attention
from labkit.sheet.cache_rows import CacheOptions, CacheRows
from labkit.sheet.shape import PublishedCount
from labkit.sheet.weights import (
    DENSE,
    EMBEDDINGS,
    PARTS,
    ROUTED,
    SHARED,
    Bits,
    Weight,
    at_bits,
)

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ModelSheet:
    """A model's ledger. Bytes are of the weights as stored; a token means one step of decode.

    Attributes:
        name, architecture: what the model calls itself.
        where: the file or description that it comes from.
        n_layers: layers that a token runs through; multi-token heads at the end do not count.
        n_expert, n_expert_used: routed experts of a layer and the most that a token uses of them;
            0 in a dense model.
        context_length: tokens that it was trained for, 0 if it does not say.
        weights: every tensor.
        cache: rows of the KV cache and recurrent states of one sequence; None if labkit does not
            know how llama.cpp caches this architecture (`cache_note` says so).
        attention: what attending costs, by layer.
        notes: what a reader of the figures has to know.
        sources: where a published shape comes from.
        published: what its publisher counts, to compare with.
        header_only: made from a file without its tensor data.
        from_shape: made from a description, not from a file.
    """

    name: str
    architecture: str
    where: str
    n_layers: int
    n_expert: int
    n_expert_used: int
    context_length: int
    weights: tuple[Weight, ...]
    cache: tuple[CacheRows, ...] | None
    attention: tuple[Attention, ...]
    cache_note: str = ""
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    header_only: bool = False
    from_shape: bool = False
    published: PublishedCount | None = None
    experts_used: dict[int, int] = field(default_factory=dict)

    # What it holds.

    @property
    def total_params(self) -> int:
        """All parameters."""
        return sum(w.n_params for w in self.weights)

    @property
    def active_params(self) -> int:
        """Parameters that computing one token uses: dense ones, and top-k of the routed ones.

        Of a token embedding one row counts, unless it doubles as the output matrix; multi-token
        heads do not count.
        """
        return round(sum(w.token_params for w in self.weights))

    @property
    def total_bytes(self) -> int:
        """Bytes of all weights: what a resident run needs for them."""
        return sum(w.nbytes for w in self.weights)

    @cached_property
    def part_bytes(self) -> dict[str, int]:
        """Bytes by part (see `PARTS`); they sum to `total_bytes`."""
        sums = dict.fromkeys(PARTS, 0)
        for w in self.weights:
            sums[w.part] += w.nbytes
        return sums

    @property
    def routed_bytes(self) -> int:
        """Bytes of the routed experts: what can be streamed."""
        return self.part_bytes[ROUTED]

    @property
    def shared_bytes(self) -> int:
        """Bytes of the shared experts, which every token uses."""
        return self.part_bytes[SHARED]

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings and of the output matrix."""
        return self.part_bytes[EMBEDDINGS]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all but the routed experts: what stays in memory when experts are streamed."""
        return self.total_bytes - self.routed_bytes

    @property
    def other_dense_bytes(self) -> int:
        """Bytes of attention, dense layers, routers and norms: neither experts nor embeddings."""
        return self.part_bytes[DENSE]

    @property
    def bits_per_weight(self) -> float:
        """Mean over all weights."""
        return 8 * self.total_bytes / self.total_params

    # Experts.

    @cached_property
    def entry_bytes(self) -> dict[int, int]:
        """Bytes of one expert entry (all projections of one expert), by MoE layer."""
        entries: dict[int, int] = {}
        for w in self.weights:
            if w.role == ROUTED_EXPERT and w.layer is not None:
                entries[w.layer] = entries.get(w.layer, 0) + w.nbytes // w.shape[2]
        return dict(sorted(entries.items()))

    @property
    def is_moe(self) -> bool:
        """Whether it has routed experts."""
        return bool(self.entry_bytes)

    @property
    def moe_layers(self) -> list[int]:
        """Layers with routed experts that a token runs through."""
        return [layer for layer in self.entry_bytes if layer < self.n_layers]

    @property
    def leading_dense_layers(self) -> int:
        """Layers before the first MoE layer; all layers of a dense model."""
        return min(self.moe_layers, default=self.n_layers)

    @property
    def layer_cycle_bytes(self) -> dict[int, int]:
        """Bytes of the routed experts that one token uses, by MoE layer."""
        return {i: self.entry_bytes[i] * self.experts_used[i] for i in self.moe_layers}

    @property
    def token_cycle_bytes(self) -> int:
        """Bytes of the routed experts that one token uses in all layers: the cliff of an LRU."""
        return sum(self.layer_cycle_bytes.values())

    @property
    def floor_bytes(self) -> int:
        """The least expert cache that works: what one token uses in the largest layer."""
        return max(self.layer_cycle_bytes.values(), default=0)

    # A token.

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that computing one token reads, dense and routed."""
        return round(sum(w.token_bytes for w in self.weights))

    def batch_bytes(self, n_tokens: int) -> float:
        """Bytes of weights that a batch of tokens reads at least, each weight once.

        For routed experts the number of different ones under even, independent routing is
        expected: n x (1 - (1 - k/n)^tokens). Real routing repeats itself and reads fewer.
        """
        _at_least_one("n_tokens", n_tokens)
        total = 0.0
        for w in self.weights:
            if w.role == ROUTED_EXPERT:
                total += w.nbytes * (1 - (1 - w.token_share) ** n_tokens)
            elif (
                len(w.shape) > 1 and w.token_share and w.token_share < 1
            ):  # rows that are looked up
                total += min(w.nbytes, w.token_bytes * n_tokens)
            else:
                total += w.token_bytes
        return total

    def flops_per_token(self, n_past: int = 0) -> float:
        """Floating-point operations of one token after `n_past` others.

        Two for every parameter of the matrices that it uses, and those of attention over the
        tokens before it. Norms, activations and the updates of recurrent states are left out (a
        few in a thousand), and so are an indexer's scores.
        """
        matrices = sum(2 * w.token_params for w in self.weights if w.multiplies)
        return matrices + sum(a.flops(n_past) for a in self.attention)

    def intensity_flop_per_byte(self, n_tokens: int = 1) -> float:
        """Operations per byte of weights in a batch of tokens; compare with the ridge point."""
        return n_tokens * self.flops_per_token() / self.batch_bytes(n_tokens)

    @property
    def n_vocab(self) -> int:
        """Rows of the output matrix, one for each token of the vocabulary; 0 if there is none."""
        rows = {w.name: w.shape[1] for w in self.weights if len(w.shape) > 1 and w.layer is None}
        return rows.get("output.weight") or rows.get("token_embd.weight", 0)

    def compute_floor_bytes(self, n_ubatch: int = 512) -> int:
        """The least that llama.cpp's compute buffers take: the logits of one prefill graph.

        The real size (see `labkit.sheet.ask_llama`) is larger, for most models by a tenth.
        """
        return 4 * self.n_vocab * n_ubatch

    # The context.

    def kv_bytes(
        self,
        n_ctx: int,
        *,
        n_ubatch: int = 512,
        type_k: str = "F16",
        type_v: str = "F16",
        swa_full: bool = False,
    ) -> int:
        """Bytes that llama.cpp allocates for KV cache and recurrent states of one sequence.

        Args:
            n_ctx: tokens of context (llama.cpp rounds up to 256).
            n_ubatch, type_k, type_v, swa_full: see `labkit.sheet.CacheOptions`. For what a
                `labkit.runtime.Session` allocates, give its n_ubatch and `swa_full=True`.

        Raises:
            OptionError: a context longer than the model's, or an unfit type.
            SheetError: labkit does not know this architecture's cache.
        """
        options = CacheOptions(n_ctx, n_ubatch, type_k, type_v, swa_full)
        self.check_context(n_ctx)
        return sum(rows.nbytes(options) for rows in self.known_cache())

    def kv_kind_bytes(self, options: CacheOptions) -> dict[str, int]:
        """`kv_bytes` by what the rows are kept for (see `CACHE_KINDS`)."""
        self.check_context(options.n_ctx)
        sums: dict[str, int] = {}
        for rows in self.known_cache():
            sums[rows.kind] = sums.get(rows.kind, 0) + rows.nbytes(options)
        return sums

    def known_cache(self) -> tuple[CacheRows, ...]:
        """The cache's rows, or `SheetError` where labkit does not know them."""
        if self.cache is None:
            raise SheetError(f"{self.where}: {self.cache_note}")
        return self.cache

    def check_context(self, n_ctx: int) -> None:
        """Raise `OptionError` for a context longer than the model was made for."""
        if self.context_length and n_ctx > self.context_length:
            raise OptionError(
                f"{self.where}: a context of {n_ctx} tokens is longer than the model's own"
                f" {self.context_length}. Its answers would fall apart; give at most that."
            )

    def kv_read_bytes(self, n_past: int) -> float:
        """Bytes of the cache (F16) that attending to `n_past` tokens reads; 0 if unknown."""
        if self.cache is None or not n_past:
            return 0.0
        return sum(a.read_bytes(n_past) for a in self.attention)

    @property
    def slice_kib(self) -> float:
        """Mean size of an expert slice, what one read fetches, in KiB; NaN in a dense model."""
        slices = [w.nbytes / w.shape[2] for w in self.weights if w.role == ROUTED_EXPERT]
        return sum(slices) / len(slices) / 1024 if slices else float("nan")

    # Other views.

    def at_bits(self, bits: Bits) -> ModelSheet:
        """The same model with its weights at another width (see `labkit.sheet.at_bits`)."""
        return replace(self, weights=tuple(at_bits(self.weights, bits)))

    def roles_table(self) -> pd.DataFrame:
        """By role: role, part, n_tensors, params, size_bytes, token_params, token_bytes."""
        import pandas as pd

        rows = [
            (w.role, w.part, 1, w.n_params, w.nbytes, w.token_params, w.token_bytes)
            for w in self.weights
        ]
        columns = ["role", "part", "n_tensors", "params", "size_bytes"]
        columns += ["token_params", "token_bytes"]
        table = pd.DataFrame(rows, columns=columns)
        table = table.groupby(["role", "part"], sort=False, as_index=False).sum()
        return table.sort_values(
            "role", key=lambda column: column.map(ROLES.index), ignore_index=True
        )

    def kv_table(self, contexts: Sequence[int], **options) -> pd.DataFrame:
        """`kv_bytes` against the context: n_ctx, kv_bytes, kv_mib; `options` as of `kv_bytes`."""
        import pandas as pd

        sizes = [self.kv_bytes(n, **options) for n in contexts]
        return pd.DataFrame(
            {"n_ctx": list(contexts), "kv_bytes": sizes, "kv_mib": [s / 2**20 for s in sizes]}
        )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise OptionError(f"{name} is {value}; it must be at least 1")
