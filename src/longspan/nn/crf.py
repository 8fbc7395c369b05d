"""A linear-chain conditional random field over tags (Lafferty et al. 2001), as in BiLSTM-CRF taggers.

score(y) = b_{y_1} + sum_t x_t[y_t] + sum_t A[y_t, y_{t+1}] + e_{y_n}
loss = log sum_y' exp(score(y')) - score(y)
"""

import torch
from torch import nn

from longspan.shapes import Bool, Float, Int, Tensor


class CRF(nn.Module):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(tags, tags))  # A[from, to]
        self.first, self.last = (nn.Parameter(torch.zeros(tags)) for _ in range(2))

    def losses(
        self, scores: Float[Tensor, "B T C"], tags: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B"]:
        """The loss of every row in nats. `valid` is true for the words of a row, at least one, and false after them."""
        return self.normaliser(scores, valid) - self.score(scores, tags, valid)

    def score(
        self, scores: Float[Tensor, "B T C"], tags: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B"]:
        tags = tags.clamp(min=0)
        own = torch.where(valid, scores.gather(-1, tags[..., None])[..., 0], 0.0).sum(1)
        steps = torch.where(valid[:, 1:], self.transitions[tags[:, :-1], tags[:, 1:]], 0.0).sum(1)
        end = tags.gather(1, valid.sum(1, keepdim=True) - 1)[:, 0]
        return own + steps + self.first[tags[:, 0]] + self.last[end]

    def normaliser(self, scores: Float[Tensor, "B T C"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B"]:
        """log sum over all sequences of tags, by the forward recursion."""
        alpha = self.first + scores[:, 0]
        for t in range(1, scores.shape[1]):
            after = (alpha[:, :, None] + self.transitions).logsumexp(1) + scores[:, t]
            alpha = torch.where(valid[:, t, None], after, alpha)
        return (alpha + self.last).logsumexp(-1)

    @torch.no_grad()
    def decode(self, scores: Float[Tensor, "B T C"], sizes: Int[Tensor, "B"]) -> Int[Tensor, "B T"]:
        """The most probable tags of every row (Viterbi), of which the first `sizes` count. All rows take a step
        together."""
        T, stay = scores.shape[1], torch.arange(scores.shape[2], device=scores.device).expand(len(scores), -1)
        best, pointers = self.first + scores[:, 0], []
        for t in range(1, T):
            after, pointer = (best[:, :, None] + self.transitions).max(1)
            inside = (t < sizes)[:, None]
            best = torch.where(inside, after + scores[:, t], best)
            pointers.append(torch.where(inside, pointer, stay))  # after its last word a row keeps its tag
        tags = [(best + self.last).argmax(-1)]
        for pointer in reversed(pointers):
            tags.append(pointer.gather(1, tags[-1][:, None])[:, 0])
        return torch.stack(tags[::-1], dim=1)
