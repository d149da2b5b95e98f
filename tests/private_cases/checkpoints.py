"""Checkpoints of several ranks."""

import pickle

from torch.distributed.checkpoint.planner import SavePlan

from tests.private_cases.parts import arguments_of, at, case

MODULE = "torch.distributed.checkpoint.filesystem"


@case(f"{MODULE}._StorageInfo", to="know how large the list is of what ranks have written")
def _() -> None:
    kind = at(f"{MODULE}._StorageInfo")
    assert arguments_of(kind)[:3] == ["relative_path", "offset", "length"]
    assert pickle.loads(pickle.dumps(kind("a", 0, 1))) == kind("a", 0, 1)


@case(f"{MODULE}._StoragePrefix", to="know how large the list is of what ranks are to write")
def _() -> None:
    writer = at(f"{MODULE}.FileSystemWriter")
    plan = writer("nowhere").prepare_global_plan([SavePlan([])])[0]
    assert plan.storage_data == at(f"{MODULE}._StoragePrefix")("__0_")
