"""The same code on CUDA: what the CPU says in float64, to the precision of the device."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan.contract import State
from longspan.generation.sampling import Sampling
from longspan.text_model import TextModel
from longspan.tokens import ByteTokenizer

from .conftest import ALL, CUT_ANYWHERE, WITH_MEMORY, MakeModel, no_dropout, stream
from .test_admission import KINDS, states_of
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


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_state_of_another_device_goes_on(make: MakeModel, name: str) -> None:
    """From a CPU in float64 to a GPU, and back."""
    here = make(name)
    there = copy.deepcopy(here).float().cuda()
    tokens, _ = stream(2, 8, seed=2)
    for state in states_of(here):
        on_gpu = there.admit(state)
        back = here.admit(on_gpu)
        assert all(tensor.is_cuda for tensor in on_gpu.tensors().values())
        expected = here.decoder(state).step(tokens[:, 0])
        for found in (there.decoder(on_gpu).step(tokens[:, 0].cuda()), here.decoder(back).step(tokens[:, 0])):
            torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-2, atol=1e-2)


def test_a_session_of_a_gpu_goes_on_on_a_cpu_and_on_a_gpu(make: MakeModel, tmp_path: Path) -> None:
    """On the GPU with the numbers it would have drawn; on the CPU with others."""
    model = make("plain", vocabulary=256).float()
    here, there = (TextModel(copy.deepcopy(model).to(device), ByteTokenizer(), "a" * 64) for device in ("cpu", "cuda"))
    session = there.session("hello", seed=3)
    there.save_session(session, tmp_path / "s")
    rest = list(session.write(20, Sampling()))
    assert list(there.session(state=tmp_path / "s").write(20, Sampling())) == rest
    assert len(list(here.session(state=tmp_path / "s").write(20, Sampling()))) == 20


def test_a_target_outside_of_the_vocabulary_is_asserted_by_the_device() -> None:
    """In a process of its own, since its device is of no use afterwards."""
    code = (
        "import torch; from longspan.models.families import build; x = torch.zeros(1, 4, dtype=torch.int64).cuda();"
        "build('lstm', {'layers': 1, 'width': 16}).cuda().losses(x, x - 100); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "assert" in done.stderr
