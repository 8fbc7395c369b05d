"""Model FLOPs utilisation: the matrix products of training per second, as a share of what the devices can do."""

from typing import Any

import torch

from longspan.contract import LanguageModel
from longspan.reading import Reading

# Dense bfloat16 FLOP/s by a part of the device's name, from NVIDIA's data sheets.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of a device; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def flops_per_token(parameters: int, model: Any, reading: Reading) -> float:
    """FLOPs of a training step per token by the convention of Chowdhery et al. 2022 (PaLM, appendix B):

        6 N + 12 layers heads head_size K          K = memory + half the segment, the keys that a query sees

    N are the parameters without the lookup table of an untied embedding. `model` is a config; one without heads has no
    attention. Sparse patterns and repeated layers are not taken into account.
    """
    width = getattr(model, "heads", 0) * getattr(model, "head_size", 0)
    return 6.0 * parameters + 12.0 * model.layers * width * (reading.memory + (reading.segment + 1) / 2)


def peak_tokens_per_second(model: LanguageModel, reading: Reading, device: torch.device, ranks: int) -> float | None:
    """Tokens per second at a utilisation of 1; None if the peak of the device is unknown. In fine-tuning,
    padding counts as tokens, and every document is assumed to be as long as memory and segment together."""
    peak = peak_flops(device)
    if peak is None:
        return None
    return ranks * peak / flops_per_token(model.multiplied_parameters, model.inner_config, reading)
