"""A run over fake tensors: recorded once, and continued to all its batches and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from memlab.errors import UnsupportedError
from memlab.recording.assembly import Effect, layout_of, sizes_of
from memlab.recording.attention_notes import attention_notes_of_stages
from memlab.recording.fake_workload import over_fakes
from memlab.recording.program import Program
from memlab.recording.tracker import Tracker, record_fake
from memlab.saving.contents import saved_tensors, weights_in
from memlab.saving.peak import added_by_saving
from memlab.stages.asked_run import AskedRun
from memlab.stages.course import StageName, course, names_of
from memlab.stages.repeats import Rows, continued
from memlab.stages.run_settings import TrainingRun
from memlab.step import Step
from memlab.torch_private.dispatch import without_modes
from memlab.torch_private.fakes import FakeTensorMode
from memlab.trace import Phase, Trace

if TYPE_CHECKING:
    import numpy.typing as npt  # it costs 5 ms at import

MOST_BATCHES, MOST_TOKENS = 4, 5  # that are recorded
OWN_STATE = (
    "What the model's own state_dict makes for the checkpoint is not counted, since it needs "
    "values: on a CPU bitsandbytes, for one, gives 4-bit weights another format for it."
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunRecording:
    """A run over fake tensors.

    Attributes:
        program: its operators and blocks, as recorded.
        run: its stages.
        saving_bytes: what writing the checkpoint allocates.
    """

    program: Program
    run: TrainingRun
    saving_bytes: int

    def sizes(self, effects: Sequence[Effect | None]) -> npt.NDArray[np.int64]:
        """Return the bytes of every block as recorded, with the memory of the kernels."""
        return sizes_of(self.program.recording, self.program.layout, effects)

    def trace(self, own: npt.NDArray[np.int64]) -> Trace:
        """Return the trace of the whole run.

        Args:
            own: int64, (blocks,), bytes of every block as recorded.
        """
        rows = self._continued(self._with_saving(self._rows(own)))
        block, is_birth, interval, operator, module, stream = rows.columns
        nbytes = np.where(is_birth > 0, rows.sizes[block], -rows.sizes[block])
        real = nbytes != 0
        recording = self.program.recording
        return Trace(
            address=block[real],
            nbytes=nbytes[real],
            interval=interval[real].astype(np.int32),
            operator=operator[real].astype(np.int32),
            in_operator=is_birth[real] > 0,
            module=module[real].astype(np.int32),
            intervals=rows.intervals,
            operators=tuple(self.program.ran.names),
            modules=tuple(recording.modules),
            parameters=dict(recording.parameters),
            states=dict(recording.states),
            logits=recording.logits,
            leftover_bytes=0,
            stream=stream[real].astype(np.int32) if stream.any() else None,
        )

    def _rows(self, own: npt.NDArray[np.int64]) -> Rows:
        layout = self.program.layout
        stream = np.zeros_like(layout.block) if layout.stream is None else layout.stream
        columns = (
            layout.block, layout.is_birth, layout.interval, layout.operator, layout.module, stream,
        )  # fmt: skip
        return Rows(
            columns=np.array(columns, np.int64),
            sizes=own,
            intervals=tuple(self.program.recording.intervals),
        )

    def _with_saving(self, rows: Rows) -> Rows:
        """Return the run with what a checkpoint allocates, which runs no operators."""
        names = names_of(self.run)
        if StageName.SAVING not in names:
            return rows
        _, (interval,) = rows.of(names.index(StageName.SAVING), 0)
        at = int(np.searchsorted(rows.columns[2], interval, "right"))
        before = rows.columns[3, at - 1]
        block = len(rows.sizes)
        made = np.array([[block, is_birth, interval, before, -1, 0] for is_birth in (1, 0)]).T
        return replace(
            rows,
            columns=np.concatenate((rows.columns[:, :at], made, rows.columns[:, at:]), axis=1),
            sizes=np.append(rows.sizes, self.saving_bytes),
        )

    def _continued(self, rows: Rows) -> Rows:
        """Return the run with all batches and tokens; the last stage first, whose rows move."""
        names, run = names_of(self.run), self.run
        if run.generate is not None:
            wanted, number = run.generate.new_tokens, names.index(StageName.GENERATION)
            field = "generate: new_tokens"
            rows = continued(rows, number, min(wanted, MOST_TOKENS), wanted, field=field)
        if run.evaluate is not None:
            wanted, number = run.evaluate.num_batches, names.index(StageName.EVALUATION)
            field = "evaluate: num_samples / batch_size"
            rows = continued(rows, number, min(wanted, MOST_BATCHES), wanted, field=field)
        return rows


def record_run(asked: AskedRun, device: torch.device, tracker: Tracker) -> RunRecording:
    """Return a run as recorded over fake tensors.

    Raises:
        UnsupportedError: the model cannot do what a stage asks for.
    """
    saved: list[int] = []
    run, sizes = asked.run, asked.config.micro_batch_sizes

    def go(mode: FakeTensorMode) -> None:
        fake = over_fakes(asked.workload, mode, tracker)
        step = asked.build(device, partial(tracker.mark, -1), fake)
        tracker.know(step.model, step.with_loss)
        tracker.recording.parameter_formats = step.parameter_formats
        tracker.recording.notes += step.notes
        if step.scaler is not None:  # its first call allocates its scale, outside of any step
            tracker.mark(-1, Phase.BUILD, 0)
            step.scaler.scale(torch.zeros((), device=device))
        with tracker.modules(step.model):
            course(
                step,
                run,
                tracker.mark,
                seed=asked.seed,
                num_new_tokens=min(run.generate.new_tokens, MOST_TOKENS) if run.generate else 0,
                num_batches=min(run.evaluate.num_batches, MOST_BATCHES) if run.evaluate else 0,
                save=lambda: saved.append(_bytes_of_saving(step, tracker)),
                stepped=lambda: tracker.know_states(step.with_loss, step.optimizer),
            )
        tracker.recording.host_memory = step.host_memory
        tracker.recording.notes += attention_notes_of_stages(tracker.recording, names_of(run))
        tracker.mark(-1, Phase.TEARDOWN, 0)

    recording = record_fake(go, tracker)
    program = Program(
        recording=recording,
        ran=recording.ran(),
        layout=layout_of(recording),
        partners={},
        sizes=sizes,
        other_size=sizes[0],
        differs="the stages of a run are recorded once",
    )
    return RunRecording(program=program, run=run, saving_bytes=saved[-1] if saved else 0)


def _bytes_of_saving(step: Step, tracker: Tracker) -> int:
    """Return what writing a checkpoint of a recorded step allocates on its device."""
    found = None
    # asked for their state, quantized weights of bitsandbytes change their format
    if all(p.is_floating_point() for p in step.model.parameters()):
        with without_modes():  # what is only looked at is no operator of the run
            found = saved_tensors(step)
            if found is None:
                _check_saved(step)
    if found is None:
        tracker.recording.notes += (OWN_STATE,)
    is_cpu = step.device.type == "cpu"
    return added_by_saving(found or (), step.config, is_first=True, is_cpu=is_cpu).device_bytes


def _check_saved(step: Step) -> None:
    """Raise UnsupportedError if checkpoints of such a step are not implemented."""
    try:
        weights_in(step)
    except UnsupportedError:
        raise
    except Exception:  # the model's own `state_dict` needs values
        return
