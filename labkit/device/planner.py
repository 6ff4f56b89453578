"""The planner: should this model be streamed on this device?

It needs no tensor data: a GGUF header or a description of a model's shape is enough, so that the
question can be asked before a download.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from labkit.device.hits import HitRate, assumed_hit_pct, assumed_hits, replayed_hits
from labkit.device.plan import (
    MMAP,
    OVERLAPPED,
    PATHS,
    RESIDENT,
    Memory,
    PathPlan,
    Plan,
    Request,
)
from labkit.device.plan_memory import automatic_cache_mib, check_cache, memory_of
from labkit.device.plan_speed import FAULT_FACTOR, Decode, SpeedOf
from labkit.errors import NotMoEError, PlanError, TraceError

if TYPE_CHECKING:
    from labkit.device.profile import DeviceProfile
    from labkit.sheet import ModelSheet
    from labkit.trace import RouteTrace

MIB = 2**20
MAX_CTX = 4096
SMALL_TOKEN_BYTES = 64 * MIB
AIR = 0.9
"""A resident model should leave a tenth of the usable memory: the system takes it otherwise."""


def plan(
    model: ModelSheet,
    device: DeviceProfile,
    *,
    cache_mib: float | Literal["auto"] = "auto",
    trace: RouteTrace | None = None,
    policy: str = "lru",
    request: Request | None = None,
) -> Plan:
    """Predict every way of running `model` on `device`, and recommend one.

    Args:
        model: `labkit.sheet.sheet` of a file, a header or a shape.
        device: a profile with at least ram_mib and decode_gb_s.
        cache_mib: the expert cache of the streamed paths; "auto" is the largest that leaves a
            tenth of the usable memory free.
        trace: routing of this model, for the hit rate; without it an assumption is stated.
        policy: the cache policy that the trace is replayed with.
        request: context, prompt and answer; None is `default_request`.

    Raises:
        NotMoEError: a dense model.
        DeviceError: the profile lacks a figure that is needed.
        OptionError: a context longer than the model's.
        BudgetError: a cache that makes no sense.
        TraceError: a trace of another model.
        PlanError: prompt and answer do not fit in the context.
    """
    _check_moe(model, device)
    request = request or default_request(model)
    _check_request(request)
    usable = _usable_mib(device)
    budget = automatic_cache_mib(model, request, usable) if cache_mib == "auto" else cache_mib
    check_cache(model, budget)
    streamed_hit = _hit_rate(model, budget, trace, policy)
    speed = SpeedOf(model, device, request)
    paths = tuple(
        _path(name, model, request, speed, usable, budget, streamed_hit) for name in PATHS
    )
    recommended, reason = _recommend(model, usable, budget, {row.path: row for row in paths})
    return Plan(
        model=model.name,
        device=device.title,
        request=request,
        usable_mib=usable,
        model_mib=model.total_bytes / MIB,
        cycle_mib=model.token_cycle_bytes / MIB,
        cache_mib=budget,
        paths=paths,
        recommended=recommended,
        reason=reason,
        assumptions=tuple(_assumptions(model, device, streamed_hit, paths)),
    )


def default_request(model: ModelSheet) -> Request:
    """The model's own context, at most 4096; a prompt of 512 and an answer of 128 if they fit."""
    n_ctx = min(model.context_length or MAX_CTX, MAX_CTX)
    return Request(n_ctx, min(512, max(1, n_ctx // 2)), min(128, n_ctx // 4))


def check_trace(trace: RouteTrace, model: ModelSheet) -> None:
    """Raise `TraceError` unless the trace can come from this model, quantised in any way."""
    origin = trace.model or "unnamed"
    said = [
        ("architecture", trace.architecture, model.architecture),
        ("experts a layer", trace.n_expert, model.n_expert),
        ("experts a token", trace.n_expert_used, model.n_expert_used),
    ]
    for what, of_trace, of_model in said:
        if of_trace and of_trace != of_model:
            raise TraceError(
                f"The trace is of another model: {what} {of_trace} in the trace ({origin}), "
                f"{of_model} in {model.name}. Record one with this model: `labkit trace MODEL -p "
                "TEXT -n 64 -o trace.csv`."
            )
    table = trace.table
    layers = set(table["layer"].unique().tolist())
    strange = sorted(layers - set(model.moe_layers))
    if strange:
        raise TraceError(
            f"The trace is of another model: it has layer {strange[0]}, and {model.name} has "
            f"routed experts in layers {model.moe_layers[0]} to {model.moe_layers[-1]}."
        )
    largest = int(table["expert"].max()) if len(table) else 0
    if largest >= model.n_expert:
        raise TraceError(
            f"The trace is of another model: it names expert {largest}, and {model.name} has "
            f"{model.n_expert} a layer."
        )


def _hit_rate(
    model: ModelSheet, cache_mib: float, trace: RouteTrace | None, policy: str
) -> HitRate:
    if trace is None:
        return assumed_hits(cache_mib, model.token_cycle_bytes / MIB, model.routed_bytes / MIB)
    from labkit.replay import demand

    check_trace(trace, model)
    return replayed_hits(demand(trace, entry_bytes=model.entry_bytes), cache_mib, policy)


def _path(
    name: str,
    model: ModelSheet,
    request: Request,
    speed: SpeedOf,
    usable: float,
    cache_mib: float,
    streamed_hit: HitRate,
) -> PathPlan:
    memory = memory_of(model, request, name, cache_mib)
    fits = memory.total_mib <= usable
    hit, remark = None, ""
    kept = memory.experts_mib >= model.routed_bytes / MIB and (fits or name != MMAP)
    if name == RESIDENT:
        decode = speed.resident()
    elif name == MMAP:
        hit = _page_cache(model, memory, usable)
        decode = speed.mapped(hit)
        if not fits:
            remark = (
                f"starts, but pages are read again and again: recorded runs of this kind lie within"
                f" a factor of {FAULT_FACTOR:g} of such a prediction, and swing from token to token"
            )
    else:
        hit = streamed_hit
        decode = speed.streamed(streamed_hit, overlapped=name == OVERLAPPED)
    if not fits and name != MMAP:
        decode = Decode(math.nan, math.nan, math.nan, decode.read_mib)
        remark = f"needs {memory.total_mib:,.0f} MiB, {usable:,.0f} MiB are usable"
    there = memory.dense_mib + (memory.experts_mib if name in (RESIDENT, MMAP) else 0)
    runs = fits or name == MMAP
    return PathPlan(
        name,
        fits,
        memory,
        hit if name != MMAP or not fits else None,
        decode.read_mib,
        decode.tok_s,
        decode.low_tok_s,
        decode.high_tok_s,
        speed.load_s(name, there) if runs else math.nan,
        speed.prefill_s(name, kept=kept) if runs else math.nan,
        remark,
    )


def _page_cache(model: ModelSheet, memory: Memory, usable: float) -> HitRate:
    """What of a mapped model's experts the page cache holds, as a hit rate without a cliff."""
    experts = model.routed_bytes / MIB
    left = max(usable - (memory.total_mib - memory.experts_mib), 0)
    pct = float(assumed_hit_pct(left, 0, experts))
    return HitRate(pct, pct, pct, "assumed: the page cache as an LRU cache")


def _recommend(
    model: ModelSheet, usable: float, cache_mib: float, rows: dict[str, PathPlan]
) -> tuple[str | None, str]:
    resident, best = rows[RESIDENT], rows[OVERLAPPED]
    needed = resident.memory.total_mib
    if needed <= usable * AIR:
        return RESIDENT, (
            f"All of it fits: {needed:,.0f} of {usable:,.0f} MiB usable. Streaming would only add "
            "reads."
        )
    if not best.fits:
        beside = best.memory.total_mib - best.memory.experts_mib
        if beside > usable:
            return None, (
                f"Even without experts it needs {beside:,.0f} MiB (dense weights, context, "
                f"buffers), and {usable:,.0f} MiB are usable. Take a smaller quantisation or "
                "context, or a device with more memory."
            )
        return None, (
            f"With a cache of {cache_mib:,.0f} MiB it needs {best.memory.total_mib:,.0f} MiB, and "
            f"{usable:,.0f} MiB are usable. Give a smaller cache, or auto."
        )
    size = f"It needs {needed:,.0f} MiB whole, and {usable:,.0f} MiB are usable"
    if needed <= usable:
        size = (
            f"Whole it would take {needed / usable:.0%} of the usable memory, which leaves no air"
        )
    found = best.hit.hit_pct if best.hit else 0
    cache = f"a cache of {cache_mib:,.0f} MiB finds {found:.0f} % of the experts"
    if cache_mib < model.token_cycle_bytes / MIB:
        cache = "there is no room for a token cycle, so every expert is read anew"
    slow = "" if best.decode_tok_s >= 1 else " That is slower than a token a second."
    return OVERLAPPED, (
        f"{size}: stream it. {cache[0].upper()}{cache[1:]}, which gives about "
        f"{best.decode_tok_s:.2g} tokens a second ({best.low_tok_s:.2g} to {best.high_tok_s:.2g})."
        f"{slow}"
    )


def _assumptions(model: ModelSheet, device: DeviceProfile, hit: HitRate, paths):
    yield f"Hit rate: {hit.source}."
    guessed = [name for name, figure in device.figures.items() if figure.how == "assumed"]
    if guessed:
        yield f"The profile assumes {', '.join(guessed)}: see `labkit device {device.name}`."
    if device.get("layer_ms") is None and model.token_bytes < SMALL_TOKEN_BYTES:
        yield (
            "The profile does not say layer_ms, the fixed time of a layer, which is most of the "
            "time of a model as small as this: it will be slower than predicted."
        )
    if device.get("band_pct") is None:
        yield "The profile has no band_pct; 30 % is taken. `labkit device --calibrate` measures it."
    if device.get("usable_mib") is None:
        yield "The profile does not say what of its memory is usable; half is taken."
    if device.get("prefill_gflop_s") is None:
        yield "The profile does not say prefill_gflop_s, so prompts are not predicted."
    if any(math.isnan(row.memory.kv_mib) for row in paths):
        yield f"labkit cannot tell the KV cache ({model.cache_note}); it comes on top."
    if device.get("htp_prefill_gflop_s") is not None:
        yield (
            "Prompts are predicted on the CPU; `labkit htp` models the HTP that the profile has."
        )
    if device.notes:
        yield device.notes
    yield "Compute buffers are an estimate: a row of logits for every token of a batch."


def _usable_mib(device: DeviceProfile) -> float:
    usable = device.get("usable_mib")
    return device.need("ram_mib") / 2 if usable is None else usable


def _check_moe(model: ModelSheet, device: DeviceProfile) -> None:
    if model.is_moe:
        return
    usable = _usable_mib(device)
    size = model.total_bytes / MIB
    verdict = "fits" if size <= usable * AIR else "does not fit"
    raise NotMoEError(
        f"{model.where}: {model.name} is a dense model without routed experts, so there is nothing "
        f"to stream. Whole it takes {size:,.0f} MiB, which {verdict} in the {usable:,.0f} MiB that "
        f"are usable on {device.title}. `labkit sheet` shows what it needs."
    )


def _check_request(request: Request) -> None:
    for name in ("n_ctx", "prompt_tokens", "n_ubatch", "lanes"):
        if getattr(request, name) < 1:
            raise PlanError(f"{name} is {getattr(request, name)}; it must be at least 1.")
    if request.output_tokens < 0:
        raise PlanError(f"output_tokens is {request.output_tokens}; it must not be negative.")
    wanted = request.prompt_tokens + request.output_tokens
    if wanted > request.n_ctx:
        raise PlanError(
            f"A prompt of {request.prompt_tokens} and an answer of {request.output_tokens} tokens "
            f"do not fit in a context of {request.n_ctx}. Give --n-ctx {wanted} or more."
        )
