"""Every architecture that labkit can make: the map equals what the gguf package reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_gguf_map import assert_equals_reader

from labkit.architectures import ATTENTION, ROUTED_EXPERT, ROUTER
from labkit.gguf_map import open_gguf
from labkit.synth import architectures


@pytest.mark.parametrize("arch", architectures())
def test_every_architecture(synth_model: Callable[..., Path], arch: str):
    gguf = open_gguf(synth_model(arch))
    assert gguf.architecture == arch
    gguf.require_streamable()
    assert_equals_reader(gguf)
    roles = {t.role for t in gguf.tensors}
    assert {ROUTED_EXPERT, ROUTER, ATTENTION} <= roles
    assert gguf.token_cycle_bytes < gguf.expert_bytes
    for layer in gguf.moe_layers:
        projections = {e.projection for e in gguf.layer_tensors(layer)}
        assert "down" in projections
        assert projections & {"up", "gate_up"}


@pytest.mark.parametrize("quant", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_quantised_experts_in_three_shards(synth_model: Callable[..., Path], quant: str):
    gguf = open_gguf(synth_model("qwen3moe", quant=quant, shards=3))
    assert {e.tensor.type_name for e in gguf.expert_tensors} == {quant}
    assert len(gguf.paths) == 3
    assert_equals_reader(gguf)


def test_fused_gate_and_up(synth_model: Callable[..., Path]):
    gguf = open_gguf(synth_model("qwen3moe", fused=True))
    assert [s.projection for s in gguf.expert(gguf.moe_layers[0], 1)] == ["gate_up", "down"]
    assert_equals_reader(gguf)
