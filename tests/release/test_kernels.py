"""torch.compile with its real compiler: the losses of eager training, and kernels that the next run finds again."""

import pytest
import torch

from tests.support.compiled import MODES, assert_compiled_losses_match
from tests.support.runs import run, run_folder


@pytest.fixture(autouse=True)
def few_compilers(tmp_path, monkeypatch):
    """Let each test compile for this processor only, in its own folder, without processes that import torch again."""
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))


@pytest.mark.parametrize("case", MODES)
def test_compiled_kernels_give_the_losses_of_eager_training(tmp_path, case):
    torch._dynamo.reset()
    assert_compiled_losses_match(tmp_path, case)
    assert any((tmp_path / "kernels").rglob("*.so"))


def test_compiled_run_saves_original_weight_names_and_caches_kernels(small_yaml, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it when this process compiles
    # One block (the last computes only the class token) and only full batches: each other shape would be compiled
    # again.
    few = ["-compile", "blocks", "-opts", "DATA.BATCH_SIZE=359"]
    flags = ["-cfg", str(small_yaml), "-epochs", "1", "-output", str(tmp_path / "output"), *few]
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    run("main_single_gpu.py", *flags, environment=environment).done()
    names = torch.load(run_folder(tmp_path / "output") / "last.pth", weights_only=True)["state_dict"]
    assert "blocks.0.attn.qkv.weight" in names and not any("_orig_mod" in name for name in names)
    assert any((tmp_path / "halfstep" / "compile").rglob("*.so"))
