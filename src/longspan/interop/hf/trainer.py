"""Training with the Trainer of `transformers` and with memory carried across batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer

from longspan.checkpoints.states import load_state, save_state
from longspan.contract import State
from longspan.data.batch_streams import BatchStreams
from longspan.errors import ConfigError
from longspan.interop.hf.cache import StateCache
from longspan.interop.hf.modeling import LongspanForCausalLM
from longspan.shapes import Tensor

Ids = NDArray[Any] | Sequence[int]
_MEMORY = "memory.safetensors"


class StreamDataset(Dataset[dict[str, Tensor]]):
    """A text as rows that are contiguous streams. Batch k of `rows` items has segment k of every row, in order, so each
    row continues where it ended in the batch before.

    `ids` are the tokens, `starts` the offsets of documents in them, and `segment` is the number of tokens per item. The
    last items of a pass may be shorter.
    """

    def __init__(self, ids: Ids, rows: int, segment: int, starts: Ids = ()) -> None:
        if segment < 1:
            raise ConfigError(f"segment={segment} must be at least 1")
        self.streams = BatchStreams(np.asarray(ids), np.asarray(starts, np.int64), rows)
        self.rows, self.segment = rows, segment

    def __len__(self) -> int:
        return self.rows * -(-self.streams.row_length // self.segment)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, row = divmod(index, self.rows)
        self.streams.position = step * self.segment
        batch = self.streams.next(self.segment, np.array([row]))
        arrays = {"input_ids": batch.tokens, "targets": batch.targets, "starts": batch.starts}
        return {name: torch.from_numpy(array[0]) for name, array in arrays.items()}


class MemoryTrainer(Trainer):
    """A Trainer that carries the memory of a longspan model from batch to batch.

    Datasets are StreamDatasets, whose `rows` are the batch size of all processes together. Batches stay in order. A
    checkpoint has the memory too, so a resumed run continues with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.model, LongspanForCausalLM):
            raise ConfigError(f"MemoryTrainer trains a LongspanForCausalLM, not a {type(self.model).__name__}")
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"MemoryTrainer needs one process per GPU, but this process has {self.args.n_gpu} GPUs; use torchrun"
            )
        self.label_names = ["targets"]
        self.memory: StateCache | None = None
        self.evaluation_memory: StateCache | None = None
        self._resumed_from: Path | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        self._require_rows(dataset, self.args.train_batch_size)
        return SequentialSampler(dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Sampler[int] | None:
        self._require_rows(eval_dataset, self.args.eval_batch_size)
        sampler: Sampler[int] | None = super()._get_eval_sampler(eval_dataset)
        return sampler

    def _require_rows(self, dataset: Any, batch: int) -> None:
        rows = batch * self.args.world_size
        if not isinstance(dataset, StreamDataset):
            raise ConfigError(f"MemoryTrainer needs a StreamDataset, not a {type(dataset).__name__}")
        if dataset.rows != rows:
            raise ConfigError(
                f"the StreamDataset has {dataset.rows} rows, but the batch of all processes has {rows}; make them equal"
            )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:  # num_items_in_batch is for losses that are sums
        """The loss of a batch that continues the one before it."""
        del num_items_in_batch
        memory = self.memory if model.training else self.evaluation_memory
        if memory is None and self._resumed_from is not None and model.training:
            memory = self._load_memory(self._resumed_from)
        if model.training:
            inputs = {**inputs, "progress": self.state.global_step / max(self.state.max_steps, 1)}
            if memory is None or bool(inputs["starts"][:, 0].all()):
                memory, inputs["starts"] = self._empty_memory(len(inputs["starts"])), _after_the_first(inputs["starts"])
        outputs = model(**inputs, past_key_values=memory, use_cache=True)
        if model.training:
            self.memory = outputs.past_key_values
        else:
            self.evaluation_memory = outputs.past_key_values
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _empty_memory(self, rows: int) -> StateCache:
        """Caches of their final size, as in longspan's own loop: `compressive` compresses blocks of their positions."""
        model: Any = self.accelerator.unwrap_model(self.model)
        return StateCache(model.model.initial_state(rows, filled=True, trainable=True))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        self.memory = self._resumed_from = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.evaluation_memory = None
        return super().evaluation_loop(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._resumed_from = Path(resume_from_checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.memory is not None and isinstance(self.memory.state, State):
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            save_state(folder / self._memory_name, self.memory.state, model_hash="")

    @property
    def _memory_name(self) -> str:
        """Every process has the memory of its own rows."""
        return _MEMORY if self.args.world_size == 1 else f"{self.args.process_index}-{_MEMORY}"

    def _load_memory(self, folder: Path) -> StateCache | None:
        self._resumed_from = None
        path = folder / self._memory_name
        if not path.is_file():
            return None
        model: Any = self.accelerator.unwrap_model(self.model)
        state, _ = load_state(path, model.model, model_hash="")
        return StateCache(state.to(self.args.device))


def _after_the_first(starts: Tensor) -> Tensor:
    """The starts without those at the first token, where all rows begin with an empty memory."""
    return torch.cat([torch.zeros_like(starts[:, :1]), starts[:, 1:]], dim=1)
