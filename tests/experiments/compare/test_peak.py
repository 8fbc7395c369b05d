"""The peak memory of one block does not count towards the next."""

import numpy as np
import pytest
import torch

from longspan.experiments.compare.peak import peak_memory

BLOCK = 200 * 2**20


def test_each_block_has_its_own_peak() -> None:
    device = torch.device("cpu")
    with peak_memory(device) as before:
        pass
    with peak_memory(device) as large:
        np.ones(BLOCK, np.uint8).sum()
    with peak_memory(device) as small:
        pass
    if before.bytes is None or large.bytes is None or small.bytes is None:
        pytest.skip("this system does not reset its high-water mark")
    assert 0.9 * BLOCK < large.bytes - before.bytes < 1.3 * BLOCK
    assert small.bytes < before.bytes + 0.2 * BLOCK


@pytest.mark.gpu
def test_cuda_counts_tensors() -> None:
    device = torch.device("cuda")
    with peak_memory(device) as large:
        torch.ones(BLOCK, dtype=torch.uint8, device=device)
    with peak_memory(device) as small:
        torch.ones(BLOCK // 100, dtype=torch.uint8, device=device)
    assert large.bytes is not None
    assert small.bytes is not None
    assert large.bytes - small.bytes == pytest.approx(0.99 * BLOCK, rel=0.02)
