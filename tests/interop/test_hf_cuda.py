"""longspan models of `transformers` on a GPU: the numbers of the CPU, generation, a pipeline, training."""

from pathlib import Path

import numpy as np
import pytest
import torch

from longspan.text_model import TextModel
from longspan.tokenizers import ByteTokenizer
from tests.contract.conftest import VOCABULARY, make_model, stream
from tests.support import build

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, TrainingArguments, pipeline

import longspan.hf as hf
from tests.interop.test_hf import ONE_PER_FAMILY, left_padded

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
@torch.no_grad()
def test_a_loaded_model_gives_the_logits_and_the_text_of_the_cpu(name: str, tmp_path: Path) -> None:
    """In float64: a left-padded batch, read at once and continued greedily and with beams."""
    model = hf.LongspanForCausalLM.of(make_model(name, torch.float64))
    model.save_pretrained(tmp_path)
    on_gpu = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, device_map=DEVICE)
    assert {p.device.type for p in on_gpu.parameters()} == {DEVICE}
    ids, mask = left_padded([stream(1, 7, 1)[0][0], stream(1, 4, 2)[0][0]])
    there = {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(on_gpu(**there).logits.cpu(), expected, rtol=0, atol=1e-9)
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        wanted = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": VOCABULARY, **options}
        assert torch.equal(on_gpu.generate(**there, **wanted).cpu(), model.generate(ids, attention_mask=mask, **wanted))


def test_a_pipeline_on_a_gpu_writes_the_text_of_longspan(tmp_path: Path) -> None:
    values = {"vocabulary": 256, "layers": 1, "width": 16, "heads": 2, "memory": 12, "segment": 8, "same_length": True}
    ours = TextModel(build("longspan-xl", values), ByteTokenizer())
    ours.save(tmp_path / "ours")
    hf.export_hf(tmp_path / "ours", tmp_path / "theirs")
    generate = pipeline("text-generation", model=str(tmp_path / "theirs"), device=DEVICE)
    (found,) = generate("Thornby", max_new_tokens=20, do_sample=False, return_full_text=False)
    assert found["generated_text"] == ours.generate("Thornby", 20, temperature=0)


@pytest.mark.parametrize("family", ["longspan-xl", "transformer-xl", "lstm"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_on_a_gpu_learns_as_on_the_cpu(family: str, bf16: bool, tmp_path: Path) -> None:
    """The losses of 12 steps with memory: those of the CPU in float32, near them in bfloat16."""
    text = np.frombuffer(b"It was late in the evening when the carriage came. " * 40, np.uint8)
    size = {"vocabulary": 256, "layers": 2, "width": 32, "dropout": 0.0}  # devices draw different masks
    config = hf.LongspanConfig(family=family, model=size if family == "lstm" else {**size, "heads": 2})

    def losses(on_cpu: bool) -> list[float]:
        torch.manual_seed(1)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2, max_grad_norm=1.0,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=on_cpu, disable_tqdm=True,
            bf16=bf16 and not on_cpu,
        )  # fmt: skip
        data = hf.StreamDataset(text, rows=4, segment=32)
        trainer = hf.MemoryTrainer(hf.LongspanForCausalLM(config), arguments, train_dataset=data)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    found, expected = losses(on_cpu=DEVICE == "cpu"), losses(on_cpu=True)
    assert found[-1] < found[0] - 1.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.15 if bf16 else 0.02)
