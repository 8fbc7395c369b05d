"""BERT does not predict the next token; its training and its losses are in tests/parity."""

import pytest
import torch

from longspan.decoding import open_decoder
from longspan.errors import ConfigError
from longspan.transfer.model import TaskConfig, TaskModel
from tests.support import build

SHAPE = {"vocabulary": 11, "layers": 1, "width": 8, "heads": 2, "positions": 16}


def test_bert_does_not_predict_the_next_token() -> None:
    bert, tokens = build("bert", SHAPE | {"segment": 16}), torch.randint(11, (2, 5))
    task = TaskModel(TaskConfig(base_family="bert", base=SHAPE, vocabulary=11))
    task.reading = bert.reading
    for model in (bert, task):
        for predict in (
            lambda model=model: model(tokens),
            lambda model=model: model.losses(tokens, tokens),
            lambda model=model: open_decoder(model),
        ):
            with pytest.raises(ConfigError, match="next token"):
                predict()
    assert bert.training_loss(tokens, tokens)[0].isfinite()
    assert bert.encode(tokens)[0][-1].shape == (2, 5, 8)
