"""What the tests of the panel's predictions share."""

from memlab import StepConfig
from memlab._panel.forecasts import Estimate, Question
from memlab.result import Source
from tests.panel_parts import make_result

MIB = 2**20


def question(batch_size=8, steps=1, **changes):
    config = StepConfig(batch_size=batch_size, accumulation_steps=steps)
    return Question(**{"workload_name": "tiny", "config": config, "device": "cpu", **changes})


def predicted(peak=MIB, **changes):
    changes = {"source": Source.PREDICTED, "uncertainty": {"peak_allocated_bytes": 0.1}, **changes}
    return make_result(peak=peak, **changes)


def estimate(result, *, exact=True):
    asked = Question(result.workload_name, result.config, result.device)
    return Estimate(question=asked, result=result, exact=exact)
