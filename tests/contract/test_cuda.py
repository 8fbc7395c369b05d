"""The contract on CUDA: results equal those of the CPU in float64, within the precision of the device."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longspan.checkpoints.states import restore_state
from longspan.decoding import open_decoder
from longspan.decoding.sampling import Sampling
from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer

from .conftest import ALL, CUT_ANYWHERE, WITH_MEMORY, MakeModel, no_dropout, stream
from .test_contract import losses_cut
from .test_restored_states import KINDS, states_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_float32_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, recurrent layers of cuDNN use TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", ALL)
def test_losses_on_cuda_equal_those_of_the_cpu(make: MakeModel, name: str) -> None:
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
def test_gradients_on_cuda_equal_those_of_the_cpu(make: MakeModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rand = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *shape, device=None, **more: rand(*shape, **more).to(device or "cpu"))
    model = make(name, **no_dropout(name)).train()
    tokens, targets = stream(2, 16)
    _, state = model.losses(tokens[:, :8], targets[:, :8])
    torch.manual_seed(5)  # the same random numbers on both, for example for masks
    loss, _ = model.training_loss(tokens[:, 8:], targets[:, 8:], state, 0.0)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model = model.float().cuda()
    state = state.map(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor).to("cuda")
    torch.manual_seed(5)
    loss, _ = model.training_loss(tokens[:, 8:].cuda(), targets[:, 8:].cuda(), state, 0.0)
    loss.backward()
    for n, parameter in model.named_parameters():
        if n in expected:
            wanted = expected[n]
            error = (parameter.grad.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-5)
            assert error < 2e-3, n  # the gradient of a bias of keys is 0, and rounding makes it about 1e-8


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_bfloat16_is_close_to_float64(make: MakeModel, name: str) -> None:
    model = make(name)
    tokens, targets = stream(2, 32)
    expected, _ = losses_cut(model, tokens, targets, [16], model.initial_state(2))
    model = model.bfloat16().cuda()
    found, _ = losses_cut(model, tokens.cuda(), targets.cuda(), [16], model.initial_state(2))
    assert (found.cpu().double() - expected).abs().mean() < 0.1


@pytest.mark.parametrize("name", CUT_ANYWHERE)
def test_a_decoder_on_cuda_gives_the_losses_of_the_model(make: MakeModel, name: str) -> None:
    model = make(name, segment=32).float().cuda() if name not in WITH_MEMORY else make(name).float().cuda()
    tokens, targets = (t.cuda() for t in stream(2, 30))
    uncut, _ = losses_cut(model, tokens, targets, [], model.initial_state(2))
    decoder = open_decoder(model, batch=2)
    decoder.prefill(tokens[:, :9])
    for place in range(9, 30):
        loss = -decoder.step(tokens[:, place]).log_softmax(-1).gather(-1, targets[:, place, None])[:, 0]
        torch.testing.assert_close(loss, uncut[:, place], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_stream_continues_on_another_device(make: MakeModel, name: str) -> None:
    """From a CPU in float64 to a GPU, and back."""
    here = make(name)
    there = copy.deepcopy(here).float().cuda()
    tokens, _ = stream(2, 8, seed=2)
    for state in states_of(here):
        on_gpu = restore_state(there, state.tensors(), state.reading)
        back = restore_state(here, on_gpu.tensors(), on_gpu.reading)
        assert all(tensor.is_cuda for tensor in on_gpu.tensors().values())
        expected = open_decoder(here, state).step(tokens[:, 0])
        for found in (
            open_decoder(there, on_gpu).step(tokens[:, 0].cuda()),
            open_decoder(here, back).step(tokens[:, 0]),
        ):
            torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-2, atol=1e-2)


def test_a_session_saved_on_a_gpu_continues_on_a_gpu_and_on_a_cpu(make: MakeModel, tmp_path: Path) -> None:
    """On the GPU with the same random numbers, on the CPU with others."""
    model = make("plain", vocabulary=256).float()
    here, there = (TextModel(copy.deepcopy(model).to(device), ByteTokenizer(), "a" * 64) for device in ("cpu", "cuda"))
    session = there.session("hello", seed=3)
    there.save_session(session, tmp_path / "s")
    rest = list(session.write(20, Sampling()))
    assert list(there.session(state=tmp_path / "s").write(20, Sampling())) == rest
    assert len(list(here.session(state=tmp_path / "s").write(20, Sampling()))) == 20


def test_a_target_outside_the_vocabulary_fails_a_device_assertion() -> None:
    """In a separate process, because the device cannot be used afterwards."""
    code = (
        "import torch; from longspan.models.families import build; x = torch.zeros(1, 4, dtype=torch.int64).cuda();"
        "build('lstm', {'layers': 1, 'width': 16}).cuda().losses(x, x - 100); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "assert" in done.stderr
