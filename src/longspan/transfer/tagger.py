"""A BiLSTM-CRF tagger over the features of words (Huang et al. 2015; Peters et al. 2018, section 4)."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from longspan.nn.crf import CRF
from longspan.shapes import Bool, Float, Int, Tensor


class BiLSTMCRF(nn.Module):
    def __init__(self, inputs: int, width: int, tags: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * width, tags)
        self.crf = CRF(tags)
        self.dropout = nn.Dropout(dropout)

    def scores(self, words: Float[Tensor, "B W D"], valid: Bool[Tensor, "B W"]) -> Float[Tensor, "B W C"]:
        # cuDNN needs weights in one dtype with the inputs, which autocast does not ensure.
        with torch.autocast(words.device.type, enabled=False):
            x = self.dropout(words.to(self.output.weight.dtype))
            sizes = valid.sum(1).clamp(min=1).cpu()  # a text may be too long for any of its words
            packed = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
            return self.output(self.dropout(hidden))

    def loss(self, features: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """The mean loss per word. Words are where the targets are not negative."""
        rows = [row.nonzero()[:, 0] for row in targets >= 0]
        words, valid = gather_words(features, rows)
        tags, _ = gather_words(targets[..., None], rows)
        return self.crf.losses(self.scores(words, valid), tags[..., 0], valid).sum() / valid.sum()

    def decode(self, features: Float[Tensor, "B T D"], marks: Sequence[Int[Tensor, "_"]]) -> list[list[int]]:
        """The most probable tags of the words at these positions of every row."""
        words, valid = gather_words(features, marks)
        scores = self.scores(words, valid).cpu()
        crf = CRF(scores.shape[-1]).to(scores.dtype)
        crf.load_state_dict(self.crf.state_dict())  # a step of Viterbi is tiny, so a CPU is faster
        rows = zip(scores, marks, strict=True)
        return [crf.decode(row[: len(places)]) if len(places) else [] for row, places in rows]


def gather_words(features: Tensor, marks: Sequence[Int[Tensor, "_"]]) -> tuple[Tensor, Bool[Tensor, "B W"]]:
    """[B, W, D] with the features at the marks of every row, zeros after them, and which of them are words."""
    width = max(1, max(len(places) for places in marks))
    words = features.new_zeros(len(marks), width, features.shape[-1])
    for k, places in enumerate(marks):
        words[k, : len(places)] = features[k, places.to(features.device)]
    counts = torch.tensor([len(places) for places in marks], device=features.device)
    return words, torch.arange(width, device=features.device) < counts[:, None]
