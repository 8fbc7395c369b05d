"""Which decoder a model gets, and that it computes what the model computes."""

from dataclasses import dataclass

import pytest
import torch

from longspan.config import keys
from longspan.decoding import open_decoder
from longspan.decoding.rolling import RollingDecoder
from longspan.decoding.step_layers import COVERED_KEYS
from longspan.decoding.stream import StreamDecoder
from longspan.decoding.window import WindowDecoder
from longspan.models.longspan_xl import LongspanXL, LongspanXLConfig
from longspan.models.transformer_xl import TransformerXL, TransformerXLConfig
from longspan.models.vanilla import Vanilla, VanillaConfig
from longspan.reading import Reading

SHAPE = {"vocabulary": 19, "layers": 2, "width": 16, "heads": 2, "dropout": 0.0}


class WithoutTokenZero(Vanilla):
    """A family with its own `forward`."""

    def forward(self, tokens, state=None, starts=None):
        logits, state = super().forward(tokens, state, starts)
        logits[..., 0] = float("-inf")
        return logits, state


def test_a_window_decoder_gives_the_logits_of_forward() -> None:
    torch.manual_seed(0)
    for kind in (Vanilla, WithoutTokenZero):
        model = kind(VanillaConfig(**SHAPE)).eval()
        model.reading = Reading(segment=6, temperature=1.5)
        tokens = torch.randint(19, (2, 5))
        decoder = open_decoder(model, batch=2)
        assert isinstance(decoder, WindowDecoder)
        decoder.prefill(tokens[:, :4])
        with torch.no_grad():
            expected, _ = model(tokens)
        torch.testing.assert_close(decoder.step(tokens[:, 4]), expected[:, -1])


@dataclass(frozen=True, kw_only=True)
class NewerTransformerXLConfig(TransformerXLConfig):
    newer: bool = False


@dataclass(frozen=True, kw_only=True)
class NewerLongspanXLConfig(LongspanXLConfig):
    newer: bool = False


@pytest.mark.parametrize(
    ("family", "known", "newer"),
    [
        (TransformerXL, TransformerXLConfig, NewerTransformerXLConfig),
        (LongspanXL, LongspanXLConfig, NewerLongspanXLConfig),
    ],
)
def test_a_config_key_that_the_fast_path_does_not_cover_is_decoded_by_the_model(
    family: type, known: type, newer: type
) -> None:
    assert type(open_decoder(family(known(**SHAPE)).eval())) is RollingDecoder
    assert type(open_decoder(family(newer(**SHAPE)).eval())) is StreamDecoder


@pytest.mark.parametrize("family", [TransformerXL, LongspanXL])
def test_the_fast_path_covers_every_config_key(family: type) -> None:
    """A new key is added to COVERED_KEYS once rolling.py and fused.py apply it and the contract suite has a model with
    it; until then the family is decoded by StreamDecoder."""
    assert COVERED_KEYS[family] == set(keys(family.Config))
