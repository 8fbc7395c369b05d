"""The CRF against all sequences of tags, one by one."""

import itertools

import torch

from longspan.nn.crf import CRF


def score(crf: CRF, x: torch.Tensor, tags: tuple[int, ...]) -> torch.Tensor:
    total = crf.first[tags[0]] + crf.last[tags[-1]]
    for t, tag in enumerate(tags):
        total = total + x[t, tag]
    for a, b in itertools.pairwise(tags):
        total = total + crf.transitions[a, b]
    return total


def test_losses_gradients_and_decoding_by_brute_force() -> None:
    torch.manual_seed(3)
    crf, C = CRF(3).double(), 3
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    lengths = [4, 1, 3]
    x = torch.randn(3, 4, C, dtype=torch.float64, requires_grad=True)
    tags, valid = torch.randint(C, (3, 4)), torch.arange(4) < torch.tensor(lengths)[:, None]
    found = crf.losses(x, torch.where(valid, tags, -1), valid)
    decoded = crf.decode(x, torch.tensor(lengths)).tolist()
    expected = []
    for row, n in enumerate(lengths):
        every = list(itertools.product(range(C), repeat=n))
        scores = torch.stack([score(crf, x[row], one) for one in every])
        expected.append(scores.logsumexp(0) - score(crf, x[row], tuple(tags[row, :n].tolist())))
        assert decoded[row][:n] == list(every[int(scores.argmax())])
    torch.testing.assert_close(found, torch.stack(expected))
    wanted = torch.autograd.grad(torch.stack(expected).sum(), [x, *crf.parameters()])
    for a, b in zip(torch.autograd.grad(found.sum(), [x, *crf.parameters()]), wanted, strict=True):
        torch.testing.assert_close(a, b)
