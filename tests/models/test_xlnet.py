"""Pre-training of XLNet. Its outputs and gradients are compared with `transformers` in tests/parity/test_xlnet.py."""

from unittest import mock

import torch

from longspan.models.xlnet import XLNet
from tests.support import build


def test_segment_encodings_are_trained_with_separators() -> None:
    """Half of the rows are two texts, separators are not predicted, and gradients reach the encodings."""
    model = build("xlnet", {"vocabulary": 13, "layers": 1, "width": 8, "heads": 2, "predict_every": 2, "separator": 4})
    assert isinstance(model, XLNet)
    tokens = torch.randint(5, 13, (400, 6))
    with mock.patch.object(model, "permuted_losses", wraps=model.permuted_losses) as losses:
        model.training_loss(tokens, tokens, None)[0].backward()
    read, chosen, *_ = losses.call_args.args
    places = read == 4
    assert places.sum(1).max() == 1
    assert places.any(0).all()
    assert 0.4 < places.any(1).float().mean() < 0.6
    assert torch.equal(read, tokens.masked_fill(places, 4))
    assert chosen.shape == (400, 3)
    assert not places.gather(1, chosen).any()
    assert model.layers[0].segments.grad.abs().min() > 0
    assert model.layers[0].s.grad.abs().min() > 0
    assert torch.equal(model.with_separators(tokens[:, :1]), tokens[:, :1])
