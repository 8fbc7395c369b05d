"""A BiLSTM-CRF tagger over the features of words (Huang et al. 2015; Peters et al. 2018, section 4)."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from longspan.nn.crf import CRF
from longspan.nn.whole_batch import largest_in_batch, mean_of_marked
from longspan.shapes import Bool, Float, Int, Tensor


class BiLSTMCRF(nn.Module):
    def __init__(self, inputs: int, width: int, tags: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=True)
        self.output = nn.Linear(2 * width, tags)
        self.crf = CRF(tags)
        self.dropout = nn.Dropout(dropout)

    def scores(self, words: Float[Tensor, "B W D"], sizes: Int[Tensor, "B"]) -> Float[Tensor, "B W C"]:
        """Scores of the tags of every word. `sizes`, the number of words in each row, is on the CPU."""
        # cuDNN needs weights in one dtype with the inputs, which autocast does not ensure.
        with torch.autocast(words.device.type, enabled=False):
            x = self.dropout(words.to(self.output.weight.dtype))
            sizes = sizes.clamp(min=1)  # a text may be too long for any of its words
            packed = pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
            return self.output(self.dropout(hidden))

    def loss(self, features: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """The mean loss per word. Words are where the targets are not negative."""
        other = targets < 0
        sizes = (~other).sum(1).cpu()  # the only sync of a step
        count = largest_in_batch(widest(sizes))
        place = other.long().argsort(dim=1, stable=True)[:, :count]  # words first, in their order
        tags = targets.gather(1, place)
        words = take(features, place, tags >= 0)
        return mean_of_marked(self.crf.losses(self.scores(words, sizes), tags, tags >= 0).sum(), tags >= 0)

    def decode(self, features: Float[Tensor, "B T D"], marks: Sequence[Int[Tensor, "_"]]) -> list[list[int]]:
        """The most probable tags of the words at these positions of every row."""
        sizes = torch.tensor([len(places) for places in marks])
        place = pad_sequence(list(marks), batch_first=True).long()
        place = F.pad(place, (0, widest(sizes) - place.shape[1]))
        valid = torch.arange(place.shape[1]) < sizes[:, None]
        words = take(features, place.to(features.device), valid.to(features.device))
        scores = self.scores(words, sizes).cpu()
        crf = CRF(scores.shape[-1]).to(scores.dtype)
        # A step of Viterbi is tiny, so a CPU is faster. `state_dict` would have the shards of sharded weights.
        crf.load_state_dict({name: weight.detach().cpu() for name, weight in self.crf.named_parameters()})
        found = crf.decode(scores, sizes).tolist()
        return [row[:size] for row, size in zip(found, sizes.tolist(), strict=True)]


def widest(sizes: Int[Tensor, "B"]) -> int:
    return max(1, int(sizes.max()))


def take(features: Float[Tensor, "B T D"], place: Int[Tensor, "B W"], valid: Bool[Tensor, "B W"]) -> Tensor:
    """[B, W, D] with the features at these places of every row, and zeros where they are not valid."""
    words = features.gather(1, place[..., None].expand(-1, -1, features.shape[-1]))
    return torch.where(valid[..., None], words, 0.0)
