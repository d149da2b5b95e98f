import pytest
import torch

from memlab.devices import here
from memlab.memory import cuda


def test_a_container_limit_counts_when_it_is_the_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(here, "CGROUP", tmp_path)
    machine = here.available_memory_bytes()
    (tmp_path / "memory.max").write_text("2147483648\n")
    (tmp_path / "memory.current").write_text("1073741824\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1024\nactive_file 7\n")
    assert here.available_memory_bytes() == 2**30 + 1024 < machine
    (tmp_path / "memory.max").write_text("max\n")
    assert here.available_memory_bytes() > 2**31
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").unlink()
    assert here.available_memory_bytes() == 0  # nothing left, rather than no limit


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_cpu_has_no_caching_allocator():
    cpu = torch.device("cpu")
    assert len(here.describe(cpu)) > 3
    assert cuda.read_peaks(cpu) is None
    with cuda.limited_to(10, cpu):
        assert torch.ones(100).sum() == 100
    assert str(here.resolve_device(None)) == "cpu"
