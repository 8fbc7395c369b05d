"""The same code on CUDA: what the CPU says in float64, to the precision of the device."""

import pytest
import torch

from longspan.contract import State

from .conftest import ALL, CUT_ANYWHERE, WITH_MEMORY, MakeModel, no_dropout, stream
from .test_contract import losses_cut

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's recurrences round to TF32 unless told otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", ALL)
def test_losses_on_cuda_are_those_of_the_cpu(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    starts = torch.zeros(2, 32, dtype=torch.bool)
    starts[1, 13] = True
    cuts = [8, 16, 24]
    expected, _ = losses_cut(model, tokens, targets, cuts, model.initial_state(2), starts)
    model = model.float().cuda()
    found, _ = losses_cut(model, tokens.cuda(), targets.cuda(), cuts, model.initial_state(2), starts.cuda())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_a_training_step_on_cuda_has_the_gradients_of_the_cpu(make: MakeModel, name: str) -> None:
    model = make(name, **no_dropout(name)).train()
    tokens, targets = stream(2, 16)
    _, state = model.losses(tokens[:, :8], targets[:, :8])
    torch.manual_seed(5)  # what training draws on the CPU, such as rotations, is drawn alike
    loss, _ = model.training_loss(tokens[:, 8:], targets[:, 8:], state, 0.0)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model = model.float().cuda()
    state = State.from_tensors({k: t.float() if t.is_floating_point() else t for k, t in state.tensors().items()})
    state = state.to("cuda")
    torch.manual_seed(5)
    loss, _ = model.training_loss(tokens[:, 8:].cuda(), targets[:, 8:].cuda(), state, 0.0)
    loss.backward()
    for n, parameter in model.named_parameters():
        if n in expected:
            wanted = expected[n]
            error = (parameter.grad.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
            assert error < 2e-3, n


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_bfloat16_stays_near(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    expected, _ = losses_cut(model, tokens, targets, [16], model.initial_state(2))
    model = model.bfloat16().cuda()
    found, _ = losses_cut(model, tokens.cuda(), targets.cuda(), [16], model.initial_state(2))
    assert (found.cpu().double() - expected).abs().mean() < 0.1


@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_a_decoder_steps_on_cuda(make: MakeModel, name: str) -> None:
    model = make(name, segment=64).float().cuda() if name not in WITH_MEMORY else make(name).float().cuda()
    tokens, targets = (t.cuda() for t in stream(2, 30))
    whole, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    decoder = model.decoder(batch=2)
    decoder.read(tokens[:, :9])
    for place in range(9, 30):
        loss = -decoder.step(tokens[:, place]).log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, whole[:, place], rtol=0, atol=1e-4)
