"""What a reader of the numbers of a run must know: sentences for the notes of a `RunResult`."""

from memlab.config import StepConfig
from memlab.stages.run_settings import CacheKind, TrainingRun
from memlab.techniques.compiling.compilation import is_compiled


def notes_of_run(config: StepConfig, run: TrainingRun, *, is_cpu: bool) -> tuple[str, ...]:
    """Return the sentences of a run that was measured or predicted."""
    found = []
    if is_compiled(config):
        found.append(
            "torch.compile compiles in the first step, and once more for evaluation. On a card the "
            "trials of kernels while it compiles take memory of their own, which only a run there "
            "shows; what the C++ compiler and its code take on a CPU is not seen."
        )
    evaluation, generation = run.evaluate, run.generate
    if evaluation is not None and evaluation.num_samples is None:
        found.append("All batches of the evaluation take the same, so a few of them are enough.")
    if evaluation is not None and evaluation.to_host_every is not None:
        found.append(
            f"What {evaluation.to_host_every} batches of the evaluation keep goes to the host; "
            "host memory is not counted."
        )
    if generation is not None and generation.cache is CacheKind.STATIC and not is_cpu:
        found.append(
            "generate of transformers compiles the decoding with a static cache on a card, which "
            "is not in these numbers: they are those of eager decoding."
        )
    if run.save:
        found.append(
            "Saving is that of memlab.training_step(...).save; torch.save of a card's tensors "
            "copies them to the host one by one, and takes nothing more on the card."
        )
    return tuple(found)
