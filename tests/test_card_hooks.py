"""The mapping that a card prints: one layer a hook, the right one for the model that the run was for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autokernel_hf.build import build
from autokernel_hf.export_hf import stage, write_card
from autokernel_hf.records import Profile, SiteProfile
from tests.package_factory import candidate
from tests.test_export import PROFILE


def with_layer(layer: str) -> Profile:
    site = SiteProfile(
        name="apply_rotary_pos_emb",
        kernel_type="rotary_embedding",
        layer=layer,
        sites=(),
        share=0.1,
        calls=2,
        ms=1.0,
        attainable_ms=0.5,
        shapes=(),
        bound="memory",
        supported=True,
        workloads=(),
    )
    return PROFILE.model_copy(update={"sites": (site,)})


@pytest.mark.parametrize(
    ("profile", "layer", "for_whom"),
    [
        (None, "RotaryEmbedding", "Llama and its relatives"),
        (with_layer("RotaryEmbedding"), "RotaryEmbedding", "the model above"),
        (with_layer("RotaryEmbeddingHalfTables"), "RotaryEmbeddingHalfTables", "the model above"),
    ],
)
def test_a_hook_that_several_layers_share_gets_the_one_for_the_model(
    profile: Profile | None, layer: str, for_whom: str, tmp_path: Path
) -> None:
    source = candidate("rotary_embedding", "triton")
    made = build(source)
    package = stage(made, candidate=source, name="tri-rotary", out=tmp_path)
    card = write_card(package, candidate=source, built=made, profile=profile).read_text()
    scope: dict[str, dict[str, str]] = {}
    mapping = re.search(r"^layers = \{.*?^\}", card, re.MULTILINE | re.DOTALL)
    assert mapping is not None and mapping[0].count('"rotary_pos_emb"') == 1
    exec(mapping[0], scope)
    assert scope["layers"]["rotary_pos_emb"] == layer
    assert card.count('"rotary_pos_emb": ("NAMESPACE/tri-rotary:') == 1  # in transformers' KernelConfig too
    others = re.search(rf"`{layer}` is right for {for_whom}; others need (.*) in its place", card)
    assert others is not None and f"`{layer}`" not in others[1] and others[1].count("`") == 6
