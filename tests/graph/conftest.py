"""Compiled code is cached for one test session; every test starts without compiled graphs."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")  # C++ compilers at once
        patch.setenv("TORCH_WARM_POOL", "0")  # no compile processes, which only Triton uses
        yield


@pytest.fixture(autouse=True)
def no_graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
